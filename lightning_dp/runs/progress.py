"""How fast a run is: images per second in the log and in the progress bar."""

from __future__ import annotations

from typing import Any

from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.callbacks import RichProgressBar, TQDMProgressBar

from lightning_dp.callbacks.timers import ImageRate


class Throughput(ImageRate, Callback):
    """Log how fast training is, once per epoch. The times are rank 0's, and include waiting for data.

    - ``time/images_per_s``: training images of all ranks per second, over the epoch.
    - ``time/train_s``: seconds of training since the first epoch, without validation, tests and the checkpoints between
      epochs. A resumed run goes on counting.
    """

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the epoch."""
        for name, value in (("images_per_s", self.images_per_s), ("train_s", self.train_s)):
            if value is not None:
                # With both options Lightning neither averages over the ranks nor advises to.
                pl_module.log(f"time/{name}", value, sync_dist=True, rank_zero_only=True)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: the seconds of training."""
        return {"train_s": self.train_s}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on counting from a checkpoint."""
        self.train_s = state_dict["train_s"]


class _WithThroughput:
    """Adds images per second to the metrics of a progress bar, if the Trainer has a `Throughput`."""

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Read the metrics on all ranks, as that reduces means over them. Lightning's bar does so on rank 0 alone.

        Rank 0 would wait forever where the module then reduces something else, as ``metric.compute()`` does.
        """
        self.get_metrics(trainer, pl_module)
        super().on_train_epoch_end(trainer, pl_module)  # type: ignore[misc]

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """Return the numbers to the right of the bar."""
        metrics = super().get_metrics(trainer, pl_module)  # type: ignore[misc]
        metrics.pop("v_num", None)  # the version of a logger, which is empty here
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, Throughput) and callback.images_per_s is not None:
                metrics["images/s"] = round(callback.images_per_s)
        return metrics


class TQDMBar(_WithThroughput, TQDMProgressBar):
    """Lightning's progress bar, with images per second."""


class RichBar(_WithThroughput, RichProgressBar):
    """Lightning's progress bar of the package rich, with images per second."""
