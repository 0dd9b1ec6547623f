"""DeAR's order of communication (arXiv 2302.12445), as a rival of layered SGD in the benchmarks.

Each bucket's all-reduce is split in two. The reduce-scatters run while backward fills the buckets, in DDP's order. The
all-gathers run during the next forward, the bucket of the layers nearest the input first, and a layer is updated just
before it is used. All ranks form one ring: there is no hierarchy.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_dp.collectives.compression.stages import CompressedAllReduce
from lightning_dp.collectives.groups import RankTopology, destroy_group
from lightning_dp.collectives.ring import SEGMENT_BYTES, run_ring
from lightning_dp.strategies import LayeredSGDStrategy
from lightning_dp.strategies.layered_sgd.gradient_sum import GradientCommunicator
from lightning_dp.strategies.layered_sgd.options import CommunicatorOptions


class RingSum:
    """The sum of one gradient bucket over all ranks, in two halves. The communicator's thread runs them.

    Args:
        index: DDP's number of the bucket.
        buffer: (numel,), changed in place.
    """

    def __init__(self, index: int, buffer: Tensor) -> None:
        self.index = index
        self.buffer = buffer
        self._ended = threading.Event()
        self._error: Exception | None = None

    @property
    def has_arrived(self) -> bool:
        """Whether `wait` would not block."""
        return self._ended.is_set()

    def wait(self) -> None:
        """Return when ``buffer`` holds the sum. Call it after `RingHalves.release`, without which it never does."""
        self._ended.wait()
        if self._error is not None:
            raise RuntimeError(f"the sum of gradient bucket {self.index} failed") from self._error

    def end(self, error: Exception | None = None) -> None:
        """Let `wait` return, or raise for ``error``."""
        self._error = error
        self._ended.set()


class RingHalves:
    """Sums gradient buckets by reduce-scatters during backward and all-gathers after it, in a thread of its own.

    The thread runs both in one queue, so no all-gather begins before the last reduce-scatter has ended: that is the
    barrier of DeAR. The training thread does not wait there, but loads the next batch.

    Args:
        group: used for the buckets alone; `close` destroys it.
    """

    compressed: CompressedAllReduce | None = None  # sums are exact

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._queue: SimpleQueue[tuple[Callable[[RingSum], None], RingSum] | None] = SimpleQueue()
        self._scattered: list[RingSum] = []  # of this backward pass
        self._thread = threading.Thread(target=self._run, name="DeAR", daemon=True)
        self._thread.start()

    def submit(
        self, index: int, buffer: Tensor, parameters: Sequence[Tensor] = (), fills: Sequence[Any] = ()
    ) -> RingSum:
        """Start the reduce-scatter of a bucket that backward has filled."""
        assert not fills, "DDP has filled the bucket"
        bucket = RingSum(index, buffer)
        self._scattered.append(bucket)
        self._queue.put((self._reduce_scatter, bucket))
        return bucket

    def release(self) -> None:
        """Start the all-gathers: backward has ended. DDP gives the layers nearest the input the highest index."""
        for bucket in sorted(self._scattered, key=lambda bucket: bucket.index, reverse=True):
            self._queue.put((self._all_gather, bucket))
        self._scattered.clear()

    def close(self) -> None:
        """Stop the thread once the queue is empty. Destroy the group if that takes at most 5 s."""
        self._queue.put(None)
        self._thread.join(timeout=5.0)
        if not self._thread.is_alive():
            destroy_group(self._group)

    def _run(self) -> None:
        failed: Exception | None = None
        while (work := self._queue.get()) is not None:
            half, bucket = work
            try:
                if failed is None:
                    half(bucket)
            except Exception as error:
                failed = error
            if failed is not None:
                bucket.end(failed)

    # Neither half checks that all ranks make the same call, as `ring_all_reduce` does: a rival should not pay for it.

    def _reduce_scatter(self, bucket: RingSum) -> None:
        steps = self._group.size() - 1
        # At this position the sum of chunk n ends on rank n, from where the all-gather begins.
        self._run_ring(bucket.buffer, num_reducing=steps, num_copying=0, position=self._group.rank() - 1)

    def _all_gather(self, bucket: RingSum) -> None:
        self._run_ring(bucket.buffer, num_reducing=0, num_copying=self._group.size() - 1)
        bucket.end()

    def _run_ring(self, buffer: Tensor, **schedule: Any) -> None:
        with torch.no_grad():
            run_ring(buffer, self._group, segment_bytes=SEGMENT_BYTES, **schedule)


@dataclass(frozen=True)
class DeAROptions(CommunicatorOptions):
    """Layered SGD's options, with another communicator."""

    @override
    def make_communicator(
        self,
        topology: RankTopology,
        rank: int,
        device: torch.device,
        backend: str | None,
        timeout: timedelta,
        *args: Any,
        **kwargs: Any,
    ) -> GradientCommunicator:
        """Return a `RingHalves`; all ranks of the job must call it."""
        return RingHalves(dist.new_group(timeout=timeout))


class DeARStrategy(LayeredSGDStrategy):
    """DeAR's order on CPU: layered SGD's buckets and postponed updates, and a flat ring in two halves.

    Where updates cannot go bucket by bucket, as with clipping by the norm, the forward waits for all all-gathers.
    """

    def __init__(self) -> None:
        super().__init__(group_size=1)
        self._options = DeAROptions("leader", "step", "ring", "cpu", None)
