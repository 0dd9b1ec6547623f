"""Ring all-reduce as the communication hook of `DistributedDataParallel`.

    model = DistributedDataParallel(module)
    model.register_comm_hook(RingState(wire_dtype=torch.bfloat16), ring_all_reduce_hook)

Each bucket starts as soon as backward has filled it, in a thread, and backward goes on meanwhile.
"""

# No `from __future__ import annotations` here: DDP looks at the hook's annotations and wants types, not strings.

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import torch
import torch.distributed as dist
from torch.futures import Future

from lightning_dp._private.torch_names import device_types, group_timeout
from lightning_dp.collectives.groups import resolve_group
from lightning_dp.collectives.ring import SEGMENT_BYTES, WIRE_DTYPES, ring_all_reduce


class RingState:
    """What the hook needs from one bucket to the next: its options, a process group of its own, and a queue.

    A thread works off the queue in the order in which DDP hands out buckets, which is the same on all ranks, and ends
    when the queue is empty: between backward passes there is none.

    Args:
        group: for the ring alone, since its messages are sent beside what the main thread does: make it with
            ``dist.new_group(ranks)``, of the ranks that DDP averages over. With None the first bucket makes one of all
            ranks.
        wire_dtype: None, float16 or bfloat16: see `ring_all_reduce`.
        segment_bytes: see `ring_all_reduce`.

    Raises:
        ValueError: ``wire_dtype`` is something else.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        wire_dtype: torch.dtype | None = None,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        if wire_dtype is not None and wire_dtype not in WIRE_DTYPES:
            raise ValueError(f"wire_dtype={wire_dtype} is not supported; use None, torch.float16 or torch.bfloat16")
        self.group, self.wire_dtype, self.segment_bytes = group, wire_dtype, segment_bytes
        self._world: dist.ProcessGroup | None = None
        self._ring_group: dist.ProcessGroup | None = None
        self._queue: deque[Callable[[], None]] = deque()
        self._worker: threading.Thread | None = None
        self._lock = threading.Lock()
        self._error: Exception | None = None

    def submit(self, bucket: torch.Tensor) -> Future[torch.Tensor]:
        """Queue the average of ``bucket``, (K,), in place. The future's value is the bucket."""
        group = self._prepare()
        future: Future[torch.Tensor] = Future()
        stream = None
        if bucket.is_cuda:
            # A stream of its own, or backward's next kernels would wait for the ring's messages.
            future = Future(devices=[bucket.device])
            stream = torch.cuda.Stream(bucket.device)
            stream.wait_stream(torch.cuda.current_stream(bucket.device))

        def work() -> None:
            with torch.cuda.stream(stream):  # of None: no change
                try:
                    if self._error is not None:
                        raise self._error
                    ring_all_reduce(bucket, group, "mean", wire_dtype=self.wire_dtype, segment_bytes=self.segment_bytes)
                except Exception as error:
                    # The next buckets would only wait for the same peer, a timeout each.
                    self._error = error
                    future.set_exception(error)  # type: ignore[arg-type]  # torch's hint says a result
                else:
                    future.set_result(bucket)

        # Raised in `then`, an exception reaches DDP as an error; from `set_exception` it would be a result.
        result = future.then(lambda done: done.value())
        with self._lock:
            self._queue.append(work)
            if self._worker is None:
                self._worker = threading.Thread(target=self._work_off, name="ring_all_reduce_hook")
                self._worker.start()
        return result

    def _work_off(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._worker = None
                    return
                work = self._queue.popleft()
            work()

    def _prepare(self) -> dist.ProcessGroup:
        if self.group is not None:
            return resolve_group(self.group)
        world = resolve_group(None)
        if self._ring_group is None or self._world is not world:  # first use, or the default group was made anew
            self._ring_group = dist.new_group(timeout=group_timeout(world, device_types(world)[0]))
            self._world, self._error = world, None
        return self._ring_group

    def close(self) -> None:
        """Wait for what is queued and give back the process group that the state made. It can be used again."""
        with self._lock:
            worker = self._worker
        if worker is not None:
            worker.join()
        group, self._ring_group, self._world, self._error = self._ring_group, None, None, None
        if group is not None:
            with suppress(ValueError):  # it has gone with the default group
                dist.destroy_process_group(group)


_default_state = RingState()


def ring_all_reduce_hook(state: RingState | None, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    """Average the gradients of ``bucket`` over the ranks by `ring_all_reduce`, while backward goes on.

    For ``DistributedDataParallel.register_comm_hook(state, ring_all_reduce_hook)``, and for Lightning's
    ``DDPStrategy(ddp_comm_state=state, ddp_comm_hook=ring_all_reduce_hook)`` on GPUs; on CPU that strategy ignores
    communication hooks, so register it in ``on_train_start``, on ``trainer.strategy.model``.

    Args:
        state: None is a `RingState` of the default group, with no options.
        bucket: gradients of one floating-point dtype; changed in place.

    Returns:
        A future of the bucket's buffer. An error in the ring (see `ring_all_reduce`) is raised by ``backward()``.

    Raises:
        TypeError: ``state`` is something else.
    """
    if state is None:
        state = _default_state
    if not isinstance(state, RingState):
        raise TypeError(f"the state of ring_all_reduce_hook is {state!r}; use RingState(group=...) or None")
    return state.submit(bucket.buffer())
