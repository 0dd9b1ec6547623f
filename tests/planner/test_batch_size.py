"""Equation 6 against exhaustive search, and the choice of the batch size."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections import UserDict
from typing import Any, NamedTuple

import pytest
import torch
import torchmetrics
from torch import nn

from lightning_dp.models import resnet20
from lightning_dp.planner import (
    Candidate,
    Choice,
    apply_algorithms,
    candidates,
    choose_algorithms,
    choose_batch_size,
    convolution_choices,
    layer_choices,
    measured_plans,
    plan_batch_size,
)
from lightning_dp.planner.batch_size import held_bytes
from lightning_dp.planner.candidates import StepMeasurement, measure_candidates, measure_step, resized
from lightning_dp.planner.measured_plans import measure_plans


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


def test_candidates_without_a_solution_are_refused_with_the_missing_bytes():
    layers = {"conv": [Choice("gemm", 1.0, 30, 5), Choice("fft", 0.5, 90)]}
    with pytest.raises(ValueError, match=r"none of the batch sizes \[8, 16\] fits into memory: .* lacks 15 bytes"):
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


def network() -> nn.Sequential:
    blocks = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2), nn.ReLU()]
    return nn.Sequential(*blocks, nn.Flatten(), nn.LazyLinear(5))


def chosen_algorithm(layer: nn.Module) -> str:
    return vars(layer)["forward"]._algorithm if "forward" in vars(layer) else "backend"


def test_measured_candidates_lead_to_a_plan_that_can_be_applied():
    model, images = network(), torch.randn(4, 3, 14, 14)
    model(images)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model[0].weight.grad = torch.ones_like(model[0].weight)
    large = measure_step(model, resized(images, 16), repeats=1).total_bytes
    # 16 images fit, 32 do not: memory grows linearly.
    measured = measure_candidates(
        model, images, (8, 4, 16, 32), memory_bytes=large + large // 4, recompute=(None, "cheap"), repeats=1
    )
    plain = [candidate.batch_size for candidate in measured if not candidate.recompute]
    assert plain == [4, 8, 16]
    assert all(name in ("0", "3") for candidate in measured for name in candidate.layers)
    plan = choose_batch_size(measured)
    with torch.no_grad():
        expected = model.eval()(images)
        apply_algorithms(model, plan.algorithms)
        torch.testing.assert_close(model(images), expected, rtol=1e-4, atol=1e-5)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model[0].weight.grad.eq(1).all(), "measuring keeps gradients"
    assert model[3].weight.grad is None


def test_using_the_backend_everywhere_takes_the_memory_that_was_measured():
    model, images = network(), torch.randn(4, 3, 14, 14)
    model(images)
    total = measure_step(model, images, repeats=1).total_bytes
    (candidate,) = measure_candidates(model, images, [4], memory_bytes=10**9, optimizer_bytes=1000, repeats=1)
    used = [choices[0] for choices in candidate.layers.values()]
    assert candidate.bound_bytes == 10**9 - 1000 - total + held_bytes(used)


def test_a_plan_is_run_and_gets_the_memory_that_it_really_leaves(monkeypatch):
    model, images = network(), torch.randn(4, 3, 14, 14)
    model(images)
    steps = []

    def measured(model, batch, loss, recompute, repeats):
        formats = [chosen_algorithm(model[place]) for place in (0, 3)]
        steps.append(formats)
        # Together they hold nothing, and take half the time.
        return StepMeasurement(0.5 if formats == ["channels_last"] * 2 else 1.0, 1000)

    # By itself each holds 600 bytes, and there is room for one of them.
    layers = {name: [Choice("backend", 1.0), Choice("channels_last", 0.1, 600)] for name in ("0", "3")}
    monkeypatch.setattr(measured_plans, "measure_step", measured)
    (plan,) = measure_plans(model, images, [Candidate(4, layers, 1000, 1.0)], memory_bytes=2000)
    assert steps[0].count("channels_last") == 1
    assert steps[1] == ["channels_last"] * 2, "the first one held 1000 bytes with 600 of its own: 1600 are left"
    assert plan.algorithms == {"0": "channels_last", "3": "channels_last"}
    assert (plan.step_s, plan.peak_bytes) == (0.5, 1000)


def test_a_plan_that_holds_more_than_there_is_does_not_count(monkeypatch):
    model, images = network(), torch.randn(4, 3, 14, 14)
    model(images)

    def measured(model, batch, loss, recompute, repeats):
        if chosen_algorithm(model[0]) == "channels_last":
            raise torch.OutOfMemoryError
        return StepMeasurement(1.0, 1000)

    layers = {name: [Choice("backend", 1.0), Choice("channels_last", 0.1)] for name in ("0", "3")}
    monkeypatch.setattr(measured_plans, "measure_step", measured)
    (plan,) = measure_plans(model, images, [Candidate(4, layers, 1000, 1.0)], memory_bytes=2000)
    assert plan.algorithms["0"] == "backend"
    assert measure_plans(model, images, [Candidate(4, layers, 1000, 1.0)], memory_bytes=999) == []


def test_planned_peaks_are_those_of_the_plan_s_step():
    model, images = network(), torch.randn(4, 3, 14, 14)
    model(images)
    plan = plan_batch_size(model, images, (4, 16), memory_bytes=10**9, recompute=(None, "cheap"), repeats=1)
    assert set(plan.images_per_s) == {(4, ""), (4, "cheap"), (16, ""), (16, "cheap")}
    apply_algorithms(model, plan.algorithms)  # also a proof that measuring has taken its own off
    again = measure_step(model, resized(images, plan.batch_size), recompute=plan.recompute or None, repeats=1)
    assert plan.peak_bytes == again.total_bytes


def test_memory_that_holds_no_batch_is_refused_before_a_plan():
    model, images = network(), torch.randn(4, 3, 14, 14)
    model(images)
    with pytest.raises(ValueError, match=r"memory_bytes=1000 holds none of batch_sizes=\[4, 8\]: the smallest needs"):
        measure_candidates(model, images, [8, 4], memory_bytes=1000, repeats=1)
    with pytest.raises(ValueError, match="memory_bytes=-1"):
        measure_candidates(model, images, [8, 4], memory_bytes=-1)
    with pytest.raises(ValueError, match="batch_sizes=0"):
        measure_candidates(model, images, [0], memory_bytes=10**9)


@dataclasses.dataclass
class Labeled:
    image: torch.Tensor
    label: torch.Tensor

    def __getitem__(self, place: int) -> torch.Tensor:
        return self.label if place else self.image


@pytest.mark.parametrize(
    "make",
    [
        tuple,
        list,
        lambda pair: dict(enumerate(pair)),
        lambda pair: UserDict(enumerate(pair)),
        lambda pair: Labeled(*pair),
    ],
    ids=["tuple", "list", "dict", "mapping", "dataclass"],
)
def test_batches_that_only_the_loss_can_read(make):
    model, images, labels = network(), torch.randn(4, 3, 14, 14), torch.arange(4)
    model(images)
    batch = make((images, labels))

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    counted = measure_step(model, batch, loss, repeats=1).total_bytes
    assert counted == measure_step(model, (images, labels), loss, repeats=1).total_bytes
    plan = plan_batch_size(model, batch, (2, 4), 10**9, loss, repeats=1)
    assert set(plan.images_per_s) == {(2, ""), (4, "")}
    assert set(plan.algorithms) == {"0", "3"}


def test_lists_of_sizes_and_policies_are_checked_first():
    for sizes, policies in (((), (None,)), ((4,), ()), ((4,), "cheap"), ((4,), (None, None))):
        with pytest.raises(ValueError, match="give at least one of each"):
            measure_candidates(network(), torch.randn(4, 3, 14, 14), sizes, 10**9, recompute=policies)


def test_recomputation_that_the_loss_goes_around_is_named(caplog):
    model, images = resnet20(), torch.randn(4, 3, 16, 16)
    measure_step(model, images, recompute="cheap", repeats=1)
    assert not caplog.records
    measure_step(model, images, lambda m, x: m.forward(x).square().mean(), "cheap", repeats=1)
    assert not caplog.records, "forward is what recomputes"
    measure_step(model, images, lambda m, x: type(m).forward(m, x).square().mean(), "cheap", repeats=1)
    assert "recompute='cheap' keeps everything in this step" in caplog.text


def around(model: nn.Module, batch: Any) -> torch.Tensor:
    return type(model).forward(model, batch).square().mean()


def test_recomputation_that_does_nothing_is_not_chosen():
    model, images = resnet20(), torch.randn(4, 3, 16, 16)
    plan = plan_batch_size(model, images, (4,), 10**9, around, recompute=("cheap", None), repeats=1)
    assert set(plan.images_per_s) == {(4, "")}
    with pytest.raises(ValueError, match=r"recompute='cheap' keeps everything .*; use recompute=\(None,\)"):
        plan_batch_size(model, images, (4,), 10**9, around, recompute=("cheap",), repeats=1)


def test_plans_are_run_with_their_recomputation():
    model, images = resnet20(), torch.randn(8, 3, 16, 16)
    plan = plan_batch_size(model, images, (8,), 10**9, recompute=("cheap",), repeats=1)
    apply_algorithms(model, plan.algorithms)
    assert plan.recompute == "cheap"
    assert plan.peak_bytes == measure_step(model, images, recompute="cheap", repeats=1).total_bytes
    assert plan.peak_bytes < measure_step(model, images, repeats=1).total_bytes


def test_the_optimizer_s_state_takes_memory_from_the_plans(monkeypatch):
    model, images = network(), torch.randn(4, 3, 14, 14)
    model(images)
    asked = []
    run = measured_plans.measure_plans

    def measure(model, batch, candidates, memory_bytes, loss, repeats):
        asked.append(memory_bytes)
        return run(model, batch, candidates, memory_bytes, loss, repeats)

    monkeypatch.setattr(measured_plans, "measure_plans", measure)
    plan_batch_size(model, images, (4,), 10**9, optimizer_bytes=1000, repeats=1)
    assert asked == [10**9 - 1000]
    with pytest.raises(ValueError, match="optimizer_bytes=-1"):
        plan_batch_size(model, images, (4,), 10**9, optimizer_bytes=-1)


def test_each_algorithm_that_is_fast_enough_is_run_in_all_layers(monkeypatch):
    model, images = network(), torch.randn(4, 3, 14, 14)
    model(images)
    steps = []

    def measured(model, batch, loss, recompute, repeats):
        steps.append(tuple(chosen_algorithm(model[place]) for place in (0, 3)))
        return StepMeasurement(0.5 if steps[-1] == ("channels_last", "channels_last") else 1.0, 1000)

    choices = [Choice("backend", 1.0), Choice("channels_last", 1.4), Choice("fft", 1.6)]
    monkeypatch.setattr(measured_plans, "measure_step", measured)
    (plan,) = measure_plans(model, images, [Candidate(4, {"0": choices, "3": choices}, 1000, 1.0)], memory_bytes=2000)
    assert steps == [("backend", "backend"), ("channels_last", "channels_last")]
    assert plan.algorithms == {"0": "channels_last", "3": "channels_last"}


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = network()
        self.images = torchmetrics.SumMetric()
        self.sizes = torchmetrics.CatMetric()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.images(len(images))
        self.sizes.update(float(len(images)))
        return self.layers(images)


def test_metrics_do_not_count_what_is_measured():
    model, images = Counting(), torch.randn(4, 3, 14, 14)
    model(images)
    plan_batch_size(model, images, (2, 4), 10**9, recompute=(None, "cheap"), repeats=1)
    assert model.images.compute() == 4
    assert model.sizes.compute().tolist() == [4.0] or model.sizes.compute() == 4
    assert model.images.update_count == 1


def test_a_host_without_memory_for_an_algorithm_leaves_it_out(monkeypatch):
    model, images = network(), torch.randn(4, 3, 14, 14)
    model(images)
    run = layer_choices.measure_convolution

    def measured(module, shape, algorithm, *args):
        if algorithm == "fft":
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4294967296 bytes")
        if algorithm == "im2col":
            raise RuntimeError("another error")
        return run(module, shape, algorithm, *args)

    monkeypatch.setattr(layer_choices, "measure_convolution", measured)
    with pytest.raises(RuntimeError, match="another error"):
        measure_candidates(model, images, (4,), 10**9, repeats=1)
    monkeypatch.setattr(layer_choices, "algorithms_for", lambda module: ("backend", "fft"))
    (candidate,) = measure_candidates(model, images, (4,), 10**9, repeats=1)
    assert [choice.algorithm for choice in candidate.layers["0"]] == ["backend"]


def test_spectra_that_do_not_fit_are_not_tried():
    layer = nn.Sequential(nn.Conv2d(64, 64, 1))
    images = torch.randn(1, 64, 30, 30)  # 64 x 64 filters as spectra of 30 x 16 complex numbers: 15.7 MB
    names = [[c.algorithm for c in convolution_choices(layer, images, 1, memory_bytes=b)["0"]] for b in (10**7, 10**8)]
    assert "fft" not in names[0]
    assert "fft" in names[1]


def test_sizes_after_one_that_does_not_fit_are_not_run(monkeypatch):
    model, images = network(), torch.randn(4, 3, 14, 14)
    model(images)
    sizes = []
    run = measure_step
    monkeypatch.setattr(
        candidates, "measure_step", lambda model, batch, *args: sizes.append(len(batch)) or run(model, batch, *args)
    )
    with pytest.raises(ValueError, match="memory_bytes=1000 holds none"):
        measure_candidates(model, images, (4, 8, 16), 1000, repeats=1)
    assert sizes == [4]
    with pytest.raises(ValueError, match="policy='chep'"):
        measure_candidates(model, images, (4,), 10**9, recompute=(None, "chep"))
    assert sizes == [4], "refused before anything is run"


class Pair(NamedTuple):
    image: torch.Tensor
    scale: torch.Tensor


def test_resizing_keeps_containers_and_memory_formats():
    image = torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    larger = resized(UserDict(pair=Pair(image, torch.tensor(2.0))), 5)["pair"]
    assert larger.image.shape == (5, 3, 4, 4)
    assert larger.image.is_contiguous(memory_format=torch.channels_last)
    assert larger.scale == 2
    with pytest.raises(ValueError, match="no images were found in the batch, a object"):
        resized(object(), 5)


def test_a_batch_is_resized_by_its_rows():
    batch = {"image": torch.arange(3), "pair": (torch.arange(6).view(3, 2), "name")}
    larger = resized(batch, 5)
    assert larger["image"].tolist() == [0, 1, 2, 0, 1]
    assert larger["pair"][0].shape == (5, 2)
    assert larger["pair"][1] == "name"
    assert resized(batch, 2)["image"].tolist() == [0, 1]
