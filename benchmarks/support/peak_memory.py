"""The peak of this process's memory while a function runs."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

import torch


def peak_bytes(run: Callable[[], None], device: torch.device) -> int | None:
    """Return how far memory rises above its level before ``run``; None where the system does not tell.

    On a GPU that is what PyTorch has allocated. On a CPU it is the resident memory of the process, so it also counts
    what libraries need for themselves, but not their code and other pages of files, which are loaded when they are
    first used. The kernel keeps the peak, and forgets it when asked to (Linux only).
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    try:
        # Memory that was freed, and not given back to the system, would hide a part of the rise.
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    before = _status_bytes("VmRSS") - _status_bytes("RssFile")
    run()
    # Pages of files stay once they are loaded, so there were as many, or fewer, at the peak.
    return _status_bytes("VmHWM") - _status_bytes("RssFile") - before


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))
