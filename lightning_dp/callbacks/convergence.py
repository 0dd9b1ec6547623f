"""Convergence criteria for `AdaptiveGlobalBatchNorm`, evaluated once per epoch. Independent of the Trainer."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Literal, Protocol

from torch import Tensor


class ConvergenceCriterion(Protocol):
    """Interface of a convergence criterion.

    A criterion with an attribute ``monitor``, the name of a metric, is evaluated only in epochs that log this metric.
    ``state_dict`` and ``load_state_dict`` are optional. If a criterion has them, its state is saved in checkpoints.
    """

    def update(self, metrics: Mapping[str, Any]) -> bool:
        """Update the criterion with the metrics of one training epoch. Return whether training has converged."""


Convergence = ConvergenceCriterion | Callable[[Mapping[str, Any]], bool]


class Monitor:
    """Watches whether the metric that a criterion monitors has been logged since the criterion was last evaluated.

    Args:
        criterion: one without an attribute ``monitor`` is evaluated in every epoch.
    """

    def __init__(self, criterion: Convergence | None) -> None:
        name = getattr(criterion, "monitor", None)
        self._name = name if isinstance(name, str) else None
        self._last_value: Tensor | None = None

    def is_due(self, metrics: Mapping[str, Tensor], may_be_missing: bool) -> bool:
        """Return whether to evaluate the criterion on these metrics.

        Lightning keeps the values of earlier epochs among the metrics. A value that was logged again lies in other
        memory: that of the last value is not reused while this object refers to it.

        Args:
            metrics: ``trainer.callback_metrics`` at the end of an epoch.
            may_be_missing: whether the metric may be logged for the first time in a later epoch. If not, a criterion
                whose metric is missing is evaluated, in order to raise its error.
        """
        if self._name is None:
            return True
        if self._name not in metrics:
            return not may_be_missing
        value = metrics[self._name]
        last = self._last_value
        self._last_value = value
        return last is None or not value.is_set_to(last)

    def forget(self, metrics: Mapping[str, Tensor]) -> None:
        """Take the value that the metric has now for one that the criterion was evaluated on."""
        if self._name is not None:
            self._last_value = metrics.get(self._name, self._last_value)


def ask(criterion: Convergence, metrics: Mapping[str, Any]) -> tuple[bool, str]:
    """Evaluate ``criterion`` on the metrics of one epoch.

    Rank 0 evaluates it for all ranks. It must not raise there alone, because the other ranks would wait for its answer.

    Returns:
        Whether training has converged, and the traceback of an exception, or the message of a ValueError ("" if there
        was none).
    """
    update: Any = getattr(criterion, "update", criterion)
    try:
        return bool(update(metrics)), ""
    except ValueError as error:  # it says what is wrong, such as a metric that is not logged
        return False, str(error)
    except Exception:
        return False, traceback.format_exc()


@dataclass
class Plateau:
    """Criterion that is met once ``monitor`` has not improved for ``patience`` epochs in a row, and stays met.

    The paper does not define a criterion (section 4.3: "IsConverged is determined by the convergence criterion").
    Epochs in which ``monitor`` is not logged do not count, for example those without validation if it is a validation
    metric.

    Args:
        monitor: name of a logged metric. It is read at the end of each training epoch. A training metric must be logged
            with ``on_epoch=True`` or at the last step.
        patience: number of epochs without improvement, at least 1.
        min_delta: a change counts as an improvement if it is larger than this.
        mode: ``"min"`` if the metric should fall, ``"max"`` if it should rise.

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
        # Not `patience < 1`, which is False for NaN.
        if not (isinstance(self.patience, Real) and self.patience >= 1):
            raise ValueError(f"patience={self.patience!r} must be at least 1 epoch")
        if not (isinstance(self.min_delta, Real) and self.min_delta >= 0):
            raise ValueError(f"min_delta={self.min_delta!r} must not be negative or NaN")
        if self.mode not in ("min", "max"):
            raise ValueError(f"mode={self.mode!r} is not known; use 'min' or 'max'")

    def update(self, metrics: Mapping[str, Any]) -> bool:
        """Update the criterion with the metrics of one epoch. Return whether training has converged.

        A value that is not finite is ignored, because a run that diverges has not converged.

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
                self.best = value
                self.num_epochs_without_improvement = 0
            else:
                self.num_epochs_without_improvement += 1
        return self.converged

    @property
    def converged(self) -> bool:
        """Whether ``patience`` epochs have passed without improvement."""
        return self.num_epochs_without_improvement >= self.patience

    def _improves(self, value: float) -> bool:
        if self.best is None:
            return True
        gain = self.best - value if self.mode == "min" else value - self.best
        return gain > self.min_delta

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save in a checkpoint."""
        return {"best": self.best, "num_epochs_without_improvement": self.num_epochs_without_improvement}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a run from a checkpoint."""
        self.best = state["best"]
        self.num_epochs_without_improvement = state["num_epochs_without_improvement"]
