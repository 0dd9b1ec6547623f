"""The peak of a process's memory: what counts, and what does not."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.peak_memory import peak_bytes

MB = 2**20
CPU = torch.device("cpu")


def measured_peak(run: Callable[[], object]) -> int:
    peak = peak_bytes(run, CPU)
    if peak is None:
        pytest.skip("the kernel keeps no peak of resident memory here")
    return peak


def test_memory_that_was_freed_again_counts():
    kept = torch.ones(40 * MB, dtype=torch.uint8)  # before it: not a part of the rise
    peak = measured_peak(lambda: torch.ones(64 * MB, dtype=torch.uint8))
    assert 60 * MB < peak < 100 * MB
    del kept


def test_the_code_of_libraries_does_not_count():
    largest = max(Path(torch.__file__).parent.rglob("*.so*"), key=lambda path: path.stat().st_size)
    size = min(64 * MB, largest.stat().st_size)
    assert size > 16 * MB
    with largest.open("rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as pages:
        peak = measured_peak(lambda: [pages[position] for position in range(0, size, mmap.PAGESIZE)])
    assert peak < 8 * MB
