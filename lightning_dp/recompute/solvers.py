"""The best recomputation of a graph of operators, as an integer linear program.

Each operator either keeps its outputs in the forward pass, or runs again once. The memory of each step of backward, one
step for each block of the model, is at most the budget.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from lightning_dp.recompute.operators import Kind
from lightning_dp.recompute.profile import Operation

_TIME_LIMIT = 1  # the status of SciPy's `milp`
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
        raise ModuleNotFoundError("a plan needs SciPy: pip install scipy", name="scipy") from error
    program = _Program(operations, budget_bytes)
    rows, columns, values = zip(*program.entries, strict=True)
    matrix = csr_array((values, (rows, columns)), shape=(len(program.lower), len(program.upper)))
    is_integral = np.zeros(len(program.upper))
    is_integral[program.keep] = 1  # the other variables follow from these
    result = milp(
        np.array(program.costs(budget_bytes is None)),
        constraints=LinearConstraint(matrix, np.array(program.lower), np.inf),
        integrality=is_integral,
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
        operation.kind != Kind.VIEW and bool(round(result.x[keep]))
        for operation, keep in zip(operations, program.keep, strict=True)
    )
    recompute_s = sum(
        operation.time_s for place, operation in enumerate(operations) if round(result.x[program.again[place]])
    )
    return GraphSolution(keeps, recompute_s, round(float(result.x[program.peak]) * program.scale))


class _Program:
    """Variables and constraints.

    Variables: ``keep``, whether outputs are kept; ``again``, whether the operator runs again; ``live``, whether outputs
    that were computed again exist in a step of backward; ``peak``.
    """

    def __init__(self, operations: Sequence[Operation], budget_bytes: int | None) -> None:
        self.operations = operations
        self.scale = max(1.0, sum(operation.num_bytes for operation in operations) / 1000)
        self.upper: list[float] = []
        self.lower: list[float] = []  # of the constraints
        self.entries: list[tuple[int, int, float]] = []
        self.keep: list[int] = []
        for operation in operations:
            # To keep a view is to keep what it is a view of.
            is_view = operation.kind == Kind.VIEW and operation.inputs
            self.keep.append(self.keep[operation.inputs[0]] if is_view else self._variable())
        self.again = [self._variable(0.0 if operation.kind == Kind.FIXED else 1.0) for operation in operations]
        self.live: dict[tuple[int, int], int] = {}
        self._last_steps = [operation.segment for operation in operations]
        self.peak = self._variable(float("inf") if budget_bytes is None else budget_bytes / self.scale)
        for place, operation in enumerate(operations):
            last = max([operation.segment, *operation.uses])
            for step in range(operation.segment, min(last, operation.segment + WINDOW) + 1):
                self._live(place, step)
        self._add_constraints()

    def costs(self, is_peak: bool) -> list[float]:
        """Return the time of each variable, or the peak; ties are broken in favor of less memory."""
        cost = [0.0] * len(self.upper)
        total_s = sum(operation.time_s for operation in self.operations) or 1.0
        for place, operation in enumerate(self.operations):
            cost[self.again[place]] = (1e-3 if is_peak else 1e3) * operation.time_s / total_s
        cost[self.peak] = 1.0 if is_peak else 1e-4
        return cost

    def _add_constraints(self) -> None:
        # From the end: what an operation needs in a step follows from those behind it.
        for place, operation in reversed(list(enumerate(self.operations))):
            if operation.uses:
                self._at_least(1, [(self.keep[place], 1), (self.again[place], 1)])
            for use in operation.uses:
                self._at_least(1, self._present(place, use))
            for source in operation.inputs:
                self._add_input(place, source)
        self._add_memory()

    def _add_input(self, place: int, source: int) -> None:
        # What runs again needs its inputs: kept, or computed again.
        self._at_least(0, [(self.keep[source], 1), (self.again[source], 1), (self.again[place], -1)])
        for step in range(self.operations[place].segment, self._last_steps[place] + 1):
            self._at_least(0, [*self._present(source, step), (self._live(place, step), -1)])

    def _present(self, place: int, step: int) -> list[tuple[int, int]]:
        """Return the terms for outputs that exist in a step of backward: kept, or computed again if it is near."""
        terms = [(self.keep[place], 1)]
        if step - self.operations[place].segment <= WINDOW:
            terms.append((self._live(place, step), 1))
        return terms

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
