"""Hierarchical all-reduce: reduce inside groups of ranks, then all-reduce between the groups.

Layered SGD (arXiv 1906.05936, section 4.1, Algorithm 3). The three stages are separate calls, because layered SGD
overlaps them with loading, backward and the next forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dp.collectives.groups import RankTopology, create_groups, destroy_group

CommunicatorMode = Literal["leader", "sharded"]
Stage = Literal["inside", "between", "all"]
AllReduce = Callable[[Tensor, dist.ProcessGroup], object]


def native_all_reduce(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Sum ``tensor`` in place over ``group`` with the backend's own algorithm."""
    dist.all_reduce(tensor, group=group)


class HierarchicalAllReduce:
    """The process groups that this rank belongs to, and the three stages of a hierarchical all-reduce over all ranks.

    A buffer is split into shards. In each group, the rank with group rank k all-reduces shard k with the ranks of the
    same group rank in the other groups. With ``communicator="leader"`` there is one shard, which the leaders (the
    paper's communicators) all-reduce. With ``"sharded"`` there is one shard per member, so that the network link of
    every member is used.

    Each stage changes the buffer in place. Between stages the buffer holds intermediate values.

    Every rank of the job must call the constructor, because every rank takes part in creating every process group.

    Args:
        topology: division of the ranks into at least two groups.
        rank: global rank of this process.
        communicator: which ranks run the inter-group all-reduce.
        timeout: of every collective. None: the backend's default.
        backend: of the process groups. None: the backend of the default group. ``"gloo"`` reduces buffers in host
            memory; use `HostCopy` for buffers on a GPU.
        all_reduce: algorithm of the inter-group all-reduce.
        reduce_on_device: reduce within the group with the default group's backend, by `reduce_on_device`, before
            anything is copied to host memory. `intra_group_reduce` has nothing to do then.
        of_shards: a buffer is this rank's shard alone, and holds the sum over its group already, as after FSDP2's
            reduce-scatter: only the all-reduce between groups is left. Every rank carries its shard (``"sharded"``).

    Attributes:
        member: index of the shard that this rank carries between groups. From ``num_shards`` on, it carries none.
        inter_group: the ranks that carry the same shard, one of each group; None if this rank carries none.
        reduces_on_device: whether `reduce_on_device` takes the place of `intra_group_reduce`.
    """

    def __init__(
        self,
        topology: RankTopology,
        rank: int,
        communicator: CommunicatorMode = "leader",
        timeout: timedelta | None = None,
        backend: str | None = None,
        all_reduce: AllReduce = native_all_reduce,
        reduce_on_device: bool = False,
        of_shards: bool = False,
    ) -> None:
        self.topology = topology
        self.rank = rank
        self.member = 0 if of_shards else topology.group_rank(rank)
        num_carriers = topology.group_size if communicator == "sharded" else 1
        self.num_shards = 1 if of_shards else num_carriers
        self._all_reduce = all_reduce

        intra_group = [topology.members(leader) for leader in range(0, topology.world_size, topology.group_size)]
        inter_group = [topology.peers(group_rank) for group_rank in range(num_carriers)]
        # In training on CPU several threads issue reduces and broadcasts: the training thread, and the communicator's.
        # On one shared group their order could differ between ranks, and each would wait for the wrong collective.
        has_intra_group = topology.group_size > 1 and not of_shards
        self._reduce_group = create_groups(intra_group, rank, timeout, backend) if has_intra_group else None
        self._broadcast_group = create_groups(intra_group, rank, timeout, backend) if has_intra_group else None
        self.inter_group = create_groups(inter_group, rank, timeout, backend)
        self.reduces_on_device = reduce_on_device and has_intra_group
        self._device_group = create_groups(intra_group, rank, timeout) if self.reduces_on_device else None

    def intra_group_reduce(self, buffer: Tensor, sizes: Sequence[int] | None = None) -> list[dist.Work]:
        """Start to reduce ``buffer`` within the group: group rank k gets the sum of shard k (Algorithm 3, lines 6, 15).

        Args:
            buffer: (numel,), of the same size and dtype on all ranks.
            sizes: of the shards. None: as equal as they can be. Each stage of a buffer gets the same.

        Returns:
            The handles to wait for before `inter_group_all_reduce`.
        """
        return [] if self.reduces_on_device else self.reduce_shards(self._shards(buffer, sizes))

    def reduce_on_device(self, buffer: Tensor, sizes: Sequence[int] | None = None) -> slice:
        """Reduce ``buffer`` within the group, where it is: group rank k gets the sum of shard k.

        The collectives are queued on the current stream; nothing waits on the host. All members of the group call it
        for the same buffers in the same order, also relative to their collectives on other groups.

        Args:
            buffer: (numel,), of the same size and dtype on all ranks.
            sizes: as in `intra_group_reduce`.

        Returns:
            The part of ``buffer`` that this rank carries between groups. The other parts are not to be used.
        """
        shards = self._shards(buffer, sizes)
        for member, shard in enumerate(shards):
            if shard.numel():
                # NCCL has no complex numbers.
                real = torch.view_as_real(shard) if shard.is_complex() else shard
                dist.reduce(real, group=self._device_group, group_dst=member)
        begin = sum(shard.numel() for shard in shards[: self.member])
        return slice(begin, begin + sum(shard.numel() for shard in shards[self.member : self.member + 1]))

    def reduce_shards(self, shards: Sequence[Tensor]) -> list[dist.Work]:
        """Start to reduce shard k to group rank k, for all shards; all members of the group call it."""
        if self._reduce_group is None:
            return []
        return [
            dist.reduce(shard, group=self._reduce_group, group_dst=member, async_op=True)
            for member, shard in enumerate(shards)
        ]

    def inter_group_all_reduce(self, buffer: Tensor) -> Iterator[None] | None:
        """All-reduce this rank's shard over the groups, and wait for the result (line 8).

        A rank without a shard returns immediately.

        Returns:
            None: unlike a compressed all-reduce, this one leaves nothing to do.
        """
        if self.inter_group is not None:
            self._all_reduce(self._shards(buffer)[self.member], self.inter_group)
        return None

    def intra_group_broadcast(self, buffer: Tensor, sizes: Sequence[int] | None = None) -> list[dist.Work]:
        """Start to broadcast each shard within the group, from the rank that all-reduced it (line 9).

        Returns:
            The handles to wait for before ``buffer`` is read.
        """
        if self._broadcast_group is None:
            return []
        return [
            dist.broadcast(shard, group=self._broadcast_group, group_src=member, async_op=True)
            for member, shard in enumerate(self._shards(buffer, sizes))
        ]

    def _shards(self, buffer: Tensor, sizes: Sequence[int] | None = None) -> tuple[Tensor, ...]:
        return buffer.tensor_split(self.num_shards) if sizes is None else buffer.split(sizes)

    def describe(self, stage: Stage) -> str:
        """Return the ranks that take part in a stage with this rank, worded for an error message."""
        return describe_ranks(self.topology, self.rank, stage)

    def close(self) -> None:
        """Destroy the process groups."""
        for group in (self._reduce_group, self._broadcast_group, self.inter_group, self._device_group):
            destroy_group(group)


def describe_ranks(topology: RankTopology, rank: int, stage: Stage) -> str:
    """Return the ranks that take part in a stage with ``rank``, worded for an error message."""
    where, ranks = {
        "inside": (f"inside group {topology.group_of(rank)}", topology.members(rank)),
        "between": ("across groups", topology.peers(rank)),
        "all": ("in the whole job", list(range(topology.world_size))),
    }[stage]
    others = [f"{other} (group {topology.group_of(other)})" for other in ranks if other != rank]
    if not others:
        return f"{where}, rank {rank} alone,"
    return f"{where}, between rank {rank} and rank{'s' if len(others) > 1 else ''} {', '.join(others)},"
