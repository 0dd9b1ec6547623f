"""Threads that let the training thread go first, where threads share cores.

Collectives on the host take processor time: gloo's threads copy and add, and so do the communicator's. The training
thread sleeps while a device computes, and has little to do when it wakes up; but all that follows waits for it.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from lightning_dp.collectives import streams

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
