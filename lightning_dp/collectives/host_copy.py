"""Copy of a gradient bucket in host memory, for a communicator that reduces on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_dp.collectives import streams


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
        if stream is None:
            self.tensor = torch.empty_like(buffer, device="cpu")
            self._fill(reduce)
            return
        self.tensor = streams.pinned_like(buffer)
        # Backward fills the buffer on the current stream: without this the copy could read half of it.
        stream.wait_stream(streams.current_stream(buffer.device))
        with streams.on_stream(stream):
            self._fill(reduce)
        if reduce is not None:
            # A rank that gives up after an error drops the buffer, of which its neighbors still need the values.
            streams.keep_until_done(buffer, stream)
        # A thread waits for it. Without `blocking` that thread would keep a core busy, which loader workers need.
        self._copied = streams.record_event(stream, blocking=True)

    def _fill(self, reduce: Callable[[Tensor], slice] | None) -> None:
        source = self._buffer
        target = self.tensor
        if reduce is not None:
            part = reduce(source)
            source = source[part]
            target = target[part]
        target.copy_(source, non_blocking=True)

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
