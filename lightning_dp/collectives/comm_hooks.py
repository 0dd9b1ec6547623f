"""Communication hooks of DDP that average gradients while backward continues: the queue of buckets, and the ring.

On gloo a thread of its own averages the buckets. On NCCL the thread that calls the hook issues all messages itself, on
a side stream, and the GPU sends them while backward continues. NCCL requires that all ranks issue their collectives in
one order. Backward calls the hooks in the same order on all ranks, and global batch norm and DDP issue theirs from the
same thread. A second thread would mix its messages into theirs in an order of its own, and two ranks could wait
forever.
"""

import copy
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.futures import Future
from typing_extensions import override

from lightning_dp._private.torch_names import device_types, group_timeout
from lightning_dp.collectives import streams
from lightning_dp.collectives.groups import destroy_group, resolve_group, sends_from_device, unbound_default_group
from lightning_dp.collectives.ring import SEGMENT_BYTES, WIRE_DTYPES, ring_all_reduce


class BucketQueue(ABC):
    """Base of the states of communication hooks: a process group and a queue of buckets.

    A worker thread processes the queue in the order in which DDP submits the buckets, which is the same on all ranks.
    The thread ends when the queue is empty, so that none is left between backward passes. On NCCL there is no thread.

    Args:
        group: used for the buckets alone, since they are sent at the same time as other messages. Create it with
            ``dist.new_group(ranks)`` from the ranks that DDP averages over. None: the first bucket creates a group of
            all ranks, with the timeout of the default group.
        thread_name: of the worker thread.
    """

    def __init__(self, group: dist.ProcessGroup | None, thread_name: str) -> None:
        self.group = group
        self._thread_name = thread_name
        self._default_group: dist.ProcessGroup | None = None  # the default group when `_own_group` was created
        self._own_group: dist.ProcessGroup | None = None
        # The lock makes "the queue is empty" and "the worker ends" one step: a bucket queued in between would be lost.
        self._lock = threading.Lock()
        self._queue: deque[Callable[[], None]] = deque()
        self._worker: threading.Thread | None = None
        self._error: Exception | None = None
        self._stream: streams.Stream | None = None

    @abstractmethod
    def _average(self, buffer: torch.Tensor, parameters: list[torch.Tensor], group: dist.ProcessGroup) -> None:
        """Average ``buffer``, (numel,), over the ranks of ``group``, in place. Runs in the worker thread, if any."""

    def submit(self, buffer: torch.Tensor, parameters: list[torch.Tensor] | None = None) -> Future[torch.Tensor]:
        """Queue a bucket to be averaged over the ranks in place. Return a future of ``buffer``.

        Args:
            buffer: (numel,) the bucket's gradients.
            parameters: whose gradients they are, in order.
        """
        group = self._require_group()
        future = streams.new_future(buffer.device)
        stream = None
        if streams.has_streams(buffer.device):
            stream = self._side_stream(buffer.device)
            stream.wait_stream(streams.current_stream(buffer.device))

        def work() -> None:
            if stream is not None:
                # A new thread is on device 0. Without this line each rank would make a CUDA context there.
                streams.set_device(buffer.device)
            with streams.on_stream(stream):  # does nothing if stream is None
                try:
                    if self._error is not None:
                        raise self._error
                    self._average(buffer, parameters or [], group)
                except Exception as error:
                    # Fail the remaining buckets at once. Each would wait for the same peer until the timeout.
                    self._error = error
                    future.set_exception(error)  # type: ignore[arg-type]  # torch annotates a result
                else:
                    future.set_result(buffer)
                if stream is not None:
                    # A rank whose backward raises drops the buffer while its messages are under way.
                    streams.keep_until_done(buffer, stream)

        # DDP raises an exception that is raised inside `then`. One from `set_exception` it would take for a result.
        result = future.then(lambda done: done.value())
        if sends_from_device(buffer, group):
            work()
            return result
        with self._lock:
            self._queue.append(work)
            if self._worker is None:
                self._worker = threading.Thread(target=self._run_queue, name=self._thread_name)
                self._worker.start()
        return result

    def _side_stream(self, device: torch.device) -> streams.Stream:
        """Return the stream for messages. On the current one, the next kernels of backward would wait for them.

        All buckets share one stream, so that the GPU, too, keeps the order in which they were issued.
        """
        if self._stream is None or self._stream.device != device:
            self._stream = streams.new_stream(device)
        return self._stream

    def _run_queue(self) -> None:
        """Process the queue until it is empty. Target of the worker thread."""
        while True:
            with self._lock:
                if not self._queue:
                    self._worker = None
                    return
                work = self._queue.popleft()
            work()

    def _require_group(self) -> dist.ProcessGroup:
        """Return the group of the worker. Create it on first use, and again if the default group has been replaced."""
        if self.group is not None:
            return resolve_group(self.group)
        default_group = resolve_group(None)
        if self._own_group is None or self._default_group is not default_group:
            timeout = group_timeout(default_group, device_types(default_group)[0])
            with unbound_default_group(None):
                self._own_group = dist.new_group(timeout=timeout)
            self._default_group = default_group
            self._error = None
        return self._own_group

    def close(self) -> None:
        """Wait for queued buckets and destroy the process group that the state created. It can be used again."""
        with self._lock:
            worker = self._worker
        if worker is not None:
            worker.join()
        group = self._own_group
        self._own_group = None
        self._default_group = None
        self._error = None
        destroy_group(group)


# --- Ring all-reduce as a communication hook of `DistributedDataParallel`.
#
#     model = DistributedDataParallel(module)
#     model.register_comm_hook(RingState(wire_dtype=torch.bfloat16), ring_all_reduce_hook)
#
# The ring of each gradient bucket starts as soon as backward has filled the bucket: on gloo in a worker thread, on NCCL
# on a side stream. Backward continues meanwhile.

# No `from __future__ import annotations` here: DDP compares the hook's annotations with types, and would find strings.


class RingState(BucketQueue):
    """State of `ring_all_reduce_hook`: its options, its process group, and the queue of buckets.

    Args:
        group: as in `BucketQueue`.
        wire_dtype: None, float16 or bfloat16, as in `ring_all_reduce`.
        segment_bytes: as in `ring_all_reduce`.

    Copies and pickles hold the options only, so that they create a queue and a process group of their own. A copy
    shares ``group``, if it was given; such a state cannot be pickled.

    Raises:
        ValueError: ``wire_dtype`` is not supported.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        wire_dtype: torch.dtype | None = None,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        if wire_dtype is not None and wire_dtype not in WIRE_DTYPES:
            raise ValueError(f"wire_dtype={wire_dtype} is not supported; use None, torch.float16 or torch.bfloat16")
        super().__init__(group, "ring_all_reduce_hook")
        self.wire_dtype = wire_dtype
        self.segment_bytes = segment_bytes

    def __deepcopy__(self, memo: dict[int, object]) -> "RingState":
        return copy.copy(self)

    def __reduce__(self) -> tuple[type["RingState"], tuple[dist.ProcessGroup | None, torch.dtype | None, int]]:
        return type(self), (self.group, self.wire_dtype, self.segment_bytes)

    @override
    def _average(self, buffer: torch.Tensor, parameters: list[torch.Tensor], group: dist.ProcessGroup) -> None:
        # DDP has compared the parameters of the ranks. To read the headers would stop the launch of backward's kernels.
        check_call = not sends_from_device(buffer, group)
        ring_all_reduce(
            buffer,
            group,
            "mean",
            wire_dtype=self.wire_dtype,
            segment_bytes=self.segment_bytes,
            check_call=check_call,
        )


_default_state = RingState()


def ring_all_reduce_hook(state: RingState | None, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    """Average the gradients of ``bucket`` over the ranks with `ring_all_reduce`, while backward continues.

    Pass it to ``DistributedDataParallel.register_comm_hook(state, ring_all_reduce_hook)``. With Lightning on GPUs, use
    ``DDPStrategy(ddp_comm_state=state, ddp_comm_hook=ring_all_reduce_hook)``. On CPU that strategy ignores
    communication hooks, so register the hook on ``trainer.strategy.model`` in ``on_train_start``. On NCCL, DDP's own
    all-reduce is a ring already, and takes less of the host's time; the hook is for a 16-bit ``wire_dtype``.

    Args:
        state: None is a shared `RingState` with no options, for the default group.
        bucket: gradients of one floating-point dtype. Changed in place.

    Returns:
        A future of the bucket's buffer. ``backward()`` raises the errors of `ring_all_reduce`.

    Raises:
        TypeError: ``state`` is not a `RingState` or None.
    """
    if state is None:
        state = _default_state
    if not isinstance(state, RingState):
        raise TypeError(f"the state of ring_all_reduce_hook is {state!r}; use RingState(group=...) or None")
    return state.submit(bucket.buffer())
