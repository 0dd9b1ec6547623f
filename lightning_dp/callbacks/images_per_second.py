"""Training speed in images per second, beside what the loader alone could deliver."""

from __future__ import annotations

import time
from typing import Any

from lightning_dp._lightning import Callback, LightningModule, require_own_trainer


class ImagesPerSecond(Callback):
    """Log images per second in each epoch, over all ranks, and print the last ones at the end of training.

    - ``images_per_s/train``: training, without the first batch of an epoch (starting the loader's workers) and without
      validation.
    - ``images_per_s/loader``: what the workers of the loader can read and decode. Only for data modules that measure it
      with a method ``loader_images_per_s()``, such as `lightning_dp.data.ImageNet`. If it is not clearly higher than
      the other, training waits for the loader: use more workers, or more CPU cores.

    Both are those of rank 0 times the number of ranks, so no communication is needed. A batch must be a pair of images
    and labels.
    """

    def __init__(self) -> None:
        self._start_s: float | None = None
        self._pause_s = 0.0
        self._num_images = 0
        self._last: dict[str, float] = {}

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Check that callback and Trainer come from the same Lightning package."""
        require_own_trainer(self, trainer)

    def on_train_epoch_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Reset the count. The clock starts at the end of the first batch."""
        self._start_s = None
        self._num_images = 0

    def on_train_batch_end(
        self, trainer: Any, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the images of the batch, but for the first one."""
        if self._start_s is None:
            self._start_s = time.perf_counter()
        else:
            self._num_images += len(batch[1])

    def on_validation_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Stop the clock."""
        self._pause_s = time.perf_counter()

    def on_validation_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Start the clock again."""
        if self._start_s is not None:
            self._start_s += time.perf_counter() - self._pause_s

    def on_train_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Log the rates of the epoch. An epoch of one batch has none."""
        if self._start_s is None or self._num_images == 0:
            return
        rates = {"train": self._num_images / (time.perf_counter() - self._start_s)}
        measure = getattr(trainer.datamodule, "loader_images_per_s", None)
        loader = None if measure is None else measure()
        if loader is not None:
            rates["loader"] = loader
        self._last = {name: rate * trainer.world_size for name, rate in rates.items()}
        for name, rate in self._last.items():
            # Both options together: no average over ranks, and no advice of Lightning's to take one.
            pl_module.log(f"images_per_s/{name}", rate, sync_dist=True, rank_zero_only=True)

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Print the rates of the last epoch."""
        if self._last and trainer.is_global_zero:
            loader = f"; the loader alone: {self._last['loader']:,.0f}" if "loader" in self._last else ""
            trainer.print(f"images per second: {self._last['train']:,.0f}{loader}")
