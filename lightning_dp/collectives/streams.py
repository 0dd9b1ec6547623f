"""Streams, events, futures and pinned memory of a CUDA device: where layered SGD and communication hooks ask for them.

Import the module and not its functions (``from lightning_dp.collectives import streams``): the tests put an emulated
device in place of these functions, and run the code that uses them without a GPU.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.futures import Future

Stream = torch.cuda.Stream
Event = torch.cuda.Event


def has_streams(device: torch.device) -> bool:
    """Return whether work on ``device`` is queued on streams and runs after the call has returned."""
    return device.type == "cuda"


def set_device(device: torch.device) -> None:
    """Make ``device`` the current one of the calling thread. A new thread starts on device 0."""
    torch.cuda.set_device(device)


def new_stream(device: torch.device, urgent: bool = False) -> Stream:
    """Return a new stream of ``device``. The device starts work of ``urgent`` streams before that of others."""
    return torch.cuda.Stream(device, priority=-1 if urgent else 0)


def current_stream(device: torch.device) -> Stream:
    """Return the stream of ``device`` on which the calling thread queues its work."""
    return torch.cuda.current_stream(device)


def on_stream(stream: Stream | None) -> AbstractContextManager[object]:
    """Queue the work that is called within the context on ``stream``. None leaves the current stream as it is."""
    return torch.cuda.stream(stream)


def record_event(stream: Stream, blocking: bool = False) -> Event:
    """Return an event that has passed when all work that ``stream`` has so far is done.

    Args:
        stream: may belong to any device.
        blocking: ``synchronize`` puts the thread to sleep. Otherwise it keeps a core busy while it waits.
    """
    event = torch.cuda.Event(blocking=blocking)
    event.record(stream)
    return event


def is_done_within(stream: Stream, limit_s: float) -> bool:
    """Wait on the host until ``stream`` has done its work, but at most ``limit_s``. Return whether it has."""
    end_s = time.monotonic() + limit_s
    while not stream.query():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.01)
    return True


def new_future(device: torch.device) -> Future[Tensor]:
    """Return a future of a tensor on ``device``.

    If work on the device is queued, the result may be set while the work that computes it is still queued on the
    current stream. Waiting on the future makes the current stream wait; the host does not block.
    """
    return Future(devices=[device] if has_streams(device) else None)


def keep_until_done(tensor: Tensor, stream: Stream) -> None:
    """Let the memory of ``tensor`` be reused only after the work that ``stream`` has so far.

    The allocator knows the stream on which a tensor was allocated, and no other. When the last reference goes, it hands
    the memory to the next allocation on that stream, even if another stream still reads or writes it.
    """
    tensor.record_stream(stream)


def pinned_like(tensor: Tensor) -> Tensor:
    """Return uninitialized page-locked host memory of the shape and dtype of ``tensor``."""
    return torch.empty_like(tensor, device="cpu", pin_memory=True)
