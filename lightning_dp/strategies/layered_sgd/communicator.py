"""The communicator on the host: a thread that takes gradient buckets through the hierarchical all-reduce.

`DeviceCommunicator` has the same interface, `GradientCommunicator`, and sums on the GPU.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from queue import SimpleQueue

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dp.collectives import streams
from lightning_dp.collectives.compression.stages import CompressedAllReduce
from lightning_dp.collectives.hierarchical import HierarchicalAllReduce
from lightning_dp.collectives.tracing import OnStage
from lightning_dp.strategies.layered_sgd.bucket import BucketReduction, blame
from lightning_dp.strategies.layered_sgd.gradient_sum import CLOSE_LIMIT_S
from lightning_dp.strategies.layered_sgd.issue_order import IssueOrder

NO_BUCKET = -1
# Buckets that the communicator has begun and not settled; the one after them is chosen already. More would not fill the
# link any better, and what the next forward needs first would have to wait for them.
MAX_BEGUN = 2


class _Choice:
    """Rank 0's choice of the next bucket, on its way to all ranks."""

    def __init__(self, index: int, group: dist.ProcessGroup, where: str) -> None:
        self._what = f"the order of the gradient buckets, {where}"
        self._index = torch.tensor([index])
        with blame(self._what):
            self._work = dist.broadcast(self._index, group=group, group_src=0, async_op=True)

    def wait(self) -> int:
        """Return the bucket's index, or `NO_BUCKET`."""
        with blame(self._what):
            self._work.wait()
        return int(self._index)


class Communicator:
    """Sums the submitted buckets in host memory, in one order; every rank of the job has one.

    In the paper the communicator is a CPU process on each node (arXiv 1906.05936, section 4.1). Here it is a thread
    with process groups of its own: the data flow is the same, and its waits are in native code, so the rank's own
    Python code runs on.

    The order of the buckets is decided in `_next` and `_choose`. All ranks must sum them in one order. Otherwise two
    ranks could each wait for a bucket that the other sums later. With compression, a second thread finishes a sum when
    its last messages are under way, and the first one begins with the next bucket.

    Args:
        collective: performs the stages.
        prioritized: sum a bucket as soon as its data is in host memory, the highest index first: DDP gives it to the
            layers nearest the input, which the next forward runs first. Ranks see buckets become ready at different
            times, so rank 0 chooses and tells the others. False: after backward, in the order of submission, which is
            DDP's and the same on all ranks.
        timeout: how long to wait for a bucket that rank 0 has chosen and this rank has not submitted.
        device: where the buckets are.
        on_host: sum copies of the buckets. Buckets on a GPU must be copied.
        on_stage: called with name, start and end of each stage, and of the time that the training thread waits.
        compressed: performs the stages in place of ``collective``, with a compressed stage between groups.
    """

    issue_order: IssueOrder | None = None  # what has arrived decides

    def __init__(
        self,
        collective: HierarchicalAllReduce,
        prioritized: bool,
        timeout: timedelta,
        device: torch.device,
        on_host: bool = False,
        on_stage: OnStage | None = None,
        compressed: CompressedAllReduce | None = None,
    ) -> None:
        self._collective = collective
        self.compressed = compressed
        self._on_stage = on_stage
        self._timeout_s = timeout.total_seconds()
        self._on_host = on_host
        assert on_host or not streams.has_streams(device), "sums in GPU memory are for DeviceCommunicator"
        self._device = device
        self._stream = streams.new_stream(device) if streams.has_streams(device) else None
        # A group of its own: the choice of the next bucket travels during the current one's inter-group all-reduce.
        self._order_group = dist.new_group(timeout=timeout, backend="gloo") if prioritized else None
        self._held: list[BucketReduction] = []  # submitted, not yet released
        # Guards what threads share: `_ready`, `_begun`, `_closed` and `_failed`. Notified when one of them changes.
        self._changed = threading.Condition()
        self._ready: dict[int, BucketReduction] = {}
        self._begun: list[BucketReduction] = []  # taken from `_ready`, not yet settled
        self._closed = False
        self._failed: Exception | None = None
        self._crossing: SimpleQueue[BucketReduction | None] = SimpleQueue()  # to be finished; None: no more will come
        self._threads = [threading.Thread(target=self._run, name="lightning_dp communicator", daemon=True)]
        if compressed is not None:
            self._threads.append(threading.Thread(target=self._finish, name="lightning_dp finisher", daemon=True))
        for thread in self._threads:
            thread.start()

    def submit(self, index: int, buffer: Tensor, parameters: Sequence[Tensor] = ()) -> BucketReduction:
        """Start the sum of ``buffer`` over all ranks, in place: immediately if ``prioritized``, else after `release`.

        ``parameters`` are those whose gradients lie in the buffer, in its order; only compression needs them.

        Every rank submits the same indices in the same order, and an index again only after `BucketReduction.wait` has
        returned for it.
        """
        stages = self._collective if self.compressed is None else self.compressed.stages_of(parameters)
        bucket = BucketReduction(index, buffer, stages, self._stream, self._on_host, self.release, self._on_stage)
        self._held.append(bucket)
        if self._order_group is not None:
            self.release()
        return bucket

    def release(self) -> None:
        """Let the thread process all buckets that were submitted so far. Called when backward has ended."""
        with self._changed:
            for bucket in self._held:
                assert bucket.index not in self._ready, f"bucket {bucket.index} submitted twice"
                if self._failed is not None:
                    bucket.fail(self._failed)
                else:
                    self._ready[bucket.index] = bucket
            self._held.clear()
            self._changed.notify_all()

    def close(self) -> None:
        """Stop the threads when they have summed all buckets. Destroy the groups if that does not take long."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        # A thread that waits for a dead peer ends when its collective times out; do not wait for that.
        deadline_s = time.monotonic() + CLOSE_LIMIT_S
        for thread in self._threads:
            thread.join(timeout=max(0.0, deadline_s - time.monotonic()))
        # The device may still reduce buckets that were never released.
        is_idle = self._stream is None or streams.is_done_within(self._stream, CLOSE_LIMIT_S)
        if is_idle and not any(thread.is_alive() for thread in self._threads):
            self._collective.close()
            if self._order_group is not None:
                dist.destroy_process_group(self._order_group)

    def _run(self) -> None:
        if self._stream is not None:
            # The thread starts on device 0. On other ranks its first call would create a context there, which takes
            # about half a gigabyte of that GPU's memory.
            streams.set_device(self._device)
        proposal: _Choice | None = None
        try:
            while (bucket := self._next(proposal)) is not None:
                proposal = self._begin(bucket)
                del bucket  # its buffer may be of the size of the model
        except Exception as error:
            self._fail(error)
        self._crossing.put(None)

    def _finish(self) -> None:
        """Finish sums whose last messages are under way. The second thread's work."""
        try:
            while (bucket := self._crossing.get()) is not None:
                self._settle(bucket)
                del bucket  # as in `_run`
        except Exception as error:
            self._fail(error)

    def _next(self, proposal: _Choice | None) -> BucketReduction | None:
        """Wait for the bucket whose turn it is. Return None when the communicator is closed."""
        index = NO_BUCKET if proposal is None else proposal.wait()
        if index == NO_BUCKET:
            with self._changed:
                self._changed.wait_for(lambda: self._ready or self._closed)
                if not self._ready:
                    return None
                first = next(iter(self._ready.values()))
            index = first.index
            # All ranks submit in one order and have summed the same buckets, so the first one left is the same on all.
            # If it is the first of a backward, the link is idle, and an agreement would cost more than the priority of
            # another bucket is worth.
            if self._order_group is not None and index != 0:
                # On a GPU backward has only launched the kernels that fill the buckets. Copies arrive in the order of
                # submission; with the first one there is something to choose.
                first.wait_for_copy()
                index = self._choose(self._order_group).wait()
        with self._changed:
            # Rank 0 may be ahead, and choose a bucket that backward has not filled here yet.
            if not self._changed.wait_for(lambda: index in self._ready or self._closed, self._timeout_s):
                raise TimeoutError(
                    f"gradient bucket {index}, which rank 0 has chosen next, was not filled on this rank within "
                    f"{self._timeout_s} s: does every rank run the same forward and backward, or has this rank stalled?"
                )
            return self._ready.pop(index, None)

    def _choose(self, group: dist.ProcessGroup) -> _Choice:
        """Start to tell all ranks which bucket comes next: of those whose data is there on rank 0, the highest index.

        Every rank takes part in the broadcast; what the others propose is overwritten by rank 0's choice.
        """
        with self._changed:
            # A bucket whose copy is still under way would keep the link idle while others wait behind it.
            there = [index for index, bucket in self._ready.items() if bucket.copy_is_done]
            index = max(there, default=NO_BUCKET)
        return _Choice(index, group, self._collective.describe("all"))

    def _begin(self, bucket: BucketReduction) -> _Choice | None:
        """Take ``bucket`` through the stages, or up to its last messages; return the proposal for the next one."""
        with self._changed:
            self._begun.append(bucket)
            self._changed.wait_for(lambda: len(self._begun) <= MAX_BEGUN or self._failed)
            if self._failed is not None:
                raise self._failed
        bucket.reduce_intra_group()
        # The ranks agree on the next bucket during this one's inter-group all-reduce. If they agreed after it, the
        # link would be idle for a round trip. A compressed one is under way when `_next` asks, which may then have more
        # to choose from.
        proposal: _Choice | None = None
        if self._order_group is not None and self.compressed is None:
            proposal = self._choose(self._order_group)
        if bucket.start_inter_group():
            self._crossing.put(bucket)
        else:
            self._settle(bucket)
        return proposal

    def _settle(self, bucket: BucketReduction) -> None:
        bucket.finish_inter_group()
        bucket.start_broadcast()
        with self._changed:
            self._begun.remove(bucket)
            self._changed.notify_all()

    def _fail(self, error: Exception) -> None:
        """Fail all buckets that are begun or ready. `release` fails those that are submitted later."""
        with self._changed:
            if self._failed is None:  # what comes later is a consequence
                self._failed = error
            stranded = [*self._begun, *self._ready.values()]
            self._ready.clear()
            self._changed.notify_all()
        for each in stranded:
            each.fail(self._failed)
