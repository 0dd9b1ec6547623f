"""The best recomputation of a chain, by dynamic programming.

Beaumont, Eyraud-Dubois, Herrmann, Joly and Shilova, "Optimal checkpointing for heterogeneous chains" (2019), which
rotor implements: the least time among schedules that keep what they keep until backward needs it. Here the gradients
are not counted: they are the same in each schedule.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from lightning_dp.recompute.operators import Kind
from lightning_dp.recompute.profile import Operation

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


# --- The best recomputation of any graph of operators, as an integer linear program.
#
# Each operator either keeps its outputs in the forward pass, or runs again once. The memory of each step of backward,
# one step for each block of the model, is at most the budget.

# The status of SciPy's `milp` for that.
_TIME_LIMIT = 1
# How many blocks back the inputs of an operator may be computed again. What is further away is kept.
WINDOW = 4


class GraphSolution(NamedTuple):
    """Which operations keep their outputs.

    Attributes:
        keeps: one for each operation.
        recompute_s: time of the operations that run again.
        peak_bytes: the most that is held in a step of backward.
    """

    keeps: tuple[bool, ...]
    recompute_s: float
    peak_bytes: int


def solve_graph(
    operations: Sequence[Operation], budget_bytes: int | None, time_limit_s: float = 8.0
) -> GraphSolution | None:
    """Return the solution of least time within ``budget_bytes``, or None if there is none.

    With ``budget_bytes=None`` the peak is made as small as possible.

    Raises:
        ModuleNotFoundError: SciPy is not installed.
        ValueError: no solution was found in ``time_limit_s``.
    """
    try:
        import numpy as np
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "a plan for a model that is no chain needs SciPy: pip install scipy", name="scipy"
        ) from error
    program = _Program(operations)
    program.add_all(budget_bytes)
    rows, columns, values = zip(*program.entries, strict=True)
    matrix = csr_array((values, (rows, columns)), shape=(len(program.lower), program.num_variables))
    result = milp(
        np.array(program.costs(budget_bytes is None)),
        constraints=LinearConstraint(matrix, np.array(program.lower), np.inf),
        integrality=np.array([int(v in program.integral) for v in range(program.num_variables)]),
        bounds=Bounds(0, np.array(program.upper)),
        options={"time_limit": time_limit_s, "mip_rel_gap": 0.005},
    )
    if result.x is None:
        if result.status == _TIME_LIMIT:
            raise ValueError(
                f"no plan of {len(operations)} operators was found within time_limit_s={time_limit_s}; raise "
                "time_limit_s in plan_recompute, or budget_bytes"
            )
        return None
    # Solvers return 0.9999999 for 1.
    keeps = tuple(
        operation.kind != Kind.VIEW.value and bool(round(result.x[keep]))
        for operation, keep in zip(operations, program.keep, strict=True)
    )
    recompute_s = sum(
        operation.time_s for place, operation in enumerate(operations) if round(result.x[program.again[place]])
    )
    return GraphSolution(keeps, recompute_s, round(float(result.x[program.peak]) * program.scale))


class _Program:
    """Variables and constraints.

    Variables: ``keep``, whether outputs are kept; ``again``, whether the operator runs again; ``live``, whether outputs
    that were computed again exist in a step of backward; ``peak``. Only ``keep`` is integral: the others follow.
    """

    def __init__(self, operations: Sequence[Operation]) -> None:
        self.operations = operations
        self.scale = max(1.0, sum(operation.num_bytes for operation in operations) / 1000)
        self.upper: list[float] = []
        self.lower: list[float] = []  # of the constraints
        self.entries: list[tuple[int, int, float]] = []
        self.keep: list[int] = []
        for operation in operations:
            # To keep a view is to keep what it is a view of.
            is_view = operation.kind == Kind.VIEW.value and operation.inputs
            self.keep.append(self.keep[operation.inputs[0]] if is_view else self._variable())
        self.again = [self._variable(0.0 if operation.is_fixed else 1.0) for operation in operations]
        self.live: dict[tuple[int, int], int] = {}
        self._last_steps = [operation.segment for operation in operations]
        self.peak = self._variable(float("inf"))
        self.integral = set(self.keep)
        for place, operation in enumerate(operations):
            last = max([operation.segment, *operation.uses])
            for step in range(operation.segment, min(last, operation.segment + WINDOW) + 1):
                self._live(place, step)

    @property
    def num_variables(self) -> int:
        return len(self.upper)

    def costs(self, is_peak: bool) -> list[float]:
        """Return the time of each variable, or the peak; ties are broken in favor of less memory."""
        cost = [0.0] * self.num_variables
        total_s = sum(operation.time_s for operation in self.operations) or 1.0
        for place, operation in enumerate(self.operations):
            cost[self.again[place]] = (1e-3 if is_peak else 1e3) * operation.time_s / total_s
        cost[self.peak] = 1.0 if is_peak else 1e-4
        return cost

    def add_all(self, budget_bytes: int | None) -> None:
        """Add all constraints."""
        # From the end: what an operation needs in a step follows from those behind it.
        for place, operation in reversed(list(enumerate(self.operations))):
            if operation.uses:
                self._at_least(1, [(self.keep[place], 1), (self.again[place], 1)])
            for use in operation.uses:
                self._add_use(place, use)
            for source in operation.inputs:
                self._add_input(place, source)
        self._add_memory()
        if budget_bytes is not None:
            self.upper[self.peak] = budget_bytes / self.scale

    def _add_input(self, place: int, source: int) -> None:
        again, kept = self.again[place], self.keep[source]
        # What runs again needs its inputs: kept, or computed again.
        self._at_least(0, [(kept, 1), (self.again[source], 1), (again, -1)])
        first = self.operations[source].segment
        for step in range(self.operations[place].segment, self._last_steps[place] + 1):
            if step - first > WINDOW:
                self._at_least(0, [(kept, 1), (self._live(place, step), -1)])
            else:
                self._at_least(0, [(kept, 1), (self._live(source, step), 1), (self._live(place, step), -1)])

    def _add_use(self, place: int, use: int) -> None:
        operation = self.operations[place]
        if use - operation.segment > WINDOW:
            self._at_least(1, [(self.keep[place], 1)])
        else:
            self._at_least(1, [(self.keep[place], 1), (self._live(place, use), 1)])

    def _add_memory(self) -> None:
        operations = self.operations
        for place, operation in enumerate(operations):
            # Once computed again, it stays until the backward of its own block.
            for step in range(operation.segment, self._last_steps[place]):
                self._at_least(0, [(self._live(place, step), 1), (self._live(place, step + 1), -1)])
        for step in sorted({operation.segment for operation in operations}):
            held: list[tuple[int, float]] = [(self.peak, 1.0)]
            for place, operation in enumerate(operations):
                if operation.segment <= step:
                    held.append((self.keep[place], -operation.num_bytes / self.scale))
                if (place, step) in self.live and operation.uses:
                    held.append((self.live[place, step], -operation.num_bytes / self.scale))
            self._at_least(0, held)

    def _live(self, place: int, step: int) -> int:
        if (place, step) not in self.live:
            self.live[place, step] = self._variable()
            self._last_steps[place] = max(self._last_steps[place], step)
            # To be there, it must have run again.
            self._at_least(0, [(self.again[place], 1), (self.live[place, step], -1)])
        return self.live[place, step]

    def _variable(self, upper: float = 1.0) -> int:
        self.upper.append(upper)
        return len(self.upper) - 1

    def _at_least(self, bound: float, terms: Iterable[tuple[int, Any]]) -> None:
        self.entries.extend((len(self.lower), variable, float(factor)) for variable, factor in terms)
        self.lower.append(bound)
