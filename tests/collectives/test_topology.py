from __future__ import annotations

import pytest

from lightning_dp.collectives.groups import RankTopology


@pytest.mark.parametrize(("world_size", "group_size"), [(1, 1), (4, 1), (4, 2), (6, 3), (5, 5)])
def test_groups_and_peers_partition_the_ranks(world_size, group_size):
    topology = RankTopology(world_size, group_size)
    assert topology.num_groups * group_size == world_size
    for rank in range(world_size):
        members, peers = topology.members(rank), topology.peers(rank)
        assert len(members) == group_size
        assert len(peers) == topology.num_groups
        assert set(members) & set(peers) == {rank}
        assert members[topology.group_rank(rank)] == rank
        assert peers[topology.group_of(rank)] == rank
        assert all(topology.members(other) == members for other in members)
        assert all(topology.peers(other) == peers for other in peers)


@pytest.mark.parametrize(
    ("world_size", "group_size", "message"),
    [
        (6, 4, "world_size=6 is not a multiple of group_size=4; use 1, 2, 3 or 6"),
        (3, 2, "world_size=3 is not a multiple of group_size=2; use 1 or 3"),
        (1, 2, "world_size=1 is not a multiple of group_size=2; use 1"),
        (4, 0, "world_size=4 is not a multiple of group_size=0; use 1, 2 or 4"),
        (0, 1, "world_size=0 must be at least 1"),
    ],
)
def test_unequal_groups_are_refused_with_the_sizes_that_work(world_size, group_size, message):
    with pytest.raises(ValueError, match=message):
        RankTopology(world_size, group_size)
