"""The communicator on the host: a thread that takes gradient buckets through the hierarchical all-reduce.

`DeviceCommunicator` has the same interface, `GradientCommunicator`, and sums on the GPU.
"""

from __future__ import annotations

import enum
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from datetime import timedelta
from queue import SimpleQueue
from typing import Literal, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dp.collectives import streams
from lightning_dp.collectives.compression.stages import CompressedAllReduce, CompressedStages
from lightning_dp.collectives.compression.wire import complete
from lightning_dp.collectives.groups import OnStage
from lightning_dp.collectives.hierarchical import HierarchicalAllReduce
from lightning_dp.collectives.point_to_point import naming_backend_errors
from lightning_dp.strategies.layered_sgd.gradient_sum import CLOSE_LIMIT_S, WAIT, Pending

NO_BUCKET = -1
# Buckets that the communicator has begun and not settled; the one after them is chosen already. More would not fill the
# link any better, and what the next forward needs first would have to wait for them.
MAX_BEGUN = 2


# Waits for rank 0's choice of the next bucket, and returns its index, or `NO_BUCKET`.
Choice: TypeAlias = Callable[[], int]


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
        self._held: dict[int, BucketReduction] = {}  # submitted, not yet released
        # Guards what threads share: `_ready`, `_begun`, `_closed`, `_failed` and the stages of buckets. Notified when
        # one of them changes. One for all: a signal handler may interrupt what holds it, and wait for any bucket. To
        # wait for a condition releases it, and the communicator can go on.
        self._changed = threading.Condition()
        self._ready: dict[int, BucketReduction] = {}
        self._begun: list[BucketReduction] = []  # taken from `_ready`, not yet settled
        self._closed = False
        self._failed: BaseException | None = None
        self._to_finish: SimpleQueue[BucketReduction | None] = SimpleQueue()  # to be finished; None: no more will come
        self._threads = [threading.Thread(target=self._run, name="lightning_dp communicator", daemon=True)]
        if compressed is not None:
            self._threads.append(threading.Thread(target=self._finish, name="lightning_dp finisher", daemon=True))
        for thread in self._threads:
            thread.start()

    def submit(
        self, index: int, buffer: Tensor, parameters: Sequence[Tensor] = (), fills: Sequence[Pending] = ()
    ) -> BucketReduction:
        """Start the sum of ``buffer`` over all ranks, in place: immediately if ``prioritized``, else after `release`.

        ``parameters`` are those whose gradients lie in the buffer, in its order; only compression needs them. The sum
        begins when what is in ``fills`` has been awaited; the buffer must be in host memory then.

        Every rank submits the same indices in the same order, and an index again only after `BucketReduction.wait` has
        returned for it.
        """
        stages = self._collective if self.compressed is None else self.compressed.stages_of(parameters)
        bucket = BucketReduction(
            index, buffer, stages, self._stream, self._on_host, self.release, self._on_stage, fills, self._changed
        )
        assert index not in self._held, f"bucket {index} submitted twice"
        self._held[index] = bucket
        if self._order_group is not None:
            self.release()
        return bucket

    def release(self) -> None:
        """Let the thread process all buckets that were submitted so far. Called when backward has ended."""
        with self._changed:
            if self._failed is not None:
                for bucket in list(self._held.values()):
                    bucket.fail(self._failed)
            else:
                # All at once: a signal handler in between would release a bucket a second time, or wait for it forever.
                self._ready.update(self._held)
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
        """Take one bucket after the other through the stages, or up to its last messages. The first thread's work."""
        if self._stream is not None:
            # The thread starts on device 0. On other ranks its first call would create a context there, which takes
            # about half a gigabyte of that GPU's memory.
            streams.set_device(self._device)
        choice: Choice | None = None
        try:
            while (bucket := self._next(choice)) is not None:
                with self._changed:
                    self._begun.append(bucket)
                    self._changed.wait_for(lambda: len(self._begun) <= MAX_BEGUN or self._failed)
                    if self._failed is not None:
                        raise self._failed
                bucket.reduce_intra_group()
                choice = None
                # The ranks agree on the next bucket during this one's inter-group all-reduce. If they agreed after it,
                # the link would be idle for a round trip. A compressed one is under way when `_next` asks, which may
                # then have more to choose from.
                if self._order_group is not None and self.compressed is None:
                    choice = self._choose(self._order_group)
                if bucket.reduce_inter_group():
                    self._to_finish.put(bucket)
                else:
                    self._settle(bucket)
                del bucket  # its buffer may be of the size of the model
        except BaseException as error:
            self._fail(error)
        self._to_finish.put(None)

    def _finish(self) -> None:
        """Finish sums whose last messages are under way. The second thread's work."""
        try:
            while (bucket := self._to_finish.get()) is not None:
                self._settle(bucket)
                del bucket  # as in `_run`
        except BaseException as error:
            self._fail(error)

    def _next(self, choice: Choice | None) -> BucketReduction | None:
        """Wait for the bucket whose turn it is. Return None when the communicator is closed."""
        index = NO_BUCKET if choice is None else choice()
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
                index = self._choose(self._order_group)()
        with self._changed:
            # Rank 0 may be ahead, and choose a bucket that backward has not filled here yet.
            if not self._changed.wait_for(lambda: index in self._ready or self._closed, self._timeout_s):
                raise TimeoutError(
                    f"gradient bucket {index}, which rank 0 has chosen next, was not filled on this rank within "
                    f"{self._timeout_s} s: does every rank run the same forward and backward, or has this rank stalled?"
                )
            return self._ready.pop(index, None)

    def _choose(self, group: dist.ProcessGroup) -> Choice:
        """Start to tell all ranks which bucket comes next: of those whose data is there on rank 0, the highest index.

        Every rank takes part in the broadcast; what the others propose is overwritten by rank 0's choice.
        """
        with self._changed:
            # A bucket whose copy is still under way would keep the link idle while others wait behind it.
            there = [index for index, bucket in self._ready.items() if bucket.copy_is_done]
            index = torch.tensor([max(there, default=NO_BUCKET)])

        def what() -> str:
            return f"the order of the gradient buckets, {self._collective.describe('all')}"

        with naming_backend_errors(what):
            work = dist.broadcast(index, group=group, group_src=0, async_op=True)

        def wait() -> int:
            with naming_backend_errors(what):
                work.wait()
            return int(index)

        return wait

    def _settle(self, bucket: BucketReduction) -> None:
        bucket.settle()
        with self._changed:
            self._begun.remove(bucket)
            self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        """Fail all buckets that are begun or ready. `release` fails those that are submitted later."""
        with self._changed:
            if self._failed is None:  # what comes later is a consequence
                self._failed = error
            stranded = [*self._begun, *self._ready.values()]
            self._ready.clear()
            self._changed.notify_all()
        for each in stranded:
            each.fail(self._failed)


# Stages of a bucket that are reported.
INTRA_GROUP_REDUCE = "intra-group reduce"
INTER_GROUP_ALL_REDUCE = "inter-group all-reduce"
INTRA_GROUP_BROADCAST = "intra-group broadcast"


class Stage(enum.Enum):
    """How far a bucket has come. It settles and is delivered, or it fails."""

    UNDER_WAY = enum.auto()
    """The communicator has to take it through the collectives."""
    SETTLED = enum.auto()
    """The broadcast, the last collective, is under way, and the communicator is done. `wait` waits for the rest."""
    DELIVERED = enum.auto()
    """The buffer holds the sum over all ranks."""
    FAILED = enum.auto()
    """A collective has raised, and `wait` raises the error."""


_HAS_SETTLED = (Stage.SETTLED, Stage.DELIVERED)


class BucketReduction:
    """The sum of one gradient bucket over all ranks: three collectives, started on one thread and awaited on another.

    The training thread calls the constructor, every thread that needs the sum `wait`, and the communicator's threads
    the other methods: one after the other, but one may call `fail` while another works on the bucket. So the stage
    changes under a lock.

    Args:
        index: DDP's number of the bucket; the highest index holds the layers nearest the input.
        buffer: (numel,) the bucket's gradients, changed in place.
        collective: performs the stages.
        stream: of the copy to host memory, if the buffer is on a GPU; then ``on_host`` must be given as well.
        on_host: sum a copy of the buffer in host memory, and copy the sum back in `wait`.
        release: called by `wait` if the bucket has not settled: lets the communicator begin with a bucket that it holds
            back until backward ends. Without it, a hook that reads a gradient during backward would wait forever.
        on_stage: called with name, start and end of each stage, and of the time that `wait` blocks.
        fills: what is under way and fills the buffer; without a stream only.
        changed: guards the stage, and is notified when it changes. None: the bucket has one of its own.
    """

    def __init__(
        self,
        index: int,
        buffer: Tensor,
        collective: HierarchicalAllReduce | CompressedStages,
        stream: streams.Stream | None = None,
        on_host: bool = False,
        release: Callable[[], None] | None = None,
        on_stage: OnStage | None = None,
        fills: Sequence[Pending] = (),
        changed: threading.Condition | None = None,
    ) -> None:
        assert not fills or (stream is None and not on_host), "a copy would be made before the buffer is filled"
        self.index = index
        self.buffer = buffer
        self.stage = Stage.UNDER_WAY
        self._collective = collective
        self._stream = stream
        self._release = release
        self._on_stage = on_stage
        self._host_copy: HostCopy | None = None
        self._works: list[Pending] = [*fills]  # the collectives that are under way inside the group
        self._rest: Iterator[None] | None = None  # of the all-reduce between groups
        self._inter_group_since_s = 0.0
        self._delivered: streams.Event | None = None  # the sum is on the GPU again
        # Both are reentrant: a signal handler may save a checkpoint, and call `wait` while it interrupts `wait`.
        self._stage_changed = changed or threading.Condition()
        self._delivery = threading.RLock()
        self._error: BaseException | None = None
        if on_host:
            # What NCCL has summed within the node need not be copied by each of its ranks, and gloo has less to sum.
            self._host_copy = HostCopy(buffer, stream, self._reduce_on_device if collective.reduces_on_device else None)
        if stream is None:
            # The data is complete. The copy of a GPU's buffer is not: this thread would have to wait for it, so the
            # communicator starts the reduce.
            self._works += collective.intra_group_reduce(self._payload)

    @property
    def _payload(self) -> Tensor:
        """What the collectives change: the buffer, or its copy in host memory."""
        return self.buffer if self._host_copy is None else self._host_copy.tensor

    def _reduce_on_device(self, buffer: Tensor) -> slice:
        with self._named("inside"):
            return self._collective.reduce_on_device(buffer)

    @property
    def copy_is_done(self) -> bool:
        """Whether the data to sum is in host memory."""
        return self._host_copy is None or self._host_copy.is_done

    def wait_for_copy(self) -> None:
        """Return when the data to sum is in host memory."""
        if self._host_copy is not None:
            self._host_copy.wait()

    def reduce_intra_group(self) -> None:
        """Wait until the carriers have the sum over their group."""
        start_s = time.perf_counter()
        if self._stream is not None:
            self.wait_for_copy()
            self._works = [*self._collective.intra_group_reduce(self._payload)]
        self._wait_for_works()
        if self._on_stage is not None:
            self._on_stage(INTRA_GROUP_REDUCE, start_s, time.perf_counter())

    def reduce_inter_group(self) -> bool:
        """Sum this rank's shard over the groups, if it carries one.

        Return whether messages are still under way: a compressed sum only begins here, and `settle` ends it.
        """
        self._inter_group_since_s = time.perf_counter()
        with self._named("between"):
            self._rest = self._collective.inter_group_all_reduce(self._payload)
        return self._rest is not None

    def settle(self) -> None:
        """Wait until this rank's shard is summed, and start the broadcast of the sum within the group.

        The broadcast is not awaited: the next bucket's all-reduce runs meanwhile.
        """
        if self._rest is not None:
            with self._named("between"):
                complete(self._rest)
            self._rest = None
        if self._on_stage is not None:
            self._on_stage(INTER_GROUP_ALL_REDUCE, self._inter_group_since_s, time.perf_counter())
        start_s = time.perf_counter()
        works = self._collective.intra_group_broadcast(self._payload)
        self._works = [*works]
        if works and (on_stage := self._on_stage) is not None:
            done = works[-1].get_future()
            done.add_done_callback(lambda _: on_stage(INTRA_GROUP_BROADCAST, start_s, time.perf_counter()))
        with self._stage_changed:
            assert self.stage is Stage.UNDER_WAY, f"bucket {self.index} cannot settle: it is {self.stage}"
            self.stage = Stage.SETTLED
            self._stage_changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Raise ``error`` in the threads that wait for the bucket. Once it has settled they get their sum."""
        with self._stage_changed:
            if self.stage in _HAS_SETTLED:
                return
            self.stage = Stage.FAILED
            self._error = error
            self._stage_changed.notify_all()

    @property
    def has_arrived(self) -> bool:
        """Whether `wait` would return immediately."""
        if self.stage is Stage.DELIVERED:
            return True
        return self.stage is Stage.SETTLED and all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        """Return when ``buffer`` holds the sum over all ranks; on a GPU, when the current stream will see it.

        Raises:
            RuntimeError: a stage failed; the message names the bucket, the stage and the ranks that took part.
        """
        start_s = time.perf_counter()
        if self.stage not in _HAS_SETTLED:
            if self._release is not None:
                self._release()
            self._wait_until_ended()
        if self._error is not None:
            raise RuntimeError(str(self._error)) from self._error
        with self._delivery:  # a second thread must not see half of it, nor deliver again
            if self._delivered is not None:
                # In each call, not only in the first: the current stream may be another one.
                streams.current_stream(self.buffer.device).wait_event(self._delivered)
            if self.stage is Stage.SETTLED:
                self._finish_delivery()
        if self._on_stage is not None:
            self._on_stage(WAIT, start_s, time.perf_counter())

    def _wait_until_ended(self, timeout_s: float | None = None) -> bool:
        with self._stage_changed:
            return self._stage_changed.wait_for(lambda: self.stage is not Stage.UNDER_WAY, timeout_s)

    def _finish_delivery(self) -> None:
        self._wait_for_works()
        if (host_copy := self._host_copy) is not None:
            # The waiting thread copies the sum back, not the communicator: that would have to wait for the broadcast
            # while the link between the groups is idle. And only once: later changes to the gradients must stay.
            host_copy.copy_back()
            self._host_copy = None
            if self._stream is not None:
                self._delivered = streams.record_event(streams.current_stream(self.buffer.device))
        with self._stage_changed:
            self.stage = Stage.DELIVERED  # again, if a signal handler that interrupted this method has delivered it

    def _wait_for_works(self) -> None:
        try:
            for work in self._works:
                work.wait()
        except RuntimeError:
            # Named only now: that takes longer than to see that a bucket has arrived, which is asked for each of them.
            with self._named("inside"):
                raise

    def _named(self, where: Literal["inside", "between"]) -> AbstractContextManager[None]:
        return naming_backend_errors(
            lambda: f"the sum of gradient bucket {self.index}, {self._collective.describe(where)}"
        )


class HostCopy:
    """Copy of a buffer in host memory. The stages of `HierarchicalAllReduce` work on ``tensor`` instead of the buffer.

    In the paper the communicator runs on the CPU, "thereby allowing GPUs to focus on computation" (arXiv 1906.05936,
    section 4.3). A GPU buffer is copied to pinned host memory on ``stream``, and back on the current stream of the
    caller of `copy_back`. PyTorch takes pinned memory from a pool and hands a block out again only after all copies
    that use it have finished. Therefore a new `HostCopy` per bucket and step is as cheap as one that is kept, and it
    may be dropped while `copy_back` is still queued. A CPU buffer is copied at once.

    Args:
        buffer: any dense tensor. Work already queued on the current stream is finished before the copy reads it.
        stream: stream of the copy. None for a buffer on the CPU.
        reduce: called on ``stream`` before the copy. It reduces the buffer in place with those of other ranks, and
            returns the part to copy; the rest of ``tensor`` is uninitialized. None: the whole buffer is copied.

    Attributes:
        tensor: the copy. Valid after `wait`.
    """

    def __init__(
        self,
        buffer: Tensor,
        stream: streams.Stream | None = None,
        reduce: Callable[[Tensor], slice] | None = None,
    ) -> None:
        self._buffer = buffer  # and so its memory is not reused while the copy reads it
        self._copied: streams.Event | None = None
        self.tensor = torch.empty_like(buffer, device="cpu") if stream is None else streams.pinned_like(buffer)
        if stream is not None:
            # Backward fills the buffer on the current stream: without this the copy could read half of it.
            stream.wait_stream(streams.current_stream(buffer.device))
        with streams.on_stream(stream):
            part = ... if reduce is None else reduce(buffer)
            self.tensor[part].copy_(buffer[part], non_blocking=True)
        if stream is not None:
            if reduce is not None:
                # A rank that gives up after an error drops the buffer, of which its neighbors still need the values.
                streams.keep_until_done(buffer, stream)
            # A thread waits for it. Without `blocking` that thread would keep a core busy, which loader workers need.
            self._copied = streams.record_event(stream, blocking=True)

    @property
    def is_done(self) -> bool:
        """Whether `wait` would return immediately."""
        return self._copied is None or self._copied.query()

    def wait(self) -> None:
        """Block the calling thread until ``tensor`` holds the buffer's contents."""
        if self._copied is not None:
            # The CPU reads the tensor next, so waiting on a stream would not be enough.
            self._copied.synchronize()

    def copy_back(self) -> None:
        """Copy ``tensor`` into the buffer on the current stream. Does not block."""
        self._buffer.copy_(self.tensor, non_blocking=True)
        if self._copied is not None:
            # The current stream need not be the one on which the buffer was allocated.
            streams.keep_until_done(self._buffer, streams.current_stream(self._buffer.device))


# Threads that let the training thread go first, where threads share cores.
#
# Collectives on the host take processor time: gloo's threads copy and add, and so do the communicator's. The training
# thread sleeps while a device computes, and has little to do when it wakes up; but all that follows waits for it.

log = logging.getLogger(__name__)
Result = TypeVar("Result")

# On a busy core a thread of this priority gets half the time of one that has none: Linux gives 1.25 times as much for
# each step. With 10 steps messages were late, and ranks waited for each other.
NICE_STEPS = 3


def with_background_threads(make: Callable[[], Result], device: torch.device) -> Result:
    """Return ``make()``. The threads that it starts, and those that they start, have a lower priority than the caller.

    Only on Linux, where each thread has a priority, and inherits that of its creator. Elsewhere, and where the system
    forbids it, all threads have the caller's. An exception that ``make`` raises is raised here.

    Args:
        make: called in a thread of its own, because lowering one's own priority cannot be undone without a permission.
        device: the current device of that thread.
    """
    if not sys.platform.startswith("linux"):
        return make()

    def in_own_thread() -> Result:
        if streams.has_streams(device):
            streams.set_device(device)
        _lower_priority()
        return make()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(in_own_thread).result()


def _lower_priority() -> None:
    thread = threading.get_native_id()
    try:
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICE_STEPS)
    except OSError as error:
        log.info(f"the threads that sum gradients keep the priority of the training thread: {error}")
