"""A copy of a gradient bucket in host memory, for communicators that sum there."""

from __future__ import annotations

import torch
from torch import Tensor


class HostCopy:
    """A buffer's copy in host memory, which the stages of `HierarchicalAllReduce` change in place of the buffer.

    In the paper the communicator is a CPU, "thereby allowing GPUs to focus on computation" (arXiv 1906.05936, section
    4.3). A buffer on a GPU is copied to page-locked memory, on ``stream``, and back on the stream of who asks for it.
    Such memory comes from a pool of PyTorch's, which gives it to nobody else before the copies are done: a copy for
    each bucket and step costs no more than one that is kept. A buffer on a CPU is copied at once.

    Args:
        buffer: any dense tensor. What the present stream has yet to do to it is part of the copy.
        stream: to copy on; None for a buffer on a CPU.
    """

    def __init__(self, buffer: Tensor, stream: torch.cuda.Stream | None = None) -> None:
        self._buffer = buffer
        self._copied: torch.cuda.Event | None = None
        self.tensor = torch.empty_like(buffer, device="cpu", pin_memory=buffer.is_cuda)
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(buffer.device))
        with torch.cuda.stream(stream):  # of None: no change
            self.tensor.copy_(buffer, non_blocking=True)
            if stream is not None:
                self._copied = stream.record_event()

    def wait(self) -> None:
        """Return when ``tensor`` holds what the buffer held; the caller's thread waits, not a stream."""
        if self._copied is not None:
            self._copied.synchronize()

    def copy_back(self) -> None:
        """Put ``tensor`` into the buffer, in the order of the present stream."""
        self._buffer.copy_(self.tensor, non_blocking=True)
