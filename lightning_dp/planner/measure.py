"""Seconds and bytes of a function, measured in place."""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from lightning_dp.planner.checks import require_count


def measure_time_s(function: Callable[[], Any], device: torch.device | str = "cpu", repeats: int = 5) -> float:
    """Return the median time of ``function``, after one call that is not timed.

    The function must not return before its work has been launched on ``device``; the clock waits for the work.
    """
    require_count("repeats", repeats)
    device = torch.device(device)
    times = []
    for _ in range(repeats + 1):
        _synchronize(device)
        begin_s = time.perf_counter()
        function()
        _synchronize(device)
        times.append(time.perf_counter() - begin_s)
    return statistics.median(times[1:])


_LOG_LEVEL = "KINETO_LOG_LEVEL"


class MemoryUse(NamedTuple):
    """What a function allocated.

    Attributes:
        peak_bytes: most that was held at a time, beyond what was allocated before.
        kept_bytes: what was still held at its end, its result included. Negative if it released more.
        result: what it returned.
    """

    peak_bytes: int
    kept_bytes: int
    result: Any


def measure_memory(function: Callable[[], Any], device: torch.device | str = "cpu") -> MemoryUse:
    """Call ``function`` and return the memory that it used.

    Counted is what torch's allocator hands out, including what a kernel allocates through it. Memory that a library
    allocates by itself, such as oneDNN's scratch memory, is not seen. What a first call keeps for good, such as
    gradients, is counted: call the function once before to leave it out.
    """
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        result = function()
        torch.cuda.synchronize(device)
        kept = torch.cuda.memory_allocated(device) - before
        return MemoryUse(torch.cuda.max_memory_allocated(device) - before, kept, result)
    with _quiet(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = function()
    held = peak = 0
    for change in _allocations(profiler):
        held += change
        peak = max(peak, held)
    return MemoryUse(peak, held, result)


def measure_peak_bytes(function: Callable[[], Any], device: torch.device | str = "cpu") -> int:
    """Return the most memory that ``function`` holds at a time, beyond what was allocated before; `measure_memory`."""
    return measure_memory(function, device).peak_bytes


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the profiler's library from writing two lines for each measurement. It reads the variable when it starts."""
    before = os.environ.get(_LOG_LEVEL)
    os.environ.setdefault(_LOG_LEVEL, "99")
    try:
        yield
    finally:
        if before is None:
            del os.environ[_LOG_LEVEL]


def _allocations(profiler: profile) -> list[int]:
    """Return the bytes of each allocation in host memory (positive) and each release (negative), in order of time."""
    # The trace in Chrome's format is the public form of these events.
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    changes = [
        (float(event["ts"]), int(event["args"]["Bytes"]))
        for event in events
        if event.get("name") == "[memory]" and event["args"]["Device Type"] == 0
    ]
    # Sorting is stable: events of one moment stay in the order in which they were recorded.
    return [change for _, change in sorted(changes, key=lambda event: event[0])]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
