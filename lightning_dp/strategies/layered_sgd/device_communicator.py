"""The communicator on the device: the program issues collectives on a stream of their own, and only waits later.

No thread, no copy to the host, and no agreement between ranks: the communication hook issues a bucket's collectives
itself, so their order is that of the program, also relative to collectives of DDP, Lightning and the user. NCCL
requires one order on all ranks and one issuing thread at a time. Whoever uses a parameter only makes the current stream
wait for an event.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_dp.collectives import streams
from lightning_dp.collectives.compression.stages import CompressedAllReduce
from lightning_dp.collectives.device_all_reduce import DeviceAllReduce
from lightning_dp.collectives.tracing import OnStage
from lightning_dp.strategies.layered_sgd.bucket import WAIT, blame
from lightning_dp.strategies.layered_sgd.gradient_sum import CLOSE_LIMIT_S
from lightning_dp.strategies.layered_sgd.issue_order import IssueOrder


class DeviceSum:
    """The sum of one gradient bucket on the device. Before `issue` has been called, there is nothing to wait for.

    Args:
        index: DDP's number of the bucket.
        buffer: (numel,) the bucket's gradients, changed in place.
        on_stage: called with name, start and end of the time that `wait` takes on the host.
    """

    def __init__(self, index: int, buffer: Tensor, on_stage: OnStage | None = None) -> None:
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
        with streams.on_stream(stream):
            try:
                collective.all_reduce(self.buffer)
            except RuntimeError:
                # Named only now: a description of all ranks takes longer than queueing the collectives.
                with blame(f"the sum of gradient bucket {self.index}, {collective.describe()}"):
                    raise
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
        if self._on_stage is not None:
            self._on_stage(WAIT, start_s, time.perf_counter())


class DeviceCommunicator:
    """Sums the submitted buckets on the device, in one order on all ranks; every rank of the job has one.

    On tensors in host memory, where there are no streams, each sum is complete when it has been issued.

    Args:
        collective: sums a buffer.
        early: issue the collectives of a bucket when it is submitted, in backward. False: after backward.
        device: where the buckets are.
        on_stage: called with name, start and end of the time that the host spends in `DeviceSum.wait`.
        issue_order: of the buckets that are issued after backward. None: the order of submission.
    """

    compressed: CompressedAllReduce | None = None

    def __init__(
        self,
        collective: DeviceAllReduce,
        early: bool,
        device: torch.device,
        on_stage: OnStage | None = None,
        issue_order: IssueOrder | None = None,
    ) -> None:
        self.issue_order = issue_order
        self._collective = collective
        self._early = early
        self._on_stage = on_stage
        # Urgent: its few small kernels wait for the network, and should start to do so as soon as they can.
        self._stream = streams.new_stream(device, urgent=True) if streams.has_streams(device) else None
        self._held: list[tuple[DeviceSum, Sequence[Tensor]]] = []

    def submit(self, index: int, buffer: Tensor, parameters: Sequence[Tensor] = ()) -> DeviceSum:
        """Issue the sum of ``buffer`` over all ranks, in place: immediately if ``early``, else in `release`."""
        bucket = DeviceSum(index, buffer, self._on_stage)
        self._held.append((bucket, parameters))
        if self._early:
            self.release()
        return bucket

    def release(self) -> None:
        """Issue the sums of all buckets that were submitted so far."""
        held, self._held = self._held, []
        if self.issue_order is not None and held:
            order = self.issue_order.sort([(bucket.index, parameters) for bucket, parameters in held])
            held = [held[position] for position in order]
        for bucket, _ in held:
            bucket.issue(self._collective, self._stream)

    def close(self) -> None:
        """Destroy the groups, if what was issued ends within `CLOSE_LIMIT_S`: NCCL would wait for dead peers."""
        self._held.clear()
        if self._stream is None or streams.is_done_within(self._stream, CLOSE_LIMIT_S):
            self._collective.close()
