"""The communicator on the device: the program issues collectives on a stream of their own, and only waits later.

No thread, no copy to the host, and no agreement between ranks: the communication hook issues a bucket's collectives
itself, so their order is that of the program, also relative to collectives of DDP, Lightning and the user. NCCL
requires one order on all ranks and one issuing thread at a time. A use of a parameter only makes the current stream
wait for an event.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dp.collectives import groups, streams
from lightning_dp.collectives.compression.stages import CompressedAllReduce
from lightning_dp.collectives.groups import OnStage, RankTopology, create_groups, destroy_group
from lightning_dp.collectives.hierarchical import describe_ranks
from lightning_dp.collectives.point_to_point import naming_backend_errors
from lightning_dp.strategies.layered_sgd.gradient_sum import CLOSE_LIMIT_S, WAIT, Pending


class DeviceSum:
    """The sum of one gradient bucket on the device. Before `issue` has been called, there is nothing to wait for.

    Args:
        index: DDP's number of the bucket.
        buffer: (numel,) the bucket's gradients, changed in place.
        on_stage: called with name, start and end of the time that `wait` takes on the host.
    """

    def __init__(self, index: int, buffer: Tensor, on_stage: OnStage = lambda *_: None) -> None:
        self.index = index
        self.buffer = buffer
        self._on_stage = on_stage
        self._is_issued = False
        self._produced: streams.Event | None = None
        self._delivered: streams.Event | None = None
        if streams.has_streams(buffer.device):
            # The collectives may be issued later, by code that runs on another stream than the one that fills buckets.
            self._produced = streams.record_event(streams.current_stream(buffer.device))

    def issue(self, collective: DeviceAllReduce, stream: streams.Stream | None) -> None:
        """Queue the collectives on ``stream``, or run them if it is None. All ranks call it in the same order."""
        if stream is not None and self._produced is not None:
            stream.wait_event(self._produced)
        with (
            streams.on_stream(stream),
            naming_backend_errors(lambda: f"the sum of gradient bucket {self.index}, {collective.describe()}"),
        ):
            collective.all_reduce(self.buffer)
        if stream is not None:
            # A rank that gives up after an error drops the bucket while the collectives are under way.
            streams.keep_until_done(self.buffer, stream)
            self._delivered = streams.record_event(stream)
        self._is_issued = True

    @property
    def has_arrived(self) -> bool:
        """Whether the device has the sum."""
        return self._is_issued and (self._delivered is None or self._delivered.query())

    def wait(self) -> None:
        """Let the current stream wait for the sum. Neither blocks the host nor issues a collective.

        Raises:
            RuntimeError: the collectives have not been issued. Issuing them here, on the rank that happens to need the
                sum, would change their order.
        """
        start_s = time.perf_counter()
        if not self._is_issued:
            raise RuntimeError(
                f"gradient bucket {self.index} is used during backward, and its sum starts only after backward, at a "
                "point that all ranks pass (overlap='load', or find_unused_parameters=True); use the parameter or its "
                "gradient after backward"
            )
        if self._delivered is not None:
            # In each call, not only in the first: the current stream may be another one.
            streams.current_stream(self.buffer.device).wait_event(self._delivered)
        self._on_stage(WAIT, start_s, time.perf_counter())


class DeviceCommunicator:
    """Sums the submitted buckets on the device, in one order on all ranks; every rank of the job has one.

    On tensors in host memory, where there are no streams, each sum is complete when it has been issued.

    Args:
        collective: sums a buffer.
        early: issue the collectives of a bucket when it is submitted, in backward. False: after backward.
        device: where the buckets are.
        on_stage: called with name, start and end of the time that the host spends in `DeviceSum.wait`.
    """

    compressed: CompressedAllReduce | None = None

    def __init__(
        self,
        collective: DeviceAllReduce,
        early: bool,
        device: torch.device,
        on_stage: OnStage = lambda *_: None,
    ) -> None:
        self._collective = collective
        self._early = early
        self._on_stage = on_stage
        # Urgent: its few small kernels wait for the network, and should start to do so as soon as they can.
        self._stream = streams.new_stream(device, urgent=True) if streams.has_streams(device) else None
        self._held: list[DeviceSum] = []

    def submit(
        self, index: int, buffer: Tensor, parameters: Sequence[Tensor] = (), fills: Sequence[Pending] = ()
    ) -> DeviceSum:
        """Issue the sum of ``buffer`` over all ranks, in place: immediately if ``early``, else in `release`."""
        assert not fills, "streams order what fills a buffer on the device"
        bucket = DeviceSum(index, buffer, self._on_stage)
        self._held.append(bucket)
        if self._early:
            self.release()
        return bucket

    def release(self) -> None:
        """Issue the sums of all buckets that were submitted so far, in the order of submission, which is DDP's."""
        held, self._held = self._held, []
        for bucket in held:
            bucket.issue(self._collective, self._stream)

    def close(self) -> None:
        """Destroy the groups, if what was issued ends within `CLOSE_LIMIT_S`: NCCL would wait for dead peers."""
        self._held.clear()
        if self._stream is None or streams.is_done_within(self._stream, CLOSE_LIMIT_S):
            self._collective.close()


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
        of_shards: a buffer is this rank's shard alone, and holds the sum over its group already, as after FSDP2's
            reduce-scatter: only the all-reduce between groups is left.
    """

    def __init__(
        self,
        topology: RankTopology,
        rank: int,
        timeout: timedelta | None = None,
        of_shards: bool = False,
    ) -> None:
        self.topology = topology
        self.rank = rank
        size = topology.group_size
        intra_group = [topology.members(leader) for leader in range(0, topology.world_size, size)]
        inter_group = [topology.peers(member) for member in range(size)]
        self._of_shards = of_shards
        self._intra_group = create_groups(intra_group, rank, timeout) if size > 1 and not of_shards else None
        self._inter_group = create_groups(inter_group, rank, timeout)

    def all_reduce(self, buffer: Tensor) -> None:
        """Replace ``buffer``, (numel,), by its sum over all ranks, in place."""
        if buffer.is_complex():
            buffer = torch.view_as_real(buffer).view(-1)  # NCCL has no complex numbers
        if self._of_shards:
            dist.all_reduce(buffer, group=self._inter_group)
            return
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
                groups.reduce_scatter_single(shard, even, group=group)
            if rest.numel():
                dist.reduce(rest, group=group, group_dst=last)
        if carried.numel():  # the same number on all ranks of this inter-group all-reduce
            dist.all_reduce(carried, group=self._inter_group)
        if group is not None:
            if shard_numel:
                groups.all_gather_single(even, shard, group=group)
            if rest.numel():
                dist.broadcast(rest, group=group, group_src=last)

    def describe(self) -> str:
        """Return the ranks that take part, worded for an error message."""
        return describe_ranks(self.topology, self.rank, "all")

    def close(self) -> None:
        """Destroy the process groups."""
        for group in (self._intra_group, self._inter_group):
            destroy_group(group)


# Settings of NCCL for several communicators that are in flight on one device at a time.
#
# NCCL's kernels wait for their peers while they occupy the device. If two ranks run the kernels of two communicators in
# different orders, each can wait for the other. From version 2.26 on NCCL keeps the order in which the host has issued
# them, if ``NCCL_LAUNCH_ORDER_IMPLICIT`` is set.

LAUNCH_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"


def request_launch_order() -> bool:
    """Set ``NCCL_LAUNCH_ORDER_IMPLICIT=1`` for this process and those that it starts, unless the user has set it.

    Return whether NCCL will see the variable. It reads it when the process creates its first communicator.
    """
    is_early = LAUNCH_ORDER in os.environ or not (dist.is_available() and dist.is_initialized())
    os.environ.setdefault(LAUNCH_ORDER, "1")
    return is_early


def keeps_launch_order() -> bool:
    """Return whether NCCL runs kernels in the order in which the host issues them."""
    return os.environ.get(LAUNCH_ORDER, "0") != "0"
