"""Ring all-reduce as a communication hook of `DistributedDataParallel`.

    model = DistributedDataParallel(module)
    model.register_comm_hook(RingState(wire_dtype=torch.bfloat16), ring_all_reduce_hook)

The ring of each gradient bucket starts in a worker thread as soon as backward has filled the bucket. Backward continues
meanwhile.
"""

# No `from __future__ import annotations` here: DDP compares the hook's annotations with types, and would find strings.

import threading
from collections import deque
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.futures import Future

from lightning_dp._private.torch_names import device_types, group_timeout
from lightning_dp.collectives.groups import destroy_group, resolve_group
from lightning_dp.collectives.ring import SEGMENT_BYTES, WIRE_DTYPES, ring_all_reduce


class RingState:
    """State of `ring_all_reduce_hook`: its options, its process group, and the queue of buckets.

    A worker thread processes the queue in the order in which DDP submits the buckets, which is the same on all ranks.
    The thread ends when the queue is empty, so that none is left between backward passes.

    Args:
        group: used by the ring alone, since the worker thread sends at the same time as the main thread. Create it with
            ``dist.new_group(ranks)`` from the ranks that DDP averages over. None: the first bucket creates a group of
            all ranks, with the timeout of the default group.
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
        self.group = group
        self.wire_dtype = wire_dtype
        self.segment_bytes = segment_bytes
        self._default_group: dist.ProcessGroup | None = None  # the default group when `_ring_group` was created
        self._ring_group: dist.ProcessGroup | None = None
        # The lock makes "the queue is empty" and "the worker ends" one step: a bucket queued in between would be lost.
        self._lock = threading.Lock()
        self._queue: deque[Callable[[], None]] = deque()
        self._worker: threading.Thread | None = None
        self._error: Exception | None = None

    def __copy__(self) -> "RingState":
        return type(self)(self.group, self.wire_dtype, self.segment_bytes)

    def __deepcopy__(self, memo: dict[int, object]) -> "RingState":
        return self.__copy__()

    def __reduce__(self) -> tuple[type["RingState"], tuple[None, torch.dtype | None, int]]:
        if self.group is not None:
            # Without its group, the unpickled state would average over all ranks.
            raise TypeError(
                "RingState(group=...) cannot be pickled, because a process group belongs to one process; create the "
                "state in each process, or leave group out to average over all ranks"
            )
        return type(self), (None, self.wire_dtype, self.segment_bytes)

    def submit(self, bucket: torch.Tensor) -> Future[torch.Tensor]:
        """Queue ``bucket``, (numel,), to be averaged over the ranks in place. Return a future of the bucket."""
        group = self._require_group()
        future: Future[torch.Tensor] = Future()
        stream = None
        if bucket.is_cuda:
            future = Future(devices=[bucket.device])
            # On the current stream, the next kernels of backward would wait for the messages of the ring.
            stream = torch.cuda.Stream(bucket.device)
            stream.wait_stream(torch.cuda.current_stream(bucket.device))

        def work() -> None:
            with torch.cuda.stream(stream):  # does nothing if stream is None
                try:
                    if self._error is not None:
                        raise self._error
                    ring_all_reduce(bucket, group, "mean", wire_dtype=self.wire_dtype, segment_bytes=self.segment_bytes)
                except Exception as error:
                    # Fail the remaining buckets at once. Each would wait for the same peer until the timeout.
                    self._error = error
                    future.set_exception(error)  # type: ignore[arg-type]  # torch annotates a result
                else:
                    future.set_result(bucket)

        # DDP raises an exception that is raised inside `then`. One from `set_exception` it would take for a result.
        result = future.then(lambda done: done.value())
        with self._lock:
            self._queue.append(work)
            if self._worker is None:
                self._worker = threading.Thread(target=self._run_queue, name="ring_all_reduce_hook")
                self._worker.start()
        return result

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
        """Return the group of the ring. Create it on first use, and again if the default group has been replaced."""
        if self.group is not None:
            return resolve_group(self.group)
        default_group = resolve_group(None)
        if self._ring_group is None or self._default_group is not default_group:
            timeout = group_timeout(default_group, device_types(default_group)[0])
            self._ring_group = dist.new_group(timeout=timeout)
            self._default_group = default_group
            self._error = None
        return self._ring_group

    def close(self) -> None:
        """Wait for queued buckets and destroy the process group that the state created. It can be used again."""
        with self._lock:
            worker = self._worker
        if worker is not None:
            worker.join()
        group = self._ring_group
        self._ring_group = None
        self._default_group = None
        self._error = None
        destroy_group(group)


_default_state = RingState()


def ring_all_reduce_hook(state: RingState | None, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    """Average the gradients of ``bucket`` over the ranks with `ring_all_reduce`, while backward continues.

    Pass it to ``DistributedDataParallel.register_comm_hook(state, ring_all_reduce_hook)``. With Lightning on GPUs, use
    ``DDPStrategy(ddp_comm_state=state, ddp_comm_hook=ring_all_reduce_hook)``. On CPU that strategy ignores
    communication hooks, so register the hook on ``trainer.strategy.model`` in ``on_train_start``.

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
