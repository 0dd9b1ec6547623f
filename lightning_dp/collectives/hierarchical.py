"""All-reduce in two levels: inside groups of ranks, and between the groups (arXiv 1906.05936, section 4.1).

The three stages are separate calls, for the point of layered SGD is what happens between them.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Literal

import torch.distributed as dist
from torch import Tensor

from lightning_dp.collectives.groups import unbound_default_group
from lightning_dp.collectives.topology import RankTopology

Carriers = Literal["leader", "sharded"]
AllReduce = Callable[[Tensor, dist.ProcessGroup], object]


def native_all_reduce(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Sum ``tensor`` in place over ``group`` with the backend's own algorithm."""
    dist.all_reduce(tensor, group=group)


class HierarchicalAllReduce:
    """The process groups of one rank, and the stages of a two-level sum over all ranks.

    A buffer is cut into shares, and member k of each group carries share k across groups. With ``carriers="leader"``
    there is one share and the leader carries it (the paper's communicator); with ``"sharded"`` there are as many as
    members, so that every member's network link works.

    Each stage changes the buffer in place. Between the stages its content is of use only to the next stage.

    Args:
        topology: the groups. At least two; every rank of the job calls the constructor.
        rank: this rank's global number.
        carriers: who crosses groups.
        timeout: of every collective.
        backend: of the process groups; None takes the default group's. ``"gloo"`` sums host memory, on which
            `HostCopy` puts what lies elsewhere.
        all_reduce: the algorithm between groups.
    """

    def __init__(
        self,
        topology: RankTopology,
        rank: int,
        carriers: Carriers = "leader",
        timeout: timedelta | None = None,
        backend: str | None = None,
        all_reduce: AllReduce = native_all_reduce,
    ) -> None:
        self.topology = topology
        self.rank = rank
        self.num_shares = topology.group_size if carriers == "sharded" else 1
        self._all_reduce = all_reduce

        groups = [topology.members(first) for first in range(0, topology.world_size, topology.group_size)]
        across = [topology.peers(carrier) for carrier in range(self.num_shares)]

        def resolve_group(partition: list[list[int]]) -> dist.ProcessGroup | None:
            # Every rank takes part in making every group, in one order, as torch.distributed demands.
            with unbound_default_group(backend):
                made = [dist.new_group(ranks, timeout=timeout, backend=backend) for ranks in partition]
            return next((group for ranks, group in zip(partition, made, strict=True) if rank in ranks), None)

        # Reduce and broadcast have groups of their own, since they are issued from two threads.
        alone = topology.group_size == 1
        self._reduce_group = None if alone else resolve_group(groups)
        self._broadcast_group = None if alone else resolve_group(groups)
        self._cross_group = resolve_group(across)

    def intra_group_reduce(self, buffer: Tensor) -> list[dist.Work]:
        """Start the sum over the group: member k receives share k (Algorithm 3, lines 6 and 15).

        Args:
            buffer: any one-dimensional tensor, of the same size and dtype on all ranks.

        Returns:
            The handles to wait for before `inter_group_all_reduce`.
        """
        if self._reduce_group is None:
            return []
        return [
            dist.reduce(share, group=self._reduce_group, group_dst=member, async_op=True)
            for member, share in enumerate(self._shares(buffer))
        ]

    def inter_group_all_reduce(self, buffer: Tensor) -> None:
        """Sum this rank's share over the groups, and wait for it; nothing to do for who carries none (line 8)."""
        if self._cross_group is not None:
            self._all_reduce(self._shares(buffer)[self.topology.group_rank(self.rank)], self._cross_group)

    def intra_group_broadcast(self, buffer: Tensor) -> list[dist.Work]:
        """Start handing each share from its carrier to the group (line 9); returns the handles to wait for."""
        if self._broadcast_group is None:
            return []
        return [
            dist.broadcast(share, group=self._broadcast_group, group_src=member, async_op=True)
            for member, share in enumerate(self._shares(buffer))
        ]

    def _shares(self, buffer: Tensor) -> tuple[Tensor, ...]:
        return buffer.tensor_split(self.num_shares)

    def describe(self, stage: Literal["inside", "between", "all"]) -> str:
        """Name for an error message the ranks that take part in a stage with rank ``self.rank``."""
        where, ranks = {
            "inside": (f"inside group {self.topology.group_of(self.rank)}", self.topology.members(self.rank)),
            "between": ("across groups", self.topology.peers(self.rank)),
            "all": ("in the whole job", list(range(self.topology.world_size))),
        }[stage]
        others = [f"{other} (group {self.topology.group_of(other)})" for other in ranks if other != self.rank]
        return f"{where}, between rank {self.rank} and rank {', '.join(others) or 'no other'},"

    def close(self) -> None:
        """Release the process groups."""
        for group in (self._reduce_group, self._broadcast_group, self._cross_group):
            if group is not None:
                dist.destroy_process_group(group)
