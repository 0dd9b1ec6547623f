"""What the tests of layered FSDP share: the strategy with small units, a short fit, and whole parameters."""

from __future__ import annotations

import warnings
from typing import Any

import pytorch_lightning as pl
from lightning_fabric.utilities.warnings import PossibleUserWarning
from torch import Tensor, nn

from lightning_dp import LayeredFSDPStrategy
from tests.strategies.modules import Net, data, trainer

STEPS = 4


def layered(group_size: int | None = 2, overlap: str = "step", **options: Any) -> LayeredFSDPStrategy:
    options.setdefault("wrap", [nn.Linear])
    return LayeredFSDPStrategy(group_size, overlap, **options)


def fit(strategy: Any, world_size: int, module: pl.LightningModule | None = None, **options: Any):
    module = module or Net()
    steps = options.pop("steps", STEPS)
    checkpoint = options.pop("ckpt_path", None)
    t = trainer(strategy, world_size, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PossibleUserWarning)  # advice: more loader workers, a validation set, ...
        t.fit(module, data(world_size, steps), ckpt_path=checkpoint)
    return module, t


def whole(tensor: Tensor) -> Tensor:
    """Gather a DTensor; all ranks must call it."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def snapshot(module: pl.LightningModule, trainer: pl.Trainer) -> dict[str, Tensor]:
    """Whole parameters, buffers and optimizer state, by name."""
    values = {name: whole(p) for name, p in [*module.named_parameters(), *module.named_buffers()]}
    names = {p: name for name, p in module.named_parameters()}
    for index, optimizer in enumerate(trainer.optimizers):
        for group in optimizer.param_groups:
            for p in group["params"]:
                state = optimizer.state.get(p, {})
                values |= {f"{names[p]}.{index}.{k}": whole(v) for k, v in state.items() if isinstance(v, Tensor)}
    return values
