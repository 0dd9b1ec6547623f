"""Computed communication cost compared with counted messages."""

from __future__ import annotations

import pytest
import torch

from lightning_dp.collectives import ring_all_reduce, ring_reduce_scatter, star_all_reduce
from lightning_dp.planner import traffic
from tests.collectives.counting import count_messages
from tests.ranks import run_threads

SIZES = (0, 2, 24, 1003)


def call(rank, group, function, size):
    function(torch.ones(size, dtype=torch.float64), group)


def payload(monkeypatch, world_size, function, size):
    """The number of bytes and of messages that each rank sends, without headers."""
    sent = count_messages(monkeypatch)
    run_threads(world_size, call, function, size)
    data = [[message for message in sent[rank] if message.dtype == torch.float64] for rank in range(world_size)]
    return [(sum(message.num_bytes for message in messages), len(messages)) for messages in data]


@pytest.mark.parametrize("world_size", [1, 2, 3, 6])
@pytest.mark.parametrize("size", SIZES)
def test_ring(world_size, size, monkeypatch):
    for rank, (num_bytes, messages) in enumerate(payload(monkeypatch, world_size, ring_all_reduce, size)):
        expected = traffic.ring_cost(size, 8, world_size, rank)
        assert (expected.bytes_sent, expected.intra_group_bytes) == (num_bytes, 0)
        assert messages == expected.num_steps or size < world_size
    halves = payload(monkeypatch, world_size, ring_reduce_scatter, size)
    for rank, (num_bytes, messages) in enumerate(halves):
        expected = traffic.half_ring_cost(size, 8, world_size, rank)
        assert expected.bytes_sent == num_bytes
        assert messages == expected.num_steps or size < world_size


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_star(world_size, monkeypatch):
    for rank, (num_bytes, _) in enumerate(payload(monkeypatch, world_size, star_all_reduce, 1003)):
        assert traffic.star_cost(1003, 8, world_size, is_reducer=rank == 0).bytes_sent == num_bytes


def test_the_example_of_the_paper():
    # 300 million float32 over ten GPUs at 1 GB/s: the star takes "10.8 seconds"; the ring always less than 2.4.
    num_elements, bandwidth = 300_000_000, 1e9
    assert traffic.star_cost(num_elements, 4, 10, is_reducer=True).time_bound_s(bandwidth) == pytest.approx(10.8)
    assert traffic.star_cost(num_elements, 4, 2, is_reducer=True).time_bound_s(bandwidth) == pytest.approx(1.2)
    for world_size in (2, 10, 40):
        ring = traffic.ring_cost(num_elements, 4, world_size)
        assert ring.time_bound_s(bandwidth) == pytest.approx(2.4 * (world_size - 1) / world_size)
        assert ring.num_steps == 2 * (world_size - 1)
    assert traffic.ring_cost(num_elements, 4, 10).time_bound_s(bandwidth, latency_s=1.0) == pytest.approx(2.16 + 18)


def test_hierarchical():
    # 4 groups of 3. Between groups, the leader sends a ring of 4 ranks, or each member a third of it.
    size = 1200
    leader = traffic.hierarchical_cost(size, 4, 4, 3)
    member = traffic.hierarchical_cost(size, 4, 4, 3, group_rank=2)
    assert (leader.inter_group_bytes, leader.intra_group_bytes) == (2 * 3 * 300 * 4, 2 * size * 4)
    assert (member.inter_group_bytes, member.intra_group_bytes) == (0, size * 4)
    assert leader.num_steps == member.num_steps == 2 + 6
    for group_rank in range(3):
        sharded = traffic.hierarchical_cost(size, 4, 4, 3, "sharded", group_rank)
        assert (sharded.inter_group_bytes, sharded.intra_group_bytes) == (2 * 3 * 100 * 4, 2 * 800 * 4)
        assert sharded.num_steps == 2 + 6 + 2


@pytest.mark.parametrize("communicator", ["leader", "sharded"])
def test_hierarchical_cost_with_one_level_is_that_of_a_ring(communicator):
    assert traffic.hierarchical_cost(1003, 4, 5, 1, communicator) == traffic.ring_cost(1003, 4, 5)
    assert traffic.hierarchical_cost(1003, 4, 1, 5, communicator).inter_group_bytes == 0


def test_sharded_members_together_send_the_bytes_of_one_ring():
    shards = [traffic.hierarchical_cost(1003, 4, 4, 3, "sharded", rank).inter_group_bytes for rank in range(3)]
    # Chunks of shards differ by one element from chunks of the whole.
    assert sum(shards) == pytest.approx(traffic.ring_cost(1003, 4, 4).bytes_sent, abs=2 * 3 * 4)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda: traffic.ring_cost(-1, 4, 2), "num_elements=-1"),
        (lambda: traffic.ring_cost(1, 4, 2, rank=2), "rank=2 is not in a group of 2; use 0 to 1"),
        (lambda: traffic.star_cost(1, 4, 0, True), "at least 1"),
        (lambda: traffic.hierarchical_cost(1, 4, 2, 2, "all"), "use leader or sharded"),
    ],
)
def test_invalid_arguments_are_refused(function, message):
    with pytest.raises(ValueError, match=message):
        function()
