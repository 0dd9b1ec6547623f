"""When has training converged? The criterion that `AdaptiveGlobalBatchNorm` asks once an epoch. No Trainer here."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol


class ConvergenceCriterion(Protocol):
    """What is asked of a criterion. ``state_dict`` and ``load_state_dict``, where it has them, go into checkpoints."""

    def update(self, metrics: Mapping[str, Any]) -> bool:
        """Take in the metrics that one training epoch ended with; return whether training has converged."""


Convergence = ConvergenceCriterion | Callable[[Mapping[str, Any]], bool]


def ask(criterion: Convergence, metrics: Mapping[str, Any]) -> tuple[bool, str]:
    """``criterion``'s answer to an epoch's metrics, and what went wrong ("" if nothing): rank 0 tells all others."""
    update: Any = getattr(criterion, "update", criterion)
    try:
        return bool(update(metrics)), ""
    except Exception:
        return False, traceback.format_exc()


@dataclass
class Plateau:
    """Converged once ``monitor`` has not improved for ``patience`` epochs in a row, and from then on.

    The paper leaves the criterion open (section 4.3: "IsConverged is determined by the convergence criterion").

    Args:
        monitor: name of a logged metric. It is read at the end of each training epoch, so of the training metrics it
            must be one that is logged with ``on_epoch=True`` or at the last step.
        patience: epochs without improvement, at least 1.
        min_delta: an improvement is a change by more than this.
        mode: whether the metric should fall, ``"min"``, or rise, ``"max"``.

    Raises:
        ValueError: an argument is out of range.
    """

    monitor: str = "train_loss"
    patience: int = 3
    min_delta: float = 1e-3
    mode: Literal["min", "max"] = "min"
    best: float | None = field(default=None, init=False)
    num_epochs_without_improvement: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.patience < 1:
            raise ValueError(f"patience={self.patience} must be at least 1 epoch")
        if self.min_delta < 0:
            raise ValueError(f"min_delta={self.min_delta} must not be negative")
        if self.mode not in ("min", "max"):
            raise ValueError(f"mode={self.mode!r} is not known; use 'min' or 'max'")

    def update(self, metrics: Mapping[str, Any]) -> bool:
        """Take in one epoch's metrics; return whether training has converged.

        A value that is not finite counts for nothing: a run that diverges has not converged.

        Raises:
            ValueError: ``monitor`` is not among the metrics.
        """
        if self.monitor not in metrics:
            available = ", ".join(sorted(metrics)) or "none at all"
            raise ValueError(
                f"monitor={self.monitor!r} was not logged; available: {available}. Log it with "
                f"self.log({self.monitor!r}, value, on_epoch=True), or monitor one of those."
            )
        value = float(metrics[self.monitor])
        if not self.converged and math.isfinite(value):
            if self._improves(value):
                self.best, self.num_epochs_without_improvement = value, 0
            else:
                self.num_epochs_without_improvement += 1
        return self.converged

    @property
    def converged(self) -> bool:
        """Whether the patience is used up."""
        return self.num_epochs_without_improvement >= self.patience

    def _improves(self, value: float) -> bool:
        if self.best is None:
            return True
        gain = self.best - value if self.mode == "min" else value - self.best
        return gain > self.min_delta

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` needs to go on from here."""
        return {"best": self.best, "num_epochs_without_improvement": self.num_epochs_without_improvement}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the run that made ``state`` was."""
        self.best = state["best"]
        self.num_epochs_without_improvement = state["num_epochs_without_improvement"]
