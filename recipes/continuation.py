"""What a run that continues from a checkpoint needs, to end with the weights and metrics of an uninterrupted run."""

from __future__ import annotations

import csv
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.loggers import Logger
from pytorch_lightning.utilities import rank_zero_only
from resume import completed_steps

from lightning_dp.data.loading import derive_seed


class MetricsFile(Logger):
    """Writes ``metrics.csv`` and ``hparams.yaml`` of a run, on rank 0.

    Each row is written when it is logged, so a run that is killed has lost none.

    Args:
        run_dir: where the files are.
        rows: what the file begins with; see `rows_before`.
    """

    name = ""
    version = ""

    def __init__(self, run_dir: str, rows: Sequence[dict[str, Any]] = ()) -> None:
        super().__init__()
        self._folder = Path(run_dir)
        self._rows = list(rows)
        self._columns: list[str] = []
        self._hyperparameters: dict[str, Any] = {}

    @property
    def save_dir(self) -> str:
        """The run folder."""
        return str(self._folder)

    @rank_zero_only
    def log_hyperparams(self, params: Any, *_: Any, **__: Any) -> None:
        """Add to the hyperparameters, and write them."""
        self._hyperparameters |= dict(params)
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / "hparams.yaml").write_text(OmegaConf.to_yaml(self._hyperparameters))

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Append a row."""
        self._rows.append({**metrics, "step": len(self._rows) if step is None else step})
        path = self._folder / "metrics.csv"
        if self._rows[-1].keys() <= set(self._columns):
            with open(path, "a", newline="") as file:
                csv.DictWriter(file, self._columns).writerow(self._rows[-1])
            return
        self._columns = sorted(set().union(*self._rows))
        part = path.with_suffix(".part")
        with open(part, "w", newline="") as file:
            writer = csv.DictWriter(file, self._columns)
            writer.writeheader()
            writer.writerows(self._rows)
        # At once, so that there is never half a file.
        part.replace(path)


def rows_before(checkpoint: Path) -> list[dict[str, str]]:
    """Return the rows in the metrics.csv of a checkpoint's run that were logged before it was saved."""
    path = checkpoint.parents[1] / "metrics.csv"
    if not path.is_file():
        return []
    num_steps = completed_steps(checkpoint)
    with open(path, newline="") as file:
        rows = [row for row in csv.DictReader(file) if int(row["step"]) < num_steps]
    return [{name: value for name, value in row.items() if value} for row in rows]


def last_values(rows: Sequence[dict[str, str]]) -> dict[str, float]:
    """Return the last value of each metric."""
    return {name: float(value) for row in rows for name, value in row.items() if name not in ("epoch", "step")}


class SeedEachEpoch(Callback):
    """Seed the generators of PyTorch, NumPy and Python from the run's seed and the epoch, the same on all ranks.

    A checkpoint does not hold the state of these generators. With this callback, a run that continues from the end of
    an epoch draws what the uninterrupted run draws, for example in dropout.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Seed the generators at the first batch of an epoch."""
        # Not at the start of the epoch: the loader's iterator draws a number, before it in the first epoch of a run,
        # and after it in all others.
        if batch_idx > 0:
            return
        seed = derive_seed(self._seed, trainer.current_epoch)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
