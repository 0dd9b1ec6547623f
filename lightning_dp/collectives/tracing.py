"""Type of the callback that reports when each stage of a training step runs. Benchmarks and tests pass one in."""

from __future__ import annotations

from collections.abc import Callable

OnStage = Callable[[str, float, float], None]
"""Called once per stage with its name, start and end. Times are in seconds of ``time.perf_counter``."""
