"""The least time within a budget of memory: a plan for one model and batch size, made from measurements in place."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy
from typing_extensions import override

from lightning_dp.recompute.activations import unchanged, unchanged_parameters
from lightning_dp.recompute.apply import apply_recompute, check_budget
from lightning_dp.recompute.operators import Kind
from lightning_dp.recompute.policies import Cheap, Policy
from lightning_dp.recompute.profile import Operation, Profiler
from lightning_dp.recompute.solvers import Stage, solve_chain, solve_graph
from lightning_dp.recompute.values import Saved, tensors_in

VERSION = 1
# The time of the dynamic program grows with the third power of the number of stages. A longer chain is planned by the
# linear program.
MAX_STAGES = 100


@dataclass
class RecomputePlan(Policy):
    """What is kept, operator by operator. It is a policy for `apply_recompute`.

    Attributes:
        budget_bytes: what it was made for.
        solver: ``"chain"``, the dynamic program; or ``"graph"``, the integer linear program.
        plain_bytes: kept without recomputation.
        peak_bytes: the most that the plan holds in a step of backward, as planned.
        forward_s: time of the forward pass, as measured.
        recompute_s: time of what runs again, as planned.
        levels: for the key of each operator, in which run its output is kept: 0 is the forward pass.
        operations: what was measured.
    """

    budget_bytes: int
    solver: str
    plain_bytes: int
    peak_bytes: int
    forward_s: float
    recompute_s: float
    levels: dict[str, int]
    operations: list[Operation] = field(repr=False)

    is_for_one_model = True

    @override
    def check(self, sizes: Mapping[str, int], method: str) -> None:
        planned = {operation.key: operation.num_bytes for operation in self.operations}
        found = planned.keys() & sizes.keys()
        if planned and not found:
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
    def decide(self, kind: Kind, key: str) -> CheckpointPolicy:
        level = self.levels.get(key)
        if level is None or kind is Kind.FIXED:  # small, or not there when the plan was made
            return Cheap().decide(kind, key)
        return CheckpointPolicy.PREFER_SAVE if level == 0 else CheckpointPolicy.PREFER_RECOMPUTE

    @override
    def holds(self, num_bytes: int, kept_bytes: int, spare_bytes: int) -> bool:
        return True  # the plan has weighed it

    @override
    def retain(self, saved: Saved, length: int) -> bool:
        key = "" if saved.value is None else saved.value.key
        return super().retain(saved, length) and saved.num_runs >= self.levels.get(key, 1)

    def save(self, path: str | Path) -> None:
        """Write the plan to a JSON file."""
        values = {**vars(self), "operations": [operation.to_json() for operation in self.operations]}
        Path(path).write_text(json.dumps({"version": VERSION, **values}, indent=1))

    @classmethod
    def load(cls, path: str | Path) -> RecomputePlan:
        """Read a plan that `save` wrote.

        Raises:
            ValueError: the file is no such plan.
        """
        try:
            values: dict[str, Any] = json.loads(Path(path).read_text())
            if values.pop("version") != VERSION:
                raise ValueError("another version")
            operations = [Operation(**operation) for operation in values.pop("operations")]
            return cls(operations=operations, **values)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is no plan of this version of lightning_dp ({error}); make it again") from error

    def frontier(self, num_points: int = 8, time_limit_s: float = 8.0) -> list[RecomputePlan]:
        """Return plans of the same measurements for other budgets, from the least to the bytes of plain training."""
        least = _least_bytes(self.operations, time_limit_s)
        budgets = [round(least + i * (self.plain_bytes - least) / (num_points - 1)) for i in range(num_points)]
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

    A chain of operators is planned by a dynamic program, any other model by an integer linear program (SciPy). The
    model, its buffers and the random number generators are afterwards as before. Nothing is recomputed yet: give the
    plan to `apply_recompute`.

    Args:
        model: as it is trained.
        batch: the argument of ``method``, or a tuple of its arguments; of the size that is trained with.
        budget_bytes: of activations that are held at any time of backward, beside parameters, inputs and gradients.
        method: of ``model``, whose result backward starts from.
        time_limit_s: of the linear program, which then returns the best plan that it has found.

    Raises:
        ValueError: no plan holds so little, none was found in time, or see `apply_recompute`.
        ModuleNotFoundError: the model is no chain, and SciPy is not installed.
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
                list(tensors_in(getattr(model, method)(*arguments)))
    finally:
        handle.remove()
    return plan_profile(profiler, budget_bytes, time_limit_s)


def plan_profile(profiler: Profiler, budget_bytes: int, time_limit_s: float = 8.0) -> RecomputePlan:
    """Return the plan of least time for what was measured; see `plan_recompute`."""
    return make_plan(profiler.operations, profiler.forward_s, budget_bytes, time_limit_s)


def make_plan(
    operations: Sequence[Operation], forward_s: float, budget_bytes: int, time_limit_s: float = 8.0
) -> RecomputePlan:
    """Return the plan of least time for these operations; see `plan_recompute`."""
    operations = list(operations)
    plain_bytes = sum(operation.num_bytes for operation in operations if operation.uses)
    found: tuple[str, list[int], int, float] | None = None
    chain = _stages(operations)
    if chain is not None:
        schedule = solve_chain([stage for stage, _ in chain], budget_bytes)
        if schedule is not None:
            levels = [1] * len(operations)
            for (_, place), level in zip(chain, schedule.levels, strict=True):
                levels[place] = level
            found = "chain", levels, min(budget_bytes, plain_bytes), schedule.recompute_s
    else:
        solution = solve_graph(operations, budget_bytes, time_limit_s)
        if solution is not None:
            levels = [0 if keeps else 1 for keeps in solution.keeps]
            found = "graph", levels, solution.peak_bytes, solution.recompute_s
    if found is None:
        least = _least_bytes(operations, time_limit_s)
        raise ValueError(
            f"budget_bytes={budget_bytes} is less than the {least} bytes that a plan needs (without recomputation: "
            f"{plain_bytes}); raise it, or use a smaller batch"
        )
    solver, levels, peak_bytes, recompute_s = found
    by_key = {operation.key: level for operation, level in zip(operations, levels, strict=True)}
    return RecomputePlan(budget_bytes, solver, plain_bytes, peak_bytes, forward_s, recompute_s, by_key, operations)


def _stages(operations: Sequence[Operation]) -> list[tuple[Stage, int]] | None:
    """Return the stages of a chain, each with the place of the operation that computes its output; None for others.

    Operations whose outputs backward does not ask for are part of the stage of the next one. A view is its input. A
    chain of more than `MAX_STAGES` is none: its plan would take minutes.
    """
    root: dict[int, int] = {}
    chain: list[int] = []
    used: set[int] = set()
    for place, operation in enumerate(operations):
        sources = {root[source] for source in operation.inputs}
        if operation.kind == Kind.VIEW.value:
            root[place] = min(sources, default=place)
        else:
            if operation.is_fixed or (chain and sources != {chain[-1]}):
                return None
            root[place] = place
            chain.append(place)
        if operation.uses:
            used.add(root[place])
    stages = []
    time_s = 0.0
    for place in chain:
        time_s += operations[place].time_s
        if place in used:
            num_bytes = operations[place].num_bytes
            stages.append((Stage(time_s, num_bytes, num_bytes), place))
            time_s = 0.0
    return stages if 0 < len(stages) <= MAX_STAGES else None


def _least_bytes(operations: Sequence[Operation], time_limit_s: float) -> int:
    """Return the least budget for which there is a plan, up to 1 %."""
    chain = _stages(operations)
    if chain is None:
        solution = solve_graph(operations, None, time_limit_s)
        assert solution is not None, "to keep everything is a solution"
        return solution.peak_bytes
    low, high = 0, sum(stage.saved_bytes for stage, _ in chain)
    while high - low > max(1, high // 100):
        middle = (low + high) // 2
        if solve_chain([stage for stage, _ in chain], middle) is None:
            low = middle
        else:
            high = middle
    return high
