"""A small module with a trunk and a head, and the single-process computations that it is held against."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

from lightning_dp.losses import sharded_binary_cross_entropy, sharded_cross_entropy
from tests.strategies.modules import CLASSES, FEATURES, data, optimizers, snapshot, trainer

STEPS = 6
Result = dict[str, Tensor]


def make_head(dropout: float = 0.0) -> nn.Sequential:
    """Hidden sizes that 2, 3 and 4 do not divide; and with 4 ranks one has no class at all."""
    first = (nn.Dropout(dropout), nn.Linear(6, 7), nn.Tanh())
    return nn.Sequential(*first, nn.Sequential(nn.Dropout(dropout), nn.Linear(7, 5), nn.ReLU()), nn.Linear(5, CLASSES))


class HybridNet(pl.LightningModule):
    """An ordinary module: `training_step` calls the head."""

    def __init__(self, optimizer: str = "momentum", loss: str = "cross_entropy", dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.optimizer_name, self.loss_name = optimizer, loss
        self.trunk = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh())
        self.head = make_head(dropout)
        self.double()
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.trunk(x))

    def cost(self, logits: Tensor, target: Tensor) -> Tensor:
        if self.loss_name == "cross_entropy":
            return F.cross_entropy(logits, target, label_smoothing=0.1)
        return F.binary_cross_entropy_with_logits(logits, F.one_hot(target, CLASSES).to(logits.dtype))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, target = batch
        loss = self.cost(self(x), target)
        self.losses.append(loss.item())
        return loss

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return optimizers(self.optimizer_name, self.parameters())


class StepNet(HybridNet):
    """The same, with the boundary marked."""

    def head_step(self, features: Tensor, target: Tensor) -> Tensor:
        return self.cost(self.head(features), target)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, target = batch
        loss = self.head_step(self.trunk(x), target)
        self.losses.append(loss.item())
        return loss


class NamedNet(StepNet):
    """The same with a loss that keeps the logits sharded."""

    def head_step(self, features: Tensor, target: Tensor) -> Tensor:
        if self.loss_name == "cross_entropy":
            return sharded_cross_entropy(self.head, features, target, label_smoothing=0.1)
        return sharded_binary_cross_entropy(self.head, features, target)


class PenaltyNet(StepNet):
    """Its loss has a penalty on the features and one on the logits."""

    def head_step(self, features: Tensor, target: Tensor) -> Tensor:
        logits = self.head(torch.sin(features))
        return self.cost(logits, target) + 0.1 * features.square().mean() + 0.1 * logits.tanh().square().mean()


def batches(rank: int, world_size: int, steps: int = STEPS, local_batch_size: int = 3) -> DataLoader:
    """Every ``world_size``-th of the samples: the ranks' batches together are `all_batches`'."""
    dataset = all_batches(world_size, steps, local_batch_size).dataset
    return DataLoader(Subset(dataset, range(rank, len(dataset), world_size)), batch_size=local_batch_size)


def all_batches(world_size: int, steps: int = STEPS, local_batch_size: int = 3) -> DataLoader:
    """The concatenated batches, for a single process."""
    return DataLoader(data(world_size, steps, local_batch_size).dataset, batch_size=world_size * local_batch_size)


class ScheduledNet(StepNet):
    """A learning rate that changes every step."""

    def configure_optimizers(self) -> Any:
        optimizer = optimizers("momentum", self.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def module_for(net: type[HybridNet], options: dict[str, Any]) -> HybridNet:
    module = net()
    return module.float() if "precision" in options or "plugins" in options else module


class _Float32(DataLoader):
    def __iter__(self) -> Any:
        return ((x.float(), y) for x, y in super().__iter__())


def loader_for(loader: DataLoader, options: dict[str, Any]) -> DataLoader:
    return (
        _Float32(loader.dataset, batch_size=loader.batch_size)
        if "precision" in options or "plugins" in options
        else loader
    )


def fit_with(
    loader: DataLoader, strategy: Any, world_size: int, net: type[HybridNet], options: dict[str, Any]
) -> Result:
    module = module_for(net, options)
    own = trainer(strategy, world_size, use_distributed_sampler=False, **options)
    own.fit(module, loader_for(loader, options))
    return snapshot(module, own)
