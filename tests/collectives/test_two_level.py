from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist

from lightning_dp.collectives.topology import RankTopology
from lightning_dp.collectives.two_level import TwoLevelAllReduce
from tests.ranks import run_processes

SIZE = 7  # no group size divides it


def value(rank: int) -> torch.Tensor:
    return torch.randn(SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


def sum_and_count(rank, world_size, group_size, carriers):
    """The buffer after all stages, and what this rank issued: (collective, elements) -> times."""
    issued: Counter = Counter()

    def counted(name):
        original = getattr(dist, name)

        def call(tensor, *args, **kwargs):
            issued[name, tensor.numel()] += 1
            return original(tensor, *args, **kwargs)

        return call

    dist.init_process_group("gloo")
    collective = TwoLevelAllReduce(RankTopology(world_size, group_size), rank, carriers)
    for name in ("reduce", "all_reduce", "broadcast"):
        setattr(dist, name, counted(name))
    buffer = value(rank)
    for work in collective.reduce_inside(buffer):
        work.wait()
    collective.all_reduce_between(buffer)
    for work in collective.broadcast_inside(buffer):
        work.wait()
    collective.close()
    return buffer, issued


@pytest.mark.parametrize("carriers", ["leader", "sharded"])
@pytest.mark.parametrize(("world_size", "group_size"), [(4, 2), (3, 1), (3, 3)])
def test_stages_sum_over_all_ranks(world_size, group_size, carriers):
    expected = sum(value(rank) for rank in range(world_size))
    results = run_processes(world_size, sum_and_count, world_size, group_size, carriers)
    for buffer, _ in results:
        torch.testing.assert_close(buffer, expected, rtol=1e-14, atol=1e-14)
        assert torch.equal(buffer, results[0][0])


def test_the_leader_carries_all_and_the_others_nothing():
    results = run_processes(4, sum_and_count, 4, 2, "leader")
    for rank, (_, issued) in enumerate(results):
        across = {("all_reduce", SIZE): 1} if rank % 2 == 0 else {}
        assert issued == {("reduce", SIZE): 1, ("broadcast", SIZE): 1, **across}


def test_sharded_members_carry_their_shares():
    results = run_processes(4, sum_and_count, 4, 2, "sharded")
    for rank, (_, issued) in enumerate(results):
        inside = {(name, share): 1 for name in ("reduce", "broadcast") for share in (4, 3)}
        assert issued == {**inside, ("all_reduce", 4 if rank % 2 == 0 else 3): 1}
