"""What `Memonger` would make of a training step: planned from one step that is recorded."""

from __future__ import annotations

from typing import Any

from torch import nn
from typing_extensions import override

from lightning_dp.planner.workload import Recomputation
from lightning_dp.recompute import Profiler, RecomputeHandle, plan_profile
from lightning_dp.recompute.apply import require_recomputable
from lightning_dp.recompute.policies import Sublinear

METHOD = "training_step"
# A third of the bytes holds three times the batch. A model in which one block keeps most of them needs more.
SHARES = (1 / 3, 1 / 2, 2 / 3)
# Of one linear program. A share that is impossible takes two: the second finds what is possible.
TIME_LIMIT_S = 2.0


class RecomputeTimes:
    """Records one training step as `Memonger` does, and plans from it what a budget of memory would cost.

    Nothing of the step changes but its time and memory: recorded operators run as before. A step that cannot be
    recorded raises.

    Attributes:
        why_not: a reason for which there is no plan; "" if there is one, or no step was recorded.
    """

    def __init__(self) -> None:
        self.why_not = ""
        self._handle: _Recording | None = None
        self._profiler: Profiler | None = None

    def start(self, module: nn.Module) -> None:
        """Record the next training step of ``module``."""
        try:
            require_recomputable(module)
        except ValueError as error:
            self.why_not = str(error)
            return
        self._handle = _Recording(module, METHOD, Sublinear())
        self._profiler = self._handle.start_profiling()

    def stop(self) -> None:
        """Take the recording off the module. A second call does nothing."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def plan(self) -> Recomputation | None:
        """Return what the plan of the smallest of `SHARES` that is possible holds and takes."""
        if self._profiler is None or self.why_not:
            return None
        operations = self._profiler.operations
        plain_bytes = sum(operation.num_bytes for operation in operations if operation.uses)
        if plain_bytes == 0:
            self.why_not = "the training step keeps nothing for backward that could be computed again"
            return None
        for share in SHARES:
            try:
                plan = plan_profile(self._profiler, max(1, round(share * plain_bytes)), TIME_LIMIT_S)
            except (ValueError, ModuleNotFoundError) as error:  # it holds too little; SciPy is not installed
                self.why_not = str(error)
                continue
            self.why_not = ""
            return Recomputation(plan.plain_bytes, plan.peak_bytes, plan.recompute_s)
        return None


class _Recording(RecomputeHandle):
    """Says what to do about a step that cannot be recorded. It must not run again: its statistics would move twice."""

    @override
    def run(self, function: Any, args: Any, kwargs: Any) -> Any:
        try:
            return super().run(function, args, kwargs)
        except Exception as error:
            error.add_note(
                f"Diagnose has recorded this {METHOD}, to plan recomputation. If it works without Diagnose, use "
                "Diagnose(memonger=False), or plan.memonger=false in a recipe"
            )
            raise
