"""The bytes of hybrid parallelism by the formula; `test_traffic` holds it against counted messages."""

from __future__ import annotations

import functools

import pytest

from lightning_dp.planner import traffic
from lightning_dp.planner.traffic import Cost
from lightning_dp.strategies.krizhevsky_hybrid.exchange import sub_passes


@pytest.mark.parametrize("scheme", ["a", "b", "c"])
def test_hybrid(scheme):
    # 4 ranks, 10 samples each; 28 features and 20 hidden values enter the two divided layers, 8 classes leave them.
    cost_of = functools.partial(traffic.hybrid_cost, 400, [28, 20, 8], [10] * 4, 4, scheme)
    passes = 1 if scheme == "a" else 4
    shared = 2 * 3 * 100 * 4 + 2 * 3 * 10 * (28 + 20) * 4 + 3 * 24
    logistic, cross_entropy, own = cost_of("logistic"), cost_of("cross_entropy"), cost_of("own")
    assert logistic.bytes_sent == shared + 3 * 10 * 8 + 3 * passes * 4
    assert cross_entropy.bytes_sent == shared + 3 * 10 * 8 + 3 * 4 * 40 * 4
    assert own.bytes_sent == shared + 2 * 3 * 10 * 2 * 4
    gathered = cost_of("gathered")
    assert gathered.bytes_sent == shared + 3 * 10 * 8 + 3 * 40 * 2 * 4
    assert gathered.num_steps == 6 + 2 + passes * 5
    # The ring; sizes and targets; features, hidden activations and their gradients, and the loss, in each pass.
    assert logistic.num_steps == 6 + 2 + passes * 5
    assert cross_entropy.num_steps == 6 + 2 + passes * 6
    assert own.num_steps == 6 + 1 + passes * 6


def test_fewer_passes_make_fewer_exchanges_of_the_same_bytes():
    four, two = (traffic.head_traffic([28, 20, 8], [10] * 4, 4, "c", "own", num_passes=number) for number in (None, 2))
    for what in ("features", "hidden gradients", "logits"):
        assert four[what].bytes_sent == two[what].bytes_sent
        assert four[what].num_steps == 2 * two[what].num_steps


def test_hybrid_of_one_rank_sends_nothing():
    assert traffic.hybrid_cost(400, [30, 8], [10], 4) == Cost(0, 0)


@pytest.mark.parametrize("sizes", [(0,), (0, 0), (1, 0, 0), (0, 2, 1), (1, 1, 1, 1), (0, 5, 0, 1), (3, 0, 0, 0)])
@pytest.mark.parametrize("scheme", ["a", "b", "c"])
def test_passes_without_examples_are_not_counted(sizes, scheme):
    features = traffic.head_traffic([1, 1], sizes, 1, scheme)["features"]
    assert features.num_steps == (len(sub_passes(scheme, sizes)) if len(sizes) > 1 else 0)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda: traffic.hybrid_cost(1, [1, 1], [1, 1], 4, "d"), "use a, b or c"),
        (
            lambda: traffic.hybrid_cost(1, [1, 1], [1, 1], 4, "a", "hinge"),
            "use own, gathered, logistic",
        ),
        (lambda: traffic.hybrid_cost(1, [1], [1, 1], 4), "use two widths or more"),
        (lambda: traffic.hybrid_cost(1, [1, -1], [1, 1], 4), "none below 0"),
        (lambda: traffic.head_traffic([1, 1], [1, 1], 4, rank=2), "rank=2 is not in a group of 2"),
    ],
)
def test_impossible_arguments_are_refused(function, message):
    with pytest.raises(ValueError, match=message):
        function()
