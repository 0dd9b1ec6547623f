"""Hierarchical all-reduce: reduce inside groups of ranks, then all-reduce between the groups.

Layered SGD (arXiv 1906.05936, section 4.1, Algorithm 3). The three stages are separate calls, because layered SGD
overlaps them with loading, backward and the next forward.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Literal

import torch.distributed as dist
from torch import Tensor

from lightning_dp.collectives.groups import create_groups, destroy_group
from lightning_dp.collectives.topology import RankTopology

Communicator = Literal["leader", "sharded"]
AllReduce = Callable[[Tensor, dist.ProcessGroup], object]


def native_all_reduce(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Sum ``tensor`` in place over ``group`` with the backend's own algorithm."""
    dist.all_reduce(tensor, group=group)


class HierarchicalAllReduce:
    """Process groups of one rank, and the stages of a hierarchical sum over all ranks.

    A buffer is split into shards. The rank with group rank k in each group all-reduces shard k with its peers in the
    other groups. With ``communicator="leader"`` there is one shard, and the leaders reduce it (the communicator of the
    paper). With ``"sharded"`` there is one shard per member, so that the network link of every member is used.

    Each stage changes the buffer in place. Between stages the buffer holds intermediate values.

    Every rank of the job must call the constructor, because every rank takes part in creating every process group.

    Args:
        topology: division of the ranks into at least two groups.
        rank: global rank of this process.
        communicator: which ranks run the inter-group all-reduce.
        timeout: of every collective. None is the default of the backend.
        backend: of the process groups. None is the backend of the default group. ``"gloo"`` reduces host memory; use
            `HostCopy` for buffers on a GPU.
        all_reduce: algorithm of the inter-group all-reduce.
    """

    def __init__(
        self,
        topology: RankTopology,
        rank: int,
        communicator: Communicator = "leader",
        timeout: timedelta | None = None,
        backend: str | None = None,
        all_reduce: AllReduce = native_all_reduce,
    ) -> None:
        self.topology = topology
        self.rank = rank
        self.num_shards = topology.group_size if communicator == "sharded" else 1
        self._all_reduce = all_reduce

        intra_group = [topology.members(leader) for leader in range(0, topology.world_size, topology.group_size)]
        inter_group = [topology.peers(group_rank) for group_rank in range(self.num_shards)]
        # Two threads issue reduces and broadcasts. On one shared group their order could differ between ranks, and
        # each rank would wait for the wrong collective of its peers.
        has_intra_group = topology.group_size > 1
        self._reduce_group = create_groups(intra_group, rank, timeout, backend) if has_intra_group else None
        self._broadcast_group = create_groups(intra_group, rank, timeout, backend) if has_intra_group else None
        self._inter_group = create_groups(inter_group, rank, timeout, backend)

    def intra_group_reduce(self, buffer: Tensor) -> list[dist.Work]:
        """Start summing ``buffer`` over the group. Member k receives shard k (Algorithm 3, lines 6 and 15).

        Args:
            buffer: (K,), of the same size and dtype on all ranks.

        Returns:
            The handles to wait for before `inter_group_all_reduce`.
        """
        if self._reduce_group is None:
            return []
        return [
            dist.reduce(shard, group=self._reduce_group, group_dst=member, async_op=True)
            for member, shard in enumerate(self._shards(buffer))
        ]

    def inter_group_all_reduce(self, buffer: Tensor) -> None:
        """Sum the shard of this rank over the groups, and wait for it. Returns at once without a shard (line 8)."""
        if self._inter_group is not None:
            self._all_reduce(self._shards(buffer)[self.topology.group_rank(self.rank)], self._inter_group)

    def intra_group_broadcast(self, buffer: Tensor) -> list[dist.Work]:
        """Start broadcasting each shard from the rank that reduced it to its group (line 9).

        Returns:
            The handles to wait for before ``buffer`` is read.
        """
        if self._broadcast_group is None:
            return []
        return [
            dist.broadcast(shard, group=self._broadcast_group, group_src=member, async_op=True)
            for member, shard in enumerate(self._shards(buffer))
        ]

    def _shards(self, buffer: Tensor) -> tuple[Tensor, ...]:
        return buffer.tensor_split(self.num_shards)

    def describe(self, stage: Literal["inside", "between", "all"]) -> str:
        """Return the ranks that take part in a stage with this rank, worded for an error message."""
        where, ranks = {
            "inside": (f"inside group {self.topology.group_of(self.rank)}", self.topology.members(self.rank)),
            "between": ("across groups", self.topology.peers(self.rank)),
            "all": ("in the whole job", list(range(self.topology.world_size))),
        }[stage]
        others = [f"{other} (group {self.topology.group_of(other)})" for other in ranks if other != self.rank]
        return f"{where}, between rank {self.rank} and rank {', '.join(others) or 'no other'},"

    def close(self) -> None:
        """Destroy the process groups."""
        for group in (self._reduce_group, self._broadcast_group, self._inter_group):
            destroy_group(group)
