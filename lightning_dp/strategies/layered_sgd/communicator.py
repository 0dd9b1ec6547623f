"""The communicator: a thread that carries gradient buckets through the two levels while the rank does other work."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dp.collectives.hierarchical import HierarchicalAllReduce
from lightning_dp.collectives.host_copy import HostCopy
from lightning_dp.collectives.tracing import OnStage
from lightning_dp.strategies.layered_sgd.bucket import BucketReduction, named

REDUCE, ALL_REDUCE, BROADCAST = "intra-group reduce", "inter-group all-reduce", "intra-group broadcast"

NOTHING = -1  # no bucket


class _Choice:
    """Rank 0's choice of a bucket, on its way to all ranks."""

    def __init__(self, index: int, group: dist.ProcessGroup, where: str) -> None:
        self._what = f"the order of the gradient buckets, {where}"
        self._index = torch.tensor([index])
        with named(self._what):
            self._work = dist.broadcast(self._index, group=group, group_src=0, async_op=True)

    def wait(self) -> int:
        """The bucket's index, or `NOTHING`."""
        with named(self._what):
            self._work.wait()
        return int(self._index)


class Communicator:
    """Carries submitted buckets one after another; every rank of the job has one.

    In the paper the communicator is a CPU process a node (arXiv 1906.05936, section 4.1). A thread with process groups
    of its own has the same data flow: its waits are in native code, which lets the rank's Python go on.

    Args:
        collective: the stages.
        prioritised: carry a bucket as soon as backward has produced it, and the highest index first: the layers nearest
            the input, whose next forward comes first. Ranks see buckets become ready at different times, so rank 0
            chooses and tells the others. False: after backward, in the order of submission.
        timeout: how long to wait for a bucket that rank 0 has chosen and this rank has not produced.
        device: of the buckets.
        on_host: sum copies of the buckets in host memory; ``collective`` then needs groups that can, such as gloo's.
        on_stage: told of each stage, and of what the rank's own thread waits.
    """

    def __init__(
        self,
        collective: HierarchicalAllReduce,
        prioritised: bool,
        timeout: timedelta,
        device: torch.device,
        on_host: bool = False,
        on_stage: OnStage | None = None,
    ) -> None:
        self._collective = collective
        self._on_stage = on_stage
        self._timeout_s = timeout.total_seconds()
        self._on_host = on_host
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._order_group = dist.new_group(timeout=timeout, backend="gloo") if prioritised else None
        self._held: list[BucketReduction] = []
        self._ready: dict[int, BucketReduction] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._failed: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="lightning_dp communicator", daemon=True)
        self._thread.start()

    def submit(self, index: int, buffer: Tensor) -> BucketReduction:
        """Start to sum ``buffer`` over the group, in place; the rest follows at once, or after `release`.

        Every rank submits the same indices in the same order, and the same index again only after the last one's
        `BucketReduction.wait`.
        """
        bucket = BucketReduction(index, buffer, self._collective.describe("inside"), self._on_stage, self.release)
        if self._on_host:
            bucket.on_host = HostCopy(buffer, self._stream)
        elif self._stream is not None:
            bucket.produced = torch.cuda.current_stream(buffer.device).record_event()
        if self._stream is None:
            bucket.works = self._collective.intra_group_reduce(bucket.carried)
        self._held.append(bucket)
        if self._order_group is not None:
            self.release()
        return bucket

    def release(self) -> None:
        """Let what was submitted go on, now that backward has ended. Prioritised buckets do not wait for this."""
        with self._changed:
            for bucket in self._held:
                assert bucket.index not in self._ready, f"bucket {bucket.index} submitted twice"
                if self._failed is not None:
                    bucket.settle(self._failed)
                else:
                    self._ready[bucket.index] = bucket
            self._held.clear()
            self._changed.notify_all()

    def close(self) -> None:
        """Stop the thread once it has carried what it holds, and release the process groups."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        # A thread that waits for a dead peer ends by its collective's timeout; there is no sense in waiting for that.
        self._thread.join(timeout=5.0)
        if not self._thread.is_alive():
            self._collective.close()
            if self._order_group is not None:
                dist.destroy_process_group(self._order_group)

    def _run(self) -> None:
        bucket, proposal = None, None
        try:
            while (bucket := self._next(proposal)) is not None:
                proposal = self._carry(bucket)
                bucket = None  # delivered: what fails from here on is another one's
        except Exception as error:
            self._fail(error, bucket)

    def _next(self, proposal: _Choice | None) -> BucketReduction | None:
        """Wait for the bucket whose turn it is; None when the communicator is closed."""
        index = NOTHING if proposal is None else proposal.wait()
        if index == NOTHING:
            with self._changed:
                self._changed.wait_for(lambda: self._ready or self._closed)
                if not self._ready:
                    return None
                index = next(iter(self._ready))
            if self._order_group is not None:
                index = self._choose(self._order_group).wait()
        with self._changed:
            if not self._changed.wait_for(lambda: index in self._ready or self._closed, self._timeout_s):
                raise TimeoutError(f"bucket {index}, chosen by rank 0, was not produced within {self._timeout_s} s")
            return self._ready.pop(index, None)

    def _choose(self, group: dist.ProcessGroup) -> _Choice:
        """Start to tell all ranks what rank 0 would carry next, or that nothing is ready there."""
        with self._changed:
            index = max(self._ready, default=NOTHING)
        return _Choice(index, group, self._collective.describe("all"))

    def _carry(self, bucket: BucketReduction) -> _Choice | None:
        """Take ``bucket`` through the stages, the last of which is only started; return the proposal for the next."""
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            if self._stream is not None:
                self._start_on_gpu(bucket, self._stream)
            with self._recorded(REDUCE):
                bucket.wait_for_works()
            # The next bucket is agreed upon while this one crosses: else the link would idle for a round trip.
            proposal = None if self._order_group is None else self._choose(self._order_group)
            with self._recorded(ALL_REDUCE), bucket.named(self._collective.describe("between")):
                self._collective.inter_group_all_reduce(bucket.carried)
            # The broadcast is only started: the next bucket crosses the groups meanwhile.
            start = time.perf_counter()
            bucket.works = self._collective.intra_group_broadcast(bucket.carried)
            if self._stream is not None and bucket.on_host is None:
                for work in bucket.works:
                    work.wait()
                bucket.delivered = self._stream.record_event()
            elif bucket.works and (on_stage := self._on_stage) is not None:
                done = bucket.works[-1].get_future()
                done.add_done_callback(lambda _: on_stage(BROADCAST, start, time.perf_counter()))
        bucket.settle()
        return proposal

    def _start_on_gpu(self, bucket: BucketReduction, stream: torch.cuda.Stream) -> None:
        """Start the sum inside the group once backward has filled the bucket; `submit` could not wait for that.

        On NCCL there is a second reason: all collectives of a group must be issued in one order, so by one thread.
        """
        if bucket.on_host is not None:
            bucket.on_host.wait()
        elif bucket.produced is not None:
            stream.wait_event(bucket.produced)
        bucket.works = self._collective.intra_group_reduce(bucket.carried)

    @contextmanager
    def _recorded(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if self._on_stage is not None:
            self._on_stage(stage, start, time.perf_counter())

    def _fail(self, error: Exception, bucket: BucketReduction | None) -> None:
        with self._changed:
            self._failed = error
            stranded = [*self._ready.values(), *([bucket] if bucket is not None else [])]
            self._ready.clear()
        for each in stranded:
            each.settle(error)
