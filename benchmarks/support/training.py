"""Lightning as the benchmarks use it: quiet, on CPU, without loggers and checkpoints; and a clock for its steps."""

from __future__ import annotations

import logging
import time
import warnings
from typing import Any

import pytorch_lightning as pl
import torch


def quiet() -> None:
    """Let this rank compute with one thread, and silence Lightning's advice."""
    warnings.filterwarnings("ignore")
    for name in ("pytorch_lightning", "lightning_fabric", "lightning_dp"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)


def make_trainer(strategy: Any, *, per_host: int, num_hosts: int = 1, **options: Any) -> pl.Trainer:
    """Return a Trainer for ``num_hosts`` hosts with ``per_host`` ranks each, which writes nothing."""
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        **options,
    }
    return pl.Trainer(strategy=strategy, devices=per_host, num_nodes=num_hosts, **settings)


class StepClock(pl.Callback):
    """Measures the seconds a step in the steady state, from the end of one step to the end of another.

    Where a method postpones updates, one is pending at both ends, so that each measured step pays for one update.

    Args:
        warm_up: steps that are not counted.
    """

    def __init__(self, warm_up: int) -> None:
        self._warm_up = warm_up
        self._ends_s: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self._ends_s.append(time.perf_counter())

    @property
    def step_s(self) -> float:
        """Mean seconds a step."""
        return (self._ends_s[-1] - self._ends_s[self._warm_up - 1]) / (len(self._ends_s) - self._warm_up)
