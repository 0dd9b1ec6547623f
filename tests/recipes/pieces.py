"""Callbacks and a logger that tests put into a configuration."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from pytorch_lightning import Callback, LightningDataModule, LightningModule
from pytorch_lightning.callbacks import BaseFinetuning, Checkpoint, OnExceptionCheckpoint
from pytorch_lightning.loggers import Logger
from pytorch_lightning.utilities import rank_zero_only
from torch.utils.data import DataLoader, Dataset, DistributedSampler, RandomSampler, Subset, random_split
from torchmetrics import MaxMetric, MeanMetric

from lightning_dp.models import Classifier


class Kill(Callback):
    """Kills the rank's process at the end of a batch, as ``kill -9`` does; under torchrun only before a restart."""

    def __init__(self, after_steps: int) -> None:
        self.after_steps = after_steps

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
        if trainer.global_step == self.after_steps and restarts == 0:
            os.kill(os.getpid(), signal.SIGKILL)


class KillAt(Callback):
    """Sends the process a signal at a call of a hook: KILL_AT="on_test_start 1 SIGKILL" at the first one, or none."""

    def __init__(self) -> None:
        hook, count, self.signal = os.environ.get("KILL_AT", "no_hook 0 none").split()
        self.calls_left = int(count)
        setattr(self, hook, self.call)

    def call(self, *args: Any, **kwargs: Any) -> None:
        self.calls_left -= 1
        if self.calls_left == 0:
            os.kill(os.getpid(), signal.Signals[self.signal])


class KillAtLast(KillAt, Checkpoint):
    """The same, but it comes after the callbacks that write checkpoints: Lightning calls all such callbacks last."""


class SavesOnException(OnExceptionCheckpoint):
    """Writes down what it is set up for."""

    def setup(self, trainer: Any, pl_module: Any, stage: Any) -> None:
        with open(Path(self.dirpath, "stages"), "a") as stages:
            stages.write(f"{stage.value}\n")


class Halves(Callback):
    """Halves the parameters when training ends, by a factor that it sets when training begins."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.factor = 0.5

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        with torch.no_grad():
            for parameter in pl_module.parameters():
                parameter *= self.factor


class Reports(Callback):
    """Reads a metric of the epoch when training ends."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        assert trainer.callback_metrics["train/loss"] > 0


class SignalOfSlurm(Callback):
    """Sends this process the signal on which Lightning saves a checkpoint, and has SLURM queue the job again."""

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 1:
            os.kill(os.getpid(), signal.SIGUSR1)


class KillAfterCheckpoint(Checkpoint):
    """Kills the rank's process when the checkpoint of an epoch is there, but not the row of its means.

    It comes after the callback that writes the checkpoint: Lightning calls those that are checkpoints last.
    """

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def on_train_epoch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.current_epoch == self.epoch:
            os.kill(os.getpid(), signal.SIGKILL)


class Recorder(Logger):
    """Writes hyperparameters to a file, and takes them out of what it was given; counts the metrics."""

    name = version = "recorder"

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = Path(path)

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        if not self.path.exists():  # the first call is ours, the second Lightning's
            self.path.write_text(json.dumps(params))
            params.clear()

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        with open(self.path.with_suffix(".metrics"), "a") as file:
            file.write(json.dumps(sorted(metrics)) + "\n")


class Named(Dataset[Any]):
    """Images as a user may have them: the name of each comes first."""

    def __init__(self, length: int) -> None:
        self.images = torch.rand(length, 3, 8, 8, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"name": f"image {index}", "image": self.images[index], "label": index % 10}


class OwnData(LightningDataModule):
    """An ordinary data module."""

    def __init__(self, batch_size: int, transform: Any = None) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.save_hyperparameters({"transform": transform, "sizes": (1, 2)})

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Named(48), self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Named(20), self.batch_size)

    def test_dataloader(self) -> list[DataLoader[Any]]:
        return [DataLoader(Named(21), self.batch_size), DataLoader(Named(5), self.batch_size)]


class Prepared(OwnData):
    """Writes to the folder of its Trainer before it is loaded."""

    def prepare_data(self) -> None:
        Path(self.trainer.default_root_dir, "prepared").touch()


class NoTest(LightningDataModule):
    """A data module without test images."""


class OwnModel(Classifier):
    """Takes the batches of `OwnData`."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch["image"], batch["label"]

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().test_step(batch, batch_idx)


class HalvedModel(Classifier):
    """Halves its own when training ends."""

    def on_train_end(self) -> None:
        Halves.on_train_start(self, None, self)
        Halves.on_train_end(self, None, self)


class Watching(Classifier):
    """Logs in all the ways there are: steps and means, means over all epochs so far, and the means of each rank."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.mean_so_far, self.best_so_far = MeanMetric(), MaxMetric()
        for metric in (self.mean_so_far, self.best_so_far):
            metric.persistent(True)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.mean_so_far.update(loss.detach())
        self.log("train/of_step", loss, on_step=True, on_epoch=True)
        self.log_dict({"train/drawn": torch.rand(()), "train/sum": loss.detach()}, reduce_fx="sum")
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.log("val/of_step", batch[0].mean(), on_step=True, on_epoch=True)
        self.best_so_far.update(batch[0].max() + self.global_step)

    def on_validation_epoch_end(self) -> None:
        super().on_validation_epoch_end()
        self.log("val/best_so_far", self.best_so_far.compute())

    def on_train_epoch_end(self) -> None:
        self.log("train/mean_so_far", self.mean_so_far.compute(), sync_dist=True)
        self.logger.log_metrics({"own/epoch": float(self.current_epoch)}, step=self.global_step)


class NoTestStep(LightningModule):
    """A module that is not tested."""


class Jitter(Named):
    """Images that are drawn with torch's own generator, as torchvision's transforms do it."""

    def __getitem__(self, index: int) -> Any:
        return self.images[index] + torch.rand(1), index % 10


class JitterData(LightningDataModule):
    """Shuffled by DataLoader's own sampler, or by one that knows the epoch."""

    def __init__(self, num_workers: int = 0, knows_epoch: bool = False) -> None:
        super().__init__()
        self.num_workers, self.knows_epoch = num_workers, knows_epoch

    def train_dataloader(self) -> DataLoader[Any]:
        images, _ = random_split(Jitter(60), [48, 12])  # drawn when the loader is made
        sampler = DistributedSampler(images, 1, 0) if self.knows_epoch else RandomSampler(images)
        return DataLoader(images, 16, sampler=sampler, num_workers=self.num_workers)

    def test_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Jitter(21), 16)


class GeneratorData(JitterData):
    """Shuffled by a generator of the loader's own, which also seeds the workers."""

    def __init__(self, num_workers: int = 0, with_numpy: bool = False) -> None:
        super().__init__(num_workers)
        self.with_numpy = with_numpy

    def train_dataloader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(3)
        images = Jitter(48)
        if self.with_numpy:
            images.drawn = np.random.default_rng(0)
        part = Subset(images, range(48))
        return DataLoader(part, 16, shuffle=True, num_workers=self.num_workers, generator=generator)


class LargeJitter(Jitter):
    """Images as large as CIFAR-10's."""

    def __getitem__(self, index: int) -> Any:
        image, label = super().__getitem__(index)
        return image.repeat(1, 4, 4), label


class DrawnData(LightningDataModule):
    """Shuffled by a generator of the loader's own, or divided and shuffled by that of PyTorch."""

    def __init__(self, has_own: bool, num_workers: int = 0) -> None:
        super().__init__()
        self.has_own, self.num_workers = has_own, num_workers

    def train_dataloader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(3) if self.has_own else None
        images = LargeJitter(48) if self.has_own else random_split(LargeJitter(60), [48, 12])[0]
        return DataLoader(images, 16, shuffle=True, num_workers=self.num_workers, generator=generator)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(LargeJitter(20), 16)

    def test_dataloader(self) -> DataLoader[Any]:
        return DataLoader(LargeJitter(21), 16)


class Resumable:
    """A loader with a state of its own, as torchdata's. Only the next iterator begins there."""

    def __init__(self) -> None:
        self.images, self.start, self.num_loaded = Named(48).images.chunk(3), 0, 0

    def __len__(self) -> int:
        return len(self.images)

    def __iter__(self) -> Iterator[Any]:
        numbers, self.start = range(self.start, len(self)), 0
        return map(self.load, numbers)

    def load(self, number: int) -> Any:
        self.num_loaded = number + 1
        return self.images[number], torch.arange(16) % 10

    def state_dict(self) -> dict[str, int]:
        return {"num_loaded": self.num_loaded}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.start = state_dict["num_loaded"]


class ResumableData(JitterData):
    """Loaded by `Resumable`."""

    def train_dataloader(self) -> Any:
        return Resumable()


class TwoOptimizers(LightningModule):
    """Manual optimization, and a logger that is used directly."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.layers = torch.nn.ModuleList([torch.nn.Linear(192, 8), torch.nn.Linear(8, 10)])

    def configure_optimizers(self) -> list[Any]:
        return [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in self.layers]

    def loss(self, batch: Any) -> torch.Tensor:
        return F.cross_entropy(self.layers[1](self.layers[0](batch[0].flatten(1))), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
        self.log("train/loss", loss, on_step=False, on_epoch=True)

    def on_train_epoch_end(self) -> None:
        self.logger.log_metrics({"own/seen": float(self.global_step)}, step=self.global_step)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test/acc", -self.loss(batch))


class WithBackbone(LightningModule):
    """For BackboneFinetuning: an optimizer of the rest, to which the callback adds the backbone."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = torch.nn.Sequential(torch.nn.Linear(192, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU())
        self.rest = torch.nn.Linear(8, 10)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.rest.parameters(), lr=0.1, momentum=0.9)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return F.cross_entropy(self.rest(self.backbone(batch[0].flatten(1))), batch[1])


class Unfreezes(WithBackbone):
    """Has a frozen backbone at first, with its batch norm, and unfreezes that itself."""

    def __init__(self) -> None:
        super().__init__()
        BaseFinetuning.freeze(self.backbone, train_bn=False)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            BaseFinetuning.make_trainable(self.backbone)


class Thaws(Unfreezes):
    """Has a backbone that evaluates at first, so that the statistics of its batch norm are as they were."""

    def __init__(self) -> None:
        WithBackbone.__init__(self)

    def on_train_start(self) -> None:
        self.backbone.eval()

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.backbone.train()
