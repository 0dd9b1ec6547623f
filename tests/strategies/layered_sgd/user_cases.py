"""Fits what users do under DDP and under both overlaps of layered SGD, on a network on which nothing arrives early."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytorch_lightning as pl
from lightning_fabric.utilities.warnings import PossibleUserWarning
from pytorch_lightning.strategies import DDPStrategy

from lightning_dp.strategies import LayeredSGDStrategy
from lightning_dp.strategies.layered_sgd.host_communicator import BucketReduction
from tests.strategies.modules import SMALL_BUCKETS_MB, Net, assert_same, data, snapshot, trainer

OVERLAPS = ("load", "step")
STEPS = 6

Case = tuple[Callable[[], pl.LightningModule], Sequence[Callable[[], pl.Callback]], Mapping[str, Any]]
"""Makes the module, make its callbacks, and options of the Trainer; of DDP and layered SGD under "ddp"."""


def layered(overlap: str = "step", **options: Any) -> LayeredSGDStrategy:
    return LayeredSGDStrategy(1, overlap=overlap, **{"bucket_cap_mb": SMALL_BUCKETS_MB, **options})


def on_a_slow_network() -> None:
    """Let no bucket have arrived when another is needed: each update then goes as far as it must and no further."""
    BucketReduction.has_arrived = property(lambda self: False)


def fit(strategy: Any, module: pl.LightningModule, callbacks: Any = (), **options: Any) -> pl.Trainer:
    t = trainer(strategy, 2, callbacks=list(callbacks), **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PossibleUserWarning)
        warnings.filterwarnings("ignore", ".torch.jit.[a-z]*. is deprecated")
        warnings.filterwarnings("ignore", r".*\.grad attribute of a Tensor that is not a leaf")  # Dynamo looks at it
        t.fit(module, data(2, STEPS))
    return t


class Manual(Net):
    automatic_optimization = False


def compare_on_a_slow_network(case: Case) -> None:
    on_a_slow_network()
    compare(case)


def compare(case: Case) -> None:
    """Raise unless the case ends under both overlaps as it does under DDP."""
    make, callbacks, options = case
    options = dict(options)
    ddp_options = options.pop("ddp", {})
    module = make()
    expected = snapshot(module, fit(DDPStrategy(**ddp_options), module, [each() for each in callbacks], **options))
    for overlap in OVERLAPS:
        module = make()
        t = fit(layered(overlap, **ddp_options), module, [each() for each in callbacks], **options)
        assert_same(snapshot(module, t), expected)
