"""What several tests of layered SGD share: the strategy with small buckets, and a short fit."""

from __future__ import annotations

import warnings
from typing import Any

import pytorch_lightning as pl
from lightning_fabric.utilities.warnings import PossibleUserWarning

from lightning_dp.strategies import LayeredSGDStrategy
from tests.strategies.modules import SMALL_BUCKETS_MB, Net, data, trainer

OVERLAPS, COMMUNICATORS = ("load", "step"), ("leader", "sharded")


def layered(group_size: int | None = 1, communicator: str = "leader", overlap: str = "step", **options: Any):
    return LayeredSGDStrategy(group_size, communicator, overlap, bucket_cap_mb=SMALL_BUCKETS_MB, **options)


def fit(strategy: Any, world_size: int, module: pl.LightningModule | None = None, **options: Any):
    module = module or Net()
    t = trainer(strategy, world_size, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PossibleUserWarning)  # advice: more loader workers, a validation set, ...
        t.fit(module, data(world_size))
    return module, t
