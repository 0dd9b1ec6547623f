"""Callbacks and a logger that tests put into a configuration."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

from pytorch_lightning import Callback
from pytorch_lightning.loggers import Logger
from pytorch_lightning.utilities import rank_zero_only


class Kill(Callback):
    """Kills the rank's process at the end of a batch, as ``kill -9`` does; under torchrun only before a restart."""

    def __init__(self, after_steps: int) -> None:
        self.after_steps = after_steps

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
        if trainer.global_step == self.after_steps and restarts == 0:
            os.kill(os.getpid(), signal.SIGKILL)


class Recorder(Logger):
    """Writes hyperparameters to a file, and counts the metrics."""

    name = version = "recorder"

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = Path(path)

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        if not self.path.exists():  # the first call is ours, the second Lightning's
            self.path.write_text(json.dumps(params))

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        with open(self.path.with_suffix(".metrics"), "a") as file:
            file.write(json.dumps(sorted(metrics)) + "\n")
