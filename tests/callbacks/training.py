"""A small network, its data, and ``fit`` for the tests of the callbacks."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from typing import Any

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from lightning_fabric.utilities.warnings import PossibleUserWarning
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

from lightning_dp.layers import global_batch_norm_layers

FEATURES, CLASSES, STEPS, LOCAL_BATCH = 5, 3, 4, 3


class Net(pl.LightningModule):
    """A network with two batch norm layers that logs ``losses`` as ``train_loss``, one value per epoch."""

    def __init__(self, losses: tuple[float, ...] = ()) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.losses = losses
        self.net = nn.Sequential(
            nn.Linear(FEATURES, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, CLASSES), nn.BatchNorm1d(CLASSES)
        )
        self.double()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        if self.losses:
            self.log("train_loss", self.losses[self.current_epoch], on_step=False, on_epoch=True, sync_dist=True)
        return F.cross_entropy(self.net(x), y)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", F.cross_entropy(self.net(x), y), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9)


def dataset(world_size: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    count = world_size * STEPS * LOCAL_BATCH
    x = torch.randn(count, FEATURES, dtype=torch.float64, generator=generator)
    x = x * (1 + torch.arange(count) % world_size)[:, None] + torch.arange(count)[:, None] % world_size  # by rank
    return TensorDataset(x, torch.randint(CLASSES, (count,), generator=generator))


class Batches(Sampler):
    """Sampler of given batches, each a list of rows."""

    def __init__(self, batches: list[list[int]]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def rank_loader(world_size: int) -> DataLoader:
    """Loader of this rank's rows. The rows of all ranks in one step form one batch of `alone`."""
    rank = int(os.environ.get("RANK", 0))
    rows = [torch.arange(LOCAL_BATCH) + step * LOCAL_BATCH for step in range(STEPS)]
    return DataLoader(dataset(world_size), batch_sampler=Batches([(r * world_size + rank).tolist() for r in rows]))


class Probe(pl.Callback):
    """Record of the layers' mode and buffers in each training step and validation."""

    def __init__(self) -> None:
        self.is_global: list[bool] = []
        self.validated: list[list[Tensor]] = []
        self.trained: list[Tensor] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        (value,) = {layer.is_global for layer in global_batch_norm_layers(pl_module)}
        self.is_global.append(value)
        self.trained = [b.clone() for b in pl_module.buffers()]

    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.validated.append([b.clone() for b in pl_module.buffers()])


def fit(
    world_size: int,
    *callbacks: pl.Callback,
    net: Net | None = None,
    loader: Any = None,
    strategy: Any = "ddp",
    **options: Any,
) -> tuple[Net, pl.Trainer]:
    net = net or Net()
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": world_size,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": any(isinstance(c, ModelCheckpoint) for c in callbacks),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "use_distributed_sampler": False,
    }
    validate = options.pop("validate", False)
    ckpt_path = options.pop("ckpt_path", None)
    trainer = pl.Trainer(strategy=strategy, callbacks=list(callbacks), **{**defaults, **options})
    loader = loader or rank_loader(world_size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PossibleUserWarning)  # more loader workers, ...
        warnings.filterwarnings("ignore", "You defined a `validation_step` but have no `val_dataloader`")
        warnings.filterwarnings("ignore", "Be aware that when using `ckpt_path`")
        warnings.filterwarnings("ignore", "Checkpoint directory .* exists and is not empty")
        trainer.fit(net, loader, loader if validate else None, ckpt_path=ckpt_path)
    return net, trainer


def alone(world_size: int, accumulate: int = 1) -> dict[str, Tensor]:
    """The state after training in one process, with plain batch norm, on the concatenated batches."""
    net = Net()
    optimizer = net.configure_optimizers()
    for index, batch in enumerate(DataLoader(dataset(world_size), batch_size=world_size * LOCAL_BATCH)):
        x, y = batch
        (F.cross_entropy(net.net(x), y) / accumulate).backward()
        if (index + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    return {k: v.clone() for k, v in net.state_dict().items()}


def state_of(net: nn.Module) -> dict[str, Tensor]:
    return {k: v.clone() for k, v in net.state_dict().items()}


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")
