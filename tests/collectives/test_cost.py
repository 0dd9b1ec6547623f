"""The calculator against counted messages."""

from __future__ import annotations

import functools

import pytest
import torch

from lightning_dp.collectives import cost, ring_all_reduce, ring_reduce_scatter, star_all_reduce
from lightning_dp.strategies.head_schedule import sub_passes
from tests.collectives.counting import count_messages
from tests.ranks import run_threads

SIZES = (0, 2, 24, 1003)


def call(rank, group, function, size):
    function(torch.ones(size, dtype=torch.float64), group)


def payload(monkeypatch, world_size, function, size):
    """(bytes, messages) that each rank sends, headers left out."""
    sent = count_messages(monkeypatch)
    run_threads(world_size, call, function, size)
    data = [[message for message in sent[rank] if message.dtype == torch.float64] for rank in range(world_size)]
    return [(sum(message.num_bytes for message in messages), len(messages)) for messages in data]


@pytest.mark.parametrize("world_size", [1, 2, 3, 6])
@pytest.mark.parametrize("size", SIZES)
def test_ring(world_size, size, monkeypatch):
    for rank, (num_bytes, messages) in enumerate(payload(monkeypatch, world_size, ring_all_reduce, size)):
        expected = cost.ring_cost(size, 8, world_size, rank)
        assert (expected.bytes_sent, expected.bytes_inside_group) == (num_bytes, 0)
        assert messages == expected.num_steps or size < world_size
    halves = payload(monkeypatch, world_size, ring_reduce_scatter, size)
    for rank, (num_bytes, messages) in enumerate(halves):
        expected = cost.half_ring_cost(size, 8, world_size, rank)
        assert expected.bytes_sent == num_bytes
        assert messages == expected.num_steps or size < world_size


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_star(world_size, monkeypatch):
    for rank, (num_bytes, _) in enumerate(payload(monkeypatch, world_size, star_all_reduce, 1003)):
        assert cost.star_cost(1003, 8, world_size, is_reducer=rank == 0).bytes_sent == num_bytes


def test_the_paper_s_example():
    # 300 million float32 over ten GPUs at 1 GB/s: the star takes "10.8 seconds"; the ring always less than 2.4.
    num_elements, bandwidth = 300_000_000, 1e9
    assert cost.star_cost(num_elements, 4, 10, is_reducer=True).time_bound_s(bandwidth) == pytest.approx(10.8)
    assert cost.star_cost(num_elements, 4, 2, is_reducer=True).time_bound_s(bandwidth) == pytest.approx(1.2)
    for world_size in (2, 10, 40):
        ring = cost.ring_cost(num_elements, 4, world_size)
        assert ring.time_bound_s(bandwidth) == pytest.approx(2.4 * (world_size - 1) / world_size)
        assert ring.num_steps == 2 * (world_size - 1)
    assert cost.ring_cost(num_elements, 4, 10).time_bound_s(bandwidth, latency_s=1.0) == pytest.approx(2.16 + 18)


def test_two_levels():
    # 4 groups of 3: what crosses is a ring of 4 for the leader, or a third of it for each member.
    size = 1200
    leader = cost.two_level_cost(size, 4, 4, 3)
    member = cost.two_level_cost(size, 4, 4, 3, local_rank=2)
    assert (leader.bytes_between_groups, leader.bytes_inside_group) == (2 * 3 * 300 * 4, 2 * size * 4)
    assert (member.bytes_between_groups, member.bytes_inside_group) == (0, size * 4)
    assert leader.num_steps == member.num_steps == 2 + 6
    for local_rank in range(3):
        sharded = cost.two_level_cost(size, 4, 4, 3, "sharded", local_rank)
        assert (sharded.bytes_between_groups, sharded.bytes_inside_group) == (2 * 3 * 100 * 4, 2 * 800 * 4)
        assert sharded.num_steps == 2 + 6 + 2


@pytest.mark.parametrize("communicator", ["leader", "sharded"])
def test_two_levels_of_one_are_one(communicator):
    assert cost.two_level_cost(1003, 4, 5, 1, communicator) == cost.ring_cost(1003, 4, 5)
    assert cost.two_level_cost(1003, 4, 1, 5, communicator).bytes_between_groups == 0


def test_sharded_members_send_a_group_s_ring_among_them():
    shares = [cost.two_level_cost(1003, 4, 4, 3, "sharded", rank).bytes_between_groups for rank in range(3)]
    # Chunks of shares differ by one element from chunks of the whole.
    assert sum(shares) == pytest.approx(cost.ring_cost(1003, 4, 4).bytes_sent, abs=2 * 3 * 4)


@pytest.mark.parametrize("scheme", ["a", "b", "c"])
def test_hybrid(scheme):
    # 4 ranks, 10 samples each; 28 features and 20 hidden values enter the two divided layers, 8 classes leave them.
    cost_of = functools.partial(cost.hybrid_cost, 400, [28, 20, 8], [10] * 4, 4, scheme)
    passes = 1 if scheme == "a" else 4
    shared = 2 * 3 * 100 * 4 + 2 * 3 * 10 * (28 + 20) * 4 + 3 * 24
    logistic, softmax, own = cost_of("logistic"), cost_of("softmax"), cost_of("own")
    assert logistic.bytes_sent == shared + 3 * 10 * 8 + 3 * passes * 4
    assert softmax.bytes_sent == shared + 3 * 10 * 8 + 3 * 4 * 40 * 4
    assert own.bytes_sent == shared + 2 * 3 * 10 * 2 * 4
    # The ring; sizes and targets; features, hidden activations and their gradients, and the loss, in each pass.
    assert logistic.num_steps == 6 + 2 + passes * 5
    assert softmax.num_steps == 6 + 2 + passes * 6
    assert own.num_steps == 6 + 1 + passes * 6


def test_hybrid_of_one_rank_sends_nothing():
    assert cost.hybrid_cost(400, [30, 8], [10], 4) == cost.Cost(0, 0)


@pytest.mark.parametrize("sizes", [(0,), (0, 0), (1, 0, 0), (0, 2, 1), (1, 1, 1, 1), (0, 5, 0, 1), (3, 0, 0, 0)])
@pytest.mark.parametrize("scheme", ["a", "b", "c"])
def test_passes_without_examples_are_not_counted(sizes, scheme):
    features = cost.head_traffic([1, 1], sizes, 1, scheme)["features"]
    assert features.num_steps == (len(sub_passes(scheme, sizes)) if len(sizes) > 1 else 0)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda: cost.ring_cost(-1, 4, 2), "num_elements=-1"),
        (lambda: cost.ring_cost(1, 4, 2, rank=2), "rank=2 is not in a group of 2; use 0 to 1"),
        (lambda: cost.star_cost(1, 4, 0, True), "at least 1"),
        (lambda: cost.two_level_cost(1, 4, 2, 2, "all"), "use leader or sharded"),
        (lambda: cost.hybrid_cost(1, [1, 1], [1, 1], 4, "d"), "use a, b or c"),
        (lambda: cost.hybrid_cost(1, [1, 1], [1, 1], 4, "a", "hinge"), "use own, logistic or softmax"),
        (lambda: cost.hybrid_cost(1, [1], [1, 1], 4), "use two widths or more"),
        (lambda: cost.hybrid_cost(1, [1, -1], [1, 1], 4), "none below 0"),
        (lambda: cost.head_traffic([1, 1], [1, 1], 4, rank=2), "rank=2 is not in a group of 2"),
    ],
)
def test_impossible_arguments_are_refused(function, message):
    with pytest.raises(ValueError, match=message):
        function()
