"""The best recomputation of a chain, by dynamic programming.

Beaumont, Eyraud-Dubois, Herrmann, Joly and Shilova, "Optimal checkpointing for heterogeneous chains" (2019), which
rotor implements: the least time among schedules that keep what they keep until backward needs it. Here the gradients
are not counted: they are the same in each schedule.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

_MAX_SLOTS = 500


class Stage(NamedTuple):
    """One stage of a chain: it computes its output from that of the stage before.

    Attributes:
        time_s: of its forward.
        output_bytes: of its output.
        saved_bytes: of all that its own backward needs beside its input; the output is part of that.
    """

    time_s: float
    output_bytes: int
    saved_bytes: int


class ChainSchedule(NamedTuple):
    """How to compute forward and backward of a chain.

    Attributes:
        recompute_s: time that is spent on computing stages again.
        levels: for each stage, in which of its runs its output is kept until backward needs it; 0 is the first one.
        num_runs: for each stage, how often it runs forward.
    """

    recompute_s: float
    levels: tuple[int, ...]
    num_runs: tuple[int, ...]


def solve_chain(stages: Sequence[Stage], budget_bytes: int) -> ChainSchedule | None:
    """Return the schedule of least time that holds at most ``budget_bytes``, without the chain's input, or None.

    Sizes are multiples of a slot of memory. Above 500 slots they are rounded up, so that a schedule never needs more
    than it may.
    """
    slot = math.gcd(*(size for stage in stages for size in stage[1:])) or 1
    if budget_bytes // slot > _MAX_SLOTS:
        total_bytes = sum(stage.saved_bytes for stage in stages)
        if total_bytes <= budget_bytes:
            return ChainSchedule(0.0, (0,) * len(stages), (1,) * len(stages))
        slot = math.ceil(budget_bytes / _MAX_SLOTS)
    outputs = [math.ceil(stage.output_bytes / slot) for stage in stages]
    saved = [math.ceil(stage.saved_bytes / slot) for stage in stages]
    # Sums of times: before[i] is the time of stages 0 to i - 1.
    before = [0.0]
    for stage in stages:
        before.append(before[-1] + stage.time_s)
    tables = _Tables(outputs, saved, before, budget_bytes // slot)
    total_s, _ = tables.best(0, len(stages) - 1, budget_bytes // slot)
    if math.isinf(total_s):
        return None
    runs = [0] * len(stages)
    levels = [0] * len(stages)
    _follow(tables, outputs, saved, 0, len(stages) - 1, budget_bytes // slot, runs, levels)
    return ChainSchedule(total_s - before[-1], tuple(levels), tuple(runs))


class _Tables:
    """C_BP of section 4.2: the least time of stages ``first`` to ``last``, for each number of slots of memory."""

    def __init__(self, outputs: Sequence[int], saved: Sequence[int], before: Sequence[float], num_slots: int) -> None:
        self._num_slots = num_slots
        self._times: dict[tuple[int, int], Any] = {}
        self._splits: dict[tuple[int, int], Any] = {}
        for length in range(len(outputs)):
            for first in range(len(outputs) - length):
                self._solve(first, first + length, outputs, saved, before)

    def best(self, first: int, last: int, memory: int) -> tuple[float, int]:
        """Return the least time, and where its first kept output is; -1 if all of the first stage is kept."""
        return float(self._times[first, last][memory]), int(self._splits[first, last][memory])

    def _solve(
        self, first: int, last: int, outputs: Sequence[int], saved: Sequence[int], before: Sequence[float]
    ) -> None:
        # Keep all of the first stage, and go on behind it.
        rest = np.zeros(self._num_slots + 1) if first == last else self._times[first + 1, last]
        times = before[first + 1] - before[first] + _behind(rest, saved[first])
        splits = np.full(self._num_slots + 1, -1)
        needed = 0
        # Keep the output of stage `at` - 1 alone. The stages before it run again for their own backward.
        for at in range(first + 1, last + 1):
            needed = max(needed, outputs[at - 1] + (outputs[at - 2] if at - 2 >= first else 0))
            if needed > self._num_slots:
                break
            candidate = before[at] - before[first] + _behind(self._times[at, last], outputs[at - 1])
            candidate = candidate + self._times[first, at - 1]
            candidate[:needed] = math.inf
            is_better = candidate < times
            times = np.where(is_better, candidate, times)
            splits[is_better] = at
        self._times[first, last] = times
        self._splits[first, last] = splits


def _behind(times: Any, num_slots: int) -> Any:
    """Return the times where ``num_slots`` of the memory are taken already."""
    result = np.full(len(times), math.inf)
    if num_slots < len(times):
        result[num_slots:] = times[: len(times) - num_slots]
    return result


def _follow(
    tables: _Tables,
    outputs: list[int],
    saved: list[int],
    first: int,
    last: int,
    memory: int,
    runs: list[int],
    levels: list[int],
) -> None:
    """Walk through the schedule, count the runs of each stage, and note the run whose output is kept."""
    while first <= last:
        _, split = tables.best(first, last, memory)
        if split < 0:
            levels[first] = runs[first]
            runs[first] += 1
            memory -= saved[first]
            first += 1
            continue
        for stage in range(first, split):
            runs[stage] += 1
        levels[split - 1] = runs[split - 1] - 1
        kept = levels[split - 1]
        _follow(tables, outputs, saved, split, last, memory - outputs[split - 1], runs, levels)
        _follow(tables, outputs, saved, first, split - 1, memory, runs, levels)
        # The last stage of the part in front has its output already; it runs again for what else its backward needs.
        levels[split - 1] = kept
        return
