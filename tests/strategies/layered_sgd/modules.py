"""What several tests of layered SGD share: the strategy with small buckets, and a short fit."""

from __future__ import annotations

import warnings
from typing import Any

import pytorch_lightning as pl
import torch
from lightning_fabric.utilities.warnings import PossibleUserWarning
from torch import nn

from lightning_dp.strategies import LayeredSGDStrategy
from tests.strategies.modules import SMALL_BUCKETS_MB, Net, data, trainer

OVERLAPS, COMMUNICATORS = ("load", "step"), ("leader", "sharded")
STEPS = 8


def layered(group_size: int | None = 1, communicator: str = "leader", overlap: str = "step", **options: Any):
    return LayeredSGDStrategy(group_size, communicator, overlap, bucket_cap_mb=SMALL_BUCKETS_MB, **options)


def fit(strategy: Any, world_size: int, module: pl.LightningModule | None = None, **options: Any):
    module = module or Net()
    t = trainer(strategy, world_size, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PossibleUserWarning)  # advice: more loader workers, a validation set, ...
        t.fit(module, data(world_size, STEPS))
    return module, t


class Unused(Net):
    """A layer that only rank 0 uses, and only in every other step; another that nobody uses."""

    def __init__(self) -> None:
        super().__init__(optimizer="adamw")
        self.sometimes = nn.Linear(8, 8).double()
        self.never = nn.Linear(8, 8).double()

    def training_step(self, batch, batch_idx):
        self.extra = self.global_rank == 0 and batch_idx % 2 == 0
        return super().training_step(batch, batch_idx)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        x = self.sometimes(x) if self.extra else x
        return self.last(torch.tanh(self.shared(x)))
