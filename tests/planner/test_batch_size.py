"""Equation 6 against exhaustive search, and the choice of the batch size."""

from __future__ import annotations

import itertools
import random

import pytest

from lightning_dp.planner import Candidate, Choice, choose_algorithms, choose_batch_size
from lightning_dp.planner.convolutions.program import held_bytes


def random_layers(rng: random.Random, num_layers: int) -> dict[str, list[Choice]]:
    scale = rng.choice([1, 1000, 10**8])
    return {
        f"conv{place}": [
            Choice(
                name, rng.random() * 10 ** rng.randint(-3, 0), scale * rng.randint(0, 50), scale * rng.randint(0, 99)
            )
            for name in ("gemm", "fft", "winograd")[: rng.randint(1, 3)]
        ]
        for place in range(num_layers)
    }


def exhaustive(layers: dict[str, list[Choice]], bound_bytes: int) -> float | None:
    """The least time of all combinations that fit."""
    fitting = [chosen for chosen in itertools.product(*layers.values()) if held_bytes(chosen) <= bound_bytes]
    return min((sum(choice.time_s for choice in chosen) for chosen in fitting), default=None)


@pytest.mark.parametrize("seed", range(25))
def test_the_choice_is_the_best_of_all_combinations(seed):
    rng = random.Random(seed)
    layers = random_layers(rng, rng.randint(1, 6))
    most = held_bytes([max(choices, key=lambda c: c.num_bytes) for choices in layers.values()])
    for bound in (0, most // 4, most // 2, most, 2 * most):
        best = exhaustive(layers, bound)
        chosen = choose_algorithms(layers, bound)
        assert (chosen is None) == (best is None)
        if chosen is not None:
            assert list(chosen) == list(layers)
            assert held_bytes(list(chosen.values())) <= bound
            assert sum(choice.time_s for choice in chosen.values()) == pytest.approx(best, rel=1e-9)


def test_a_bound_that_is_exactly_reached_is_kept_and_one_byte_less_is_not():
    layers = {f"conv{i}": [Choice("fft", 1.0, 10**9 + i), Choice("gemm", 2.0)] for i in range(5)}
    bound = held_bytes([choices[0] for choices in layers.values()])
    assert {c.algorithm for c in choose_algorithms(layers, bound).values()} == {"fft"}
    assert [c.algorithm for c in choose_algorithms(layers, bound - 1).values()].count("gemm") == 1


def test_a_larger_batch_may_be_slower_because_of_slower_algorithms():
    """The paper's Figure 2: throughput falls when memory no longer allows the fast algorithm."""

    def candidate(size: int) -> Candidate:
        layers = {"conv": [Choice("gemm", 0.02 * size, 0), Choice("fft", 0.01 * size, 100 * size)]}
        return Candidate(size, layers, bound_bytes=10_000 - 50 * size, other_s=0.1)

    plan = choose_batch_size([candidate(size) for size in (16, 32, 64, 128)])
    assert (plan.batch_size, plan.algorithms) == (64, {"conv": "fft"})
    assert plan.images_per_s[128, ""] < plan.images_per_s[64, ""]
    assert plan.step_s == pytest.approx(0.1 + 0.64)
    assert plan.table().splitlines()[2].startswith("| 64 | none | 86.5 |")


def test_recomputation_is_a_further_choice():
    layers = {"conv": [Choice("gemm", 1.0)]}
    plain = Candidate(8, layers, 100, other_s=1.0)
    roomy = Candidate(16, layers, 100, other_s=1.5, recompute="cheap")
    too_large = Candidate(16, layers, -1, other_s=1.0)
    plan = choose_batch_size([plain, too_large, roomy])
    assert (plan.batch_size, plan.recompute) == (16, "cheap")
    assert set(plan.images_per_s) == {(8, ""), (16, "cheap")}


def test_of_equal_rates_the_smaller_batch_wins():
    sizes = [Candidate(size, {}, 0, other_s=float(size)) for size in (64, 8, 32)]
    assert choose_batch_size(sizes).batch_size == 8


def test_candidates_without_a_solution_are_refused():
    layers = {"conv": [Choice("gemm", 1.0, 30, 5), Choice("fft", 0.5, 90)]}
    with pytest.raises(ValueError, match=r"none of the batch sizes \[8, 16\] fits into memory; add smaller ones, or"):
        choose_batch_size([Candidate(16, layers, 10), Candidate(8, layers, 20)])
    with pytest.raises(ValueError, match=r"candidates=\[\] must be different batch sizes"):
        choose_batch_size([])
    with pytest.raises(ValueError, match="different batch sizes"):
        choose_batch_size([Candidate(8, {}, 0, 1.0), Candidate(8, {}, 0, 1.0)])
    with pytest.raises(ValueError, match="takes no time"):
        choose_batch_size([Candidate(8, {}, 0)])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Choice("fft", -1.0), "time_s of 'fft'=-1.0"),
        (lambda: Choice("fft", 1.0, -5), "num_bytes of 'fft'=-5"),
        (lambda: Candidate(0, {}, 0), "batch_size=0"),
        (lambda: Candidate(1, {"conv": []}, 0), "layer 'conv' has no algorithm"),
    ],
)
def test_bad_numbers_are_refused_by_name(make, message):
    with pytest.raises(ValueError, match=message):
        make()
