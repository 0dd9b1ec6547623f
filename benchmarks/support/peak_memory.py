"""The peak of this process's memory while a function runs."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


class AllocatorRise:
    """How far a step raises what PyTorch has allocated on the CPU, above the level at its begin. A profiler counts.

    Call `tick` between steps: it needs two, of which it measures the second. Memory that was allocated before the first
    does not count when it is freed, so that step may still lose tensors of earlier ones, such as gradients.
    """

    def __init__(self) -> None:
        self._profiler = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
        )
        self._num_ticks = 0
        self.num_bytes: int | None = None

    def tick(self) -> None:
        """Note the end of a step. The first call starts to measure, and the third one sets ``num_bytes``."""
        self._num_ticks += 1
        if self._num_ticks == 1:
            self._profiler.start()
        elif self._num_ticks == 2:
            with torch.profiler.record_function(_STEP):
                pass
        elif self._num_ticks == 3:
            self._profiler.stop()
            self.num_bytes = self._rise()

    def _rise(self) -> int:
        assert self._profiler.profiler is not None
        results: Any = self._profiler.profiler.kineto_results
        level = peak = 0
        for event in sorted(results.events(), key=lambda event: event.start_ns()):
            if event.name() == _STEP:
                peak = start = level
            elif event.name() == "[memory]":
                level += event.nbytes()
                peak = max(peak, level)
        return peak - start


_STEP = "begin of the measured step"
