"""The type of the callable that benchmarks and tests pass in to see when each stage of a step runs."""

from __future__ import annotations

from collections.abc import Callable

OnStage = Callable[[str, float, float], None]
"""Told of each stage: its name, start and end in seconds of ``time.perf_counter``."""
