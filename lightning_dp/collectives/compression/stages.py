"""The compressed all-reduce between groups, its state in checkpoints, and the same as a communication hook of DDP."""

from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from typing_extensions import override

from lightning_dp.collectives.comm_hooks import BucketQueue
from lightning_dp.collectives.compression.compressors import Compressor, make_compressor
from lightning_dp.collectives.compression.layout import (
    BucketShard,
    ParameterInfo,
    ParameterTable,
    ParamSlice,
    cut,
    whole_shard,
)
from lightning_dp.collectives.compression.options import Compression, check_compression
from lightning_dp.collectives.compression.wire import Transport
from lightning_dp.collectives.hierarchical import HierarchicalAllReduce, Stage
from lightning_dp.collectives.point_to_point import post, wait_for_all

ShardRanges = tuple[tuple[int, int], ...]
"""Begin and end of the elements of a parameter that each member of the group carries."""
# Of a residual from a checkpoint: each member has all elements, until the first bucket tells who carries what.
_LOADED: ShardRanges = ()


class CompressedAllReduce:
    """A hierarchical all-reduce in which a compressor takes the place of the inter-group all-reduce.

    The sum within a group stays exact, and one compressor works for the group: the leader's, or each member's for its
    shard.

    Args:
        collective: its groups and its stages within a group are used.
        compressor: sums a piece over the groups.
        parameters: all parameters, by name and in one order on all ranks.

    Attributes:
        wire: to the carriers of the same piece in the other groups; None if this rank carries nothing.
    """

    def __init__(self, collective: HierarchicalAllReduce, compressor: Compressor, parameters: ParameterTable) -> None:
        self.collective = collective
        self.compressor = compressor
        self.parameters = parameters
        self.wire = None if collective.inter_group is None else Transport(collective.inter_group)
        self._stages: dict[tuple[ParameterInfo, ...], CompressedStages] = {}
        # Where residuals lie. All members know it of all parameters, so that they agree on when residuals must move.
        self._shard_ranges: dict[ParameterInfo, ShardRanges] = {}

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent to other groups."""
        return 0 if self.wire is None else self.wire.bytes_sent

    def stages_of(self, parameters: Sequence[Tensor]) -> "CompressedStages":
        """Return the stages of a bucket that holds the gradients of these parameters, in this order."""
        infos = tuple(self.parameters(parameter) for parameter in parameters)
        if infos not in self._stages:
            self._stages[infos] = CompressedStages(self, infos)
        return self._stages[infos]

    def carried_ranges(self, info: ParameterInfo) -> ShardRanges | None:
        """Return which elements of its group's residual each member has, from the first one on.

        None, on all ranks alike, if no gradient of the parameter has been reduced yet and no residual was loaded.
        """
        ranges = self._shard_ranges.get(info)
        return ((0, info.numel),) if ranges == _LOADED else ranges  # the first member's counts

    def load_residual(self, info: ParameterInfo, flat: Tensor) -> None:
        """Put ``flat``, (numel,), in place of the residual of this rank's group. All members of a group call it."""
        self.compressor.residuals.keep(ParamSlice(info, 0, info.numel), flat)
        self._shard_ranges[info] = _LOADED

    def clear(self) -> None:
        """Forget what the compressor has kept. Every rank must call it, while no bucket is under way."""
        self.compressor.clear()
        self._shard_ranges.clear()

    def note_shard_ranges(self, places: dict[ParameterInfo, ShardRanges]) -> bool:
        """Note who carries what of a bucket from now on; return whether it was somebody else before."""
        changed = any(self._shard_ranges.get(info, own) not in (own, _LOADED) for info, own in places.items())
        self._shard_ranges.update(places)
        return changed


class CompressedStages:
    """The stages of one bucket: what `BucketReduction` calls. Made again when DDP changes its buckets.

    Args:
        owner: does the work.
        infos: the parameters of the bucket, in its order.

    Attributes:
        reduces_on_device: whether `reduce_on_device` reduces the gradients, and `intra_group_reduce` only moves
            residuals.
    """

    def __init__(self, owner: CompressedAllReduce, infos: tuple[ParameterInfo, ...]) -> None:
        self._owner = owner
        self._collective = owner.collective
        self.reduces_on_device = owner.collective.reduces_on_device
        self._pieces = cut(infos, self._collective.num_shards)
        self._sizes = [sum(part.numel for part in piece.parts) for piece in self._pieces]
        member = self._collective.member
        self._piece = self._pieces[member] if member < len(self._pieces) else BucketShard(())
        of_pieces = [{part.info: (part.begin, part.end) for part in piece.parts} for piece in self._pieces]
        self._shard_ranges = {info: tuple(of_piece.get(info, (0, 0)) for of_piece in of_pieces) for info in infos}
        self._keeps_residuals = any(map(owner.compressor.keeps_residual, infos))
        self._moving: Tensor | None = None  # residuals on their way to other members, as they lie in the bucket

    def _carried(self, buffer: Tensor) -> Tensor:
        return buffer.split(self._sizes)[self._collective.member]

    def reduce_on_device(self, buffer: Tensor) -> slice:
        """Reduce ``buffer`` within the group, where it is; see `HierarchicalAllReduce.reduce_on_device`."""
        return self._collective.reduce_on_device(buffer, self._sizes)

    def intra_group_reduce(self, buffer: Tensor) -> list[dist.Work]:
        """Start to reduce ``buffer`` within the group; also the residuals, if other members are to carry them now."""
        works = self._collective.intra_group_reduce(buffer, self._sizes)
        residuals = self._owner.compressor.residuals
        if self._owner.note_shard_ranges(self._shard_ranges) and self._keeps_residuals:
            parts = [residuals.expanded(part.info)[part.begin : part.end] for p in self._pieces for part in p.parts]
            # At most one member holds an element, so this sum of all members' residuals is exact.
            self._moving = torch.cat(parts)
            works += self._collective.reduce_shards(self._moving.split(self._sizes))
        # What other members carry must not be counted twice when residuals move. It is here if it moves now, and after
        # a checkpoint was loaded, which gives all members the residuals of their group.
        carried = set() if self._moving is not None else {part.info for part in self._piece.parts}
        for info in self._shard_ranges:
            if info not in carried:
                residuals.drop(info)
        return works

    def inter_group_all_reduce(self, buffer: Tensor) -> Iterator[None] | None:
        """Start to sum this rank's shard over the groups, compressed.

        Returns:
            What is left to do when the last messages are under way: iterate until it ends. None for a rank without a
            shard.
        """
        if self._owner.wire is None:
            return None
        if self._moving is not None:
            moved = self._piece.split(self._carried(self._moving))
            self._moving = None
            for part, residual in zip(self._piece.parts, moved, strict=True):
                self._owner.compressor.residuals.keep(part, residual.clone())
        rest = self._owner.compressor.start(self._carried(buffer), self._piece, self._owner.wire)
        next(rest, None)
        return rest

    def intra_group_broadcast(self, buffer: Tensor) -> list[dist.Work]:
        """Start to broadcast each shard within the group."""
        return self._collective.intra_group_broadcast(buffer, self._sizes)

    def describe(self, stage: Stage) -> str:
        """Return the ranks that take part in a stage, worded for an error message."""
        return self._collective.describe(stage)


# --- What compressors keep between steps, by parameter and group of ranks, whatever the buckets are.

State = dict[str, dict[str, Any]]
"""``"residuals"``: name of a parameter -> (number of groups, \\*shape of the parameter), zero where nothing was left
out. ``"others"``: name -> what else the compressor keeps of the parameter, the same in all groups."""


def others_of(all_reduce: CompressedAllReduce) -> dict[str, Any]:
    """Return what the compressor keeps besides residuals; see `State`. Nothing is sent."""
    others = {info.name: all_reduce.compressor.state_of(info) for info in all_reduce.parameters.all()}
    return {name: each for name, each in others.items() if each}


class OwnState:
    """The part of one rank of the state; it outlives the process groups of ``all_reduce``.

    Making one sends nothing. `gather` does, so that a fit can end on one rank while others are still in a step. Make it
    while no bucket is under way.
    """

    def __init__(self, all_reduce: CompressedAllReduce) -> None:
        compressor = all_reduce.compressor
        self._topology = all_reduce.collective.topology
        self._rank = all_reduce.collective.rank
        # What all members carry, and what this one has of it; None: nothing was left out yet.
        self._residuals: list[tuple[ParameterInfo, ShardRanges, Tensor | None]] = []
        self._others = others_of(all_reduce)
        for info in all_reduce.parameters.all():
            ranges = all_reduce.carried_ranges(info)
            if ranges is not None and compressor.keeps_residual(info):
                part = ParamSlice(info, *self._range_of(self._rank, ranges))
                self._residuals.append((info, ranges, compressor.residuals.get(part)))

    def gather(self, timeout: timedelta) -> State:
        """Gather the residuals on rank 0. Every rank of the job must call it.

        Each parameter's residuals travel alone, so that rank 0 needs memory for one of them besides the state.

        Args:
            timeout: of each message.
        """
        state: State = {"residuals": {}, "others": self._others}
        if not self._residuals:
            return state
        group = dist.new_group(timeout=timeout, backend="gloo")
        for info, ranges, residual in self._residuals:
            begin, end = self._range_of(self._rank, ranges)
            own = torch.zeros(end - begin, dtype=info.dtype) if residual is None else residual
            if self._rank != 0:
                wait_for_all(post(group, [], [(own, 0)])[1])
                continue
            of_groups = own.new_zeros(self._topology.num_groups, info.numel)
            places = [slice(*self._range_of(rank, ranges)) for rank in range(self._topology.world_size)]
            parts = [of_groups[self._topology.group_of(rank), place] for rank, place in enumerate(places)]
            parts[0].copy_(own)
            wait_for_all(post(group, [(part, rank) for rank, part in enumerate(parts) if rank != 0], [])[0])
            state["residuals"][info.name] = torch.stack([info.as_parameter(flat) for flat in of_groups])
        dist.barrier(group)  # others may still be connecting, or receiving from this rank
        dist.destroy_process_group(group)
        return state

    def _range_of(self, rank: int, ranges: ShardRanges) -> tuple[int, int]:
        member = self._topology.group_rank(rank)
        return ranges[member] if member < len(ranges) else (0, 0)


def load_state(all_reduce: CompressedAllReduce, state: State) -> list[str]:
    """Put a gathered state in place of the present one. Every rank must call it, while no bucket is under way.

    If there were as many groups, each group gets its own residuals. Else all groups get equal parts of the residuals'
    sum. In both cases the sum over the groups, which is what the parameters lack, stays what it was.

    Returns:
        Names of the residuals that are dropped: the compressor keeps none of these parameters.

    Raises:
        ValueError: a residual does not have the shape of its parameter.
    """
    all_reduce.clear()
    topology = all_reduce.collective.topology
    group = topology.group_of(all_reduce.collective.rank)
    dropped = list(state["residuals"])
    for info in all_reduce.parameters.all():
        if info.name in state["residuals"] and all_reduce.compressor.keeps_residual(info):
            dropped.remove(info.name)
            own = _of_group(info, state["residuals"][info.name], group, topology.num_groups)
            all_reduce.load_residual(info, info.as_flat(own))
        if info.name in state["others"]:
            all_reduce.compressor.load_state_of(info, state["others"][info.name])
    return dropped


def _of_group(info: ParameterInfo, residuals: Tensor, group: int, num_groups: int) -> Tensor:
    if tuple(residuals.shape[1:]) != info.shape:
        raise ValueError(
            f"the residual of {info.name} in the checkpoint has the shape {tuple(residuals.shape[1:])}, and the "
            f"parameter {info.shape}; load the checkpoint into the same model"
        )
    if len(residuals) == num_groups:
        return residuals[group]
    return residuals.sum(0).div_(num_groups)


# --- Compression as a communication hook of `DistributedDataParallel`, on CPU.
#
#     model = DistributedDataParallel(module)
#     model.register_comm_hook(CompressionState("int8"), compression_hook)
#
# All ranks are carriers then: the sum is compressed between all of them, not only between groups.

# No `from __future__ import annotations` here: DDP compares the hook's annotations with types, and would find strings.


class CompressionState(BucketQueue):
    """State of `compression_hook`: the compressor with its residuals, a process group, and the queue of buckets.

    It belongs to one model, and is not in checkpoints.

    Args:
        compression: ``"bf16"``, ``"fp16"``, ``"int8"`` or an instance of `PowerSGD`.
        group: as in `BucketQueue`.

    Raises:
        ValueError: the compressor is not known.
    """

    def __init__(self, compression: Compression, group: dist.ProcessGroup | None = None) -> None:
        check_compression(compression)
        if compression is None:
            raise ValueError("compression=None has nothing for a hook to do; register none, and DDP sums exactly")
        super().__init__(group, "compression_hook")
        self.compression = compression
        self._compressor = make_compressor(compression)
        self._parameters = ParameterTable()
        self._wire: Transport | None = None

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent."""
        return 0 if self._wire is None else self._wire.bytes_sent

    @override
    def _average(self, buffer: torch.Tensor, parameters: list[torch.Tensor], group: dist.ProcessGroup) -> None:
        if self._wire is None or self._wire.group is not group:
            self._wire = Transport(group)
        buffer.div_(group.size())  # before the sum, so that 16-bit sums do not overflow
        piece = whole_shard([self._parameters(parameter) for parameter in parameters])
        self._compressor.all_reduce(buffer, piece, self._wire)


def compression_hook(state: CompressionState, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    """Average the gradients of ``bucket`` over the ranks, compressed, while backward continues.

    Pass it to ``DistributedDataParallel.register_comm_hook(state, compression_hook)``. With Lightning's `DDPStrategy`,
    which ignores communication hooks on CPU, register it on ``trainer.strategy.model`` in ``on_train_start``.

    Args:
        state: a `CompressionState` of this model.
        bucket: gradients of one floating-point dtype, in host memory. Changed in place.

    Returns:
        A future of the bucket's buffer. ``backward()`` raises the errors of the worker thread.

    Raises:
        TypeError: ``state`` is not a `CompressionState`.
        ValueError: the gradients are not on the CPU.
    """
    if not isinstance(state, CompressionState):
        raise TypeError(f"the state of compression_hook is {state!r}; use CompressionState(compression)")
    buffer = bucket.buffer()
    if buffer.device.type != "cpu":
        raise ValueError(
            f"compression_hook sends messages from host memory, and these gradients are on {buffer.device}; use "
            "LayeredSGDStrategy(compression=...), which copies them, or PyTorch's own hooks"
        )
    return state.submit(buffer, bucket.parameters())
