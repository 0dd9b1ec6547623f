"""The least time within a budget of memory: a plan for one model and batch size, made from measurements in place."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from lightning_dp.recompute.apply import apply_recompute, check_budget
from lightning_dp.recompute.operators import Kind
from lightning_dp.recompute.policies import Cheap, Policy
from lightning_dp.recompute.profile import Operation
from lightning_dp.recompute.solvers import solve_graph
from lightning_dp.trial_run import unchanged, unchanged_parameters

VERSION = 1
SOLVER = "graph"


@dataclass
class RecomputePlan(Policy):
    """What is kept, operator by operator. It is a policy for `apply_recompute`.

    Attributes:
        budget_bytes: what it was made for.
        solver: ``"graph"``, the integer linear program.
        plain_bytes: kept without recomputation.
        peak_bytes: the most that the plan holds in a step of backward, as planned.
        forward_s: time of the forward pass, as measured.
        recompute_s: time of what runs again, as planned.
        levels: for the key of each operator, 0 if its output is kept in the forward pass, 1 if it may run again.
        operations: what was measured.
    """

    budget_bytes: int
    solver: str
    plain_bytes: int
    peak_bytes: int
    forward_s: float
    recompute_s: float
    levels: dict[str, int] = field(repr=False)
    operations: list[Operation] = field(repr=False)

    is_for_one_model = True

    @override
    def check(self, sizes: Mapping[str, int], method: str) -> None:
        planned = {operation.key: operation.num_bytes for operation in self.operations}
        found = planned.keys() & sizes.keys()
        if planned and sizes and not found:  # a very small batch has no outputs that count
            raise ValueError(
                f"none of the {len(planned)} operators of the plan ran in {method}: it was made for another model "
                "or method. Make it with plan_recompute for this one; Memonger records training_step"
            )
        now = sum(sizes[key] for key in found)
        then = sum(planned[key] for key in found)
        if now > then:
            warnings.warn(
                f"{method} computes {now} bytes with the operators of the plan, and computed {then} when the plan was "
                f"made. It may hold more than budget_bytes={self.budget_bytes}: make a plan with the largest batch",
                stacklevel=2,
            )

    @override
    def keeps(self, kind: Kind, key: str) -> bool:
        level = self.levels.get(key)
        if level is None:  # small, or not there when the plan was made
            return Cheap().keeps(kind, key)
        return level == 0

    @override
    def plans_to_keep(self, key: str) -> bool:
        return self.levels.get(key) == 0

    @override
    def holds(self, num_bytes: int, kept_bytes: int, spare_bytes: int) -> bool:
        return True  # the plan has weighed it

    def save(self, path: str | Path) -> None:
        """Write the plan to a JSON file."""
        Path(path).write_text(json.dumps({"version": VERSION, **asdict(self)}, indent=1))

    @classmethod
    def load(cls, path: str | Path) -> RecomputePlan:
        """Read a plan that `save` wrote.

        Raises:
            ValueError: the file is no such plan.
        """
        try:
            values: dict[str, Any] = json.loads(Path(path).read_text())
            if values.pop("version") != VERSION or values["solver"] != SOLVER:
                raise ValueError("another version, or another solver")
            operations = [Operation(**operation) for operation in values.pop("operations")]
            return cls(operations=operations, **values)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is no plan of this version of lightning_dp ({error}); make it again") from error

    def frontier(self, num_points: int = 8, time_limit_s: float = 8.0) -> list[RecomputePlan]:
        """Return plans of the same measurements for other budgets, from the least to the bytes of plain training."""
        least = _least_bytes(self.operations, time_limit_s)
        step = (self.plain_bytes - least) / max(1, num_points - 1)
        budgets = [round(least + i * step) for i in range(num_points)]
        return [make_plan(self.operations, self.forward_s, budget, time_limit_s) for budget in budgets]

    def plot(self, path: str | Path, num_points: int = 8) -> None:
        """Draw planned time against planned memory for several budgets, and this plan among them. Needs matplotlib."""
        from matplotlib.figure import Figure

        plans = self.frontier(num_points)
        figure = Figure(figsize=(6.4, 4.2), layout="constrained")
        axes = figure.subplots()
        axes.plot(
            [p.peak_bytes / 1e6 for p in plans], [1e3 * p.recompute_s for p in plans], "o-", label="other budgets"
        )
        axes.plot(self.peak_bytes / 1e6, 1e3 * self.recompute_s, "D", markersize=9, label="this plan")
        axes.axvline(self.plain_bytes / 1e6, color="0.6", linestyle=":", label="no recomputation")
        axes.set_xlabel("activations held in backward")
        axes.xaxis.set_major_formatter("{x:g} MB")
        axes.set_ylabel(f"time of what runs again (forward takes {1e3 * self.forward_s:.0f} ms)")
        axes.yaxis.set_major_formatter("{x:g} ms")
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.legend()
        figure.savefig(path, dpi=120)


def plan_recompute(
    model: nn.Module, batch: Any, budget_bytes: int, method: str = "forward", time_limit_s: float = 8.0
) -> RecomputePlan:
    """Measure a forward pass of ``model`` and return the plan of least time that holds at most ``budget_bytes``.

    It is planned by an integer linear program (SciPy), in which an operator runs again at most once. The model, its
    buffers and the random number generators are afterwards as before. Nothing is recomputed yet: give the plan to
    `apply_recompute`.

    Args:
        model: as it is trained.
        batch: the argument of ``method``, or a tuple of its arguments; of the size that is trained with.
        budget_bytes: of activations that are held at any time of backward, beside parameters, inputs and gradients.
        method: of ``model``, whose result backward starts from.
        time_limit_s: of the linear program, which then returns the best plan that it has found.

    Raises:
        ValueError: no plan holds so little, none was found in time, or see `apply_recompute`.
        ModuleNotFoundError: SciPy is not installed.
    """
    budget_bytes = check_budget(budget_bytes)
    if not time_limit_s > 0:
        raise ValueError(f"time_limit_s={time_limit_s} must be greater than 0 seconds")
    handle = apply_recompute(model, "sublinear", method)
    arguments = batch if isinstance(batch, tuple) else (batch,)
    try:
        for _ in range(2):  # the first pass also sets libraries up
            profiler = handle.start_profiling()
            with unchanged(model), unchanged_parameters(model), torch.enable_grad():
                getattr(model, method)(*arguments)
    finally:
        handle.remove()
    return make_plan(profiler.operations, profiler.forward_s, budget_bytes, time_limit_s)


def make_plan(
    operations: Sequence[Operation], forward_s: float, budget_bytes: int, time_limit_s: float = 8.0
) -> RecomputePlan:
    """Return the plan of least time for operations that a `Profiler` has measured; see `plan_recompute`."""
    operations = list(operations)
    plain_bytes = sum(operation.num_bytes for operation in operations if operation.uses)
    solution = solve_graph(operations, budget_bytes, time_limit_s)
    if solution is None:
        raise ValueError(
            f"budget_bytes={budget_bytes} is less than the {_least_bytes(operations, time_limit_s)} bytes that a plan "
            f"needs (without recomputation: {plain_bytes}); raise it, or use a smaller batch"
        )
    levels = {operation.key: int(not keeps) for operation, keeps in zip(operations, solution.keeps, strict=True)}
    return RecomputePlan(
        budget_bytes, SOLVER, plain_bytes, solution.peak_bytes, forward_s, solution.recompute_s, levels, operations
    )


def _least_bytes(operations: Sequence[Operation], time_limit_s: float) -> int:
    """Return the least budget for which there is a plan."""
    solution = solve_graph(operations, None, time_limit_s)
    assert solution is not None, "to keep everything is a solution"
    return solution.peak_bytes
