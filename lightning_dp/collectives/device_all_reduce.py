"""The hierarchical all-reduce where the gradients are: on the device, in the order of the calling thread's stream."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dp.collectives import single_tensor
from lightning_dp.collectives.groups import create_groups, destroy_group
from lightning_dp.collectives.hierarchical import describe_ranks
from lightning_dp.collectives.topology import RankTopology


class DeviceAllReduce:
    """Sum buffers over all ranks: reduce-scatter in the group, all-reduce of shards between groups, all-gather.

    Each rank carries one shard of the buffer to the ranks of the same group rank in the other groups, so that every NIC
    works and each link between groups carries each byte once. If the group size does not divide the buffer, the last
    member's shard has the rest as well: two more collectives inside the group, and none between groups.

    On NCCL each collective is queued on the current stream, and `all_reduce` returns at once. Nothing here waits on the
    host. All ranks must call `all_reduce` with the same sizes in the same order, also relative to their collectives on
    other groups.

    Every rank of the job must call the constructor, because every rank takes part in creating every process group.

    Args:
        topology: division of the ranks into groups.
        rank: global rank of this process.
        timeout: of every collective. None: the backend's default.
        make_options: makes the backend's options of the group between groups. None: its defaults.
    """

    def __init__(
        self,
        topology: RankTopology,
        rank: int,
        timeout: timedelta | None = None,
        make_options: Callable[[], Any] | None = None,
    ) -> None:
        self.topology = topology
        self.rank = rank
        size = topology.group_size
        intra_group = [topology.members(leader) for leader in range(0, topology.world_size, size)]
        inter_group = [topology.peers(member) for member in range(size)]
        self._intra_group = create_groups(intra_group, rank, timeout) if size > 1 else None
        self._inter_group = create_groups(inter_group, rank, timeout, make_options=make_options)

    def all_reduce(self, buffer: Tensor) -> None:
        """Replace ``buffer``, (numel,), by its sum over all ranks, in place."""
        if buffer.is_complex():
            buffer = torch.view_as_real(buffer).view(-1)  # NCCL has no complex numbers
        size = self.topology.group_size
        member = self.topology.group_rank(self.rank)
        last = size - 1
        shard_numel = buffer.numel() // size
        even = buffer[: size * shard_numel]
        rest = buffer[size * shard_numel :]
        shard = even[member * shard_numel : (member + 1) * shard_numel]
        carried = shard if member != last else buffer[member * shard_numel :]

        group = self._intra_group
        if group is not None:
            if shard_numel:
                single_tensor.reduce_scatter(shard, even, group)
            if rest.numel():
                dist.reduce(rest, group=group, group_dst=last)
        if carried.numel():  # the same number on all ranks of this inter-group all-reduce
            dist.all_reduce(carried, group=self._inter_group)
        if group is not None:
            if shard_numel:
                single_tensor.all_gather(even, shard, group)
            if rest.numel():
                dist.broadcast(rest, group=group, group_src=last)

    def broadcast(self, tensor: Tensor) -> None:
        """Replace ``tensor`` by global rank 0's, on all ranks, in place."""
        if self.topology.group_rank(self.rank) == 0:
            dist.broadcast(tensor, group=self._inter_group, group_src=0)
        if self._intra_group is not None:
            dist.broadcast(tensor, group=self._intra_group, group_src=0)

    def describe(self) -> str:
        """Return the ranks that take part, worded for an error message."""
        return describe_ranks(self.topology, self.rank, "all")

    def close(self) -> None:
        """Destroy the process groups."""
        for group in (self._intra_group, self._inter_group):
            destroy_group(group)
