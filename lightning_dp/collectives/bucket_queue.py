"""A queue of gradient buckets for communication hooks of DDP: a thread averages them while backward continues."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.futures import Future

from lightning_dp._private.torch_names import device_types, group_timeout
from lightning_dp.collectives.groups import destroy_group, resolve_group


class BucketQueue(ABC):
    """Base of the states of communication hooks: a process group and a queue of buckets.

    A worker thread processes the queue in the order in which DDP submits the buckets, which is the same on all ranks.
    The thread ends when the queue is empty, so that none is left between backward passes.

    Args:
        group: used by the worker thread alone, since it sends at the same time as the main thread. Create it with
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

    @abstractmethod
    def _average(self, buffer: torch.Tensor, parameters: list[torch.Tensor], group: dist.ProcessGroup) -> None:
        """Average ``buffer``, (numel,), over the ranks of ``group``, in place. Runs in the worker thread."""

    def submit(self, buffer: torch.Tensor, parameters: list[torch.Tensor] | None = None) -> Future[torch.Tensor]:
        """Queue a bucket to be averaged over the ranks in place. Return a future of ``buffer``.

        Args:
            buffer: (numel,) the bucket's gradients.
            parameters: whose gradients they are, in order.
        """
        group = self._require_group()
        future: Future[torch.Tensor] = Future()
        stream = None
        if buffer.is_cuda:
            future = Future(devices=[buffer.device])
            # On the current stream, the next kernels of backward would wait for the messages.
            stream = torch.cuda.Stream(buffer.device)
            stream.wait_stream(torch.cuda.current_stream(buffer.device))

        def work() -> None:
            with torch.cuda.stream(stream):  # does nothing if stream is None
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

        # DDP raises an exception that is raised inside `then`. One from `set_exception` it would take for a result.
        result = future.then(lambda done: done.value())
        with self._lock:
            self._queue.append(work)
            if self._worker is None:
                self._worker = threading.Thread(target=self._run_queue, name=self._thread_name)
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
        """Return the group of the worker. Create it on first use, and again if the default group has been replaced."""
        if self.group is not None:
            return resolve_group(self.group)
        default_group = resolve_group(None)
        if self._own_group is None or self._default_group is not default_group:
            timeout = group_timeout(default_group, device_types(default_group)[0])
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
