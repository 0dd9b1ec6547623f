"""How long training takes to reach a given accuracy."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

from lightning_dp._lightning import Callback, LightningModule, require_own_trainer


class TimeToAccuracy(Callback):
    """Print and log the time from the start of training to the first validation with a given accuracy.

    The time includes validation and checkpoints. It does not include what comes before the first step: starting
    processes and building the model. A resumed run adds the time of the run before, up to its checkpoint.

    Args:
        threshold: accuracy to reach, from 0 to 1. MLPerf's for ResNet-50 on ImageNet is 0.759.
        monitor: name of the metric.

    Attributes:
        reached_s: seconds to the threshold, or None until it is reached. The loggers get it as
            ``time/to_THRESHOLD_s``.

    Raises:
        ValueError: at the first validation, if no such metric was logged.
    """

    def __init__(self, threshold: float = 0.759, monitor: str = "val/acc") -> None:
        self.threshold = threshold
        self.monitor = monitor
        self.reached_s: float | None = None
        self._before_s = 0.0  # of the runs that this one continues
        self._start_s: float | None = None

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Check that callback and Trainer come from the same Lightning package."""
        require_own_trainer(self, trainer)

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Start the clock."""
        self._start_s = time.perf_counter()

    def on_validation_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Print and log the time if the threshold is reached for the first time."""
        if trainer.sanity_checking or self._start_s is None or self.reached_s is not None:
            return
        metrics = trainer.callback_metrics
        if self.monitor not in metrics:
            raise ValueError(
                f"TimeToAccuracy: monitor={self.monitor!r} was not logged; there are {', '.join(sorted(metrics))}"
            )
        accuracy = float(metrics[self.monitor])
        if accuracy < self.threshold:
            return
        self.reached_s = self._elapsed_s()
        for logger in trainer.loggers:
            logger.log_metrics({f"time/to_{self.threshold:g}_s": self.reached_s}, step=trainer.global_step)
        if trainer.is_global_zero:
            duration = timedelta(seconds=round(self.reached_s))
            trainer.print(
                f"{self.monitor}={accuracy:.4f} reached {self.threshold:g} after {duration} "
                f"({trainer.current_epoch + 1} epochs)"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the time so far, for a checkpoint."""
        return {"elapsed_s": self._elapsed_s(), "reached_s": self.reached_s}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from the time of a checkpoint."""
        self._before_s = state_dict["elapsed_s"]
        self.reached_s = state_dict["reached_s"]

    def _elapsed_s(self) -> float:
        running_s = 0.0 if self._start_s is None else time.perf_counter() - self._start_s
        return self._before_s + running_s
