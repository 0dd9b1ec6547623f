"""Optimizers that get hold of the head after set-up are checked before their first update, as those at set-up are."""

from __future__ import annotations

from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import BaseFinetuning

from lightning_dp import KrizhevskyHybridStrategy
from lightning_dp.optim import LARS
from tests.ranks import logged, run_processes
from tests.strategies.krizhevsky_hybrid.modules import StepNet, batches
from tests.strategies.modules import trainer

STEPS = 3


class WithLARS(StepNet):
    def configure_optimizers(self) -> Any:
        return LARS((p for p in self.parameters() if p.requires_grad), lr=0.1)


class Finetuning(BaseFinetuning):
    """Lightning's callback, which gives the head to the optimizer in epoch 1."""

    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module.head)

    def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.head, optimizer, lr=0.05)


class Replacing(pl.Callback):
    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch == 1:
            trainer.strategy.optimizers = [LARS(module.parameters(), lr=0.1)]


class Manual(StepNet):
    """Replaces the optimizer between backward and its step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def on_after_backward(self) -> None:
        if self.current_epoch == 1:
            self.trainer.strategy.optimizers = [LARS(self.parameters(), lr=0.1)]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(super().training_step(batch, batch_idx))
        self.optimizers().step()
        self.optimizers().zero_grad()


class Recording(pl.Callback):
    """Has a copy of the rows at the start of epoch 1, before any update that must not happen."""

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self.rows = {name: p.detach().clone() for name, p in module.named_parameters()}

    def changed(self, module: Any) -> list[str]:
        return [name for name, p in module.named_parameters() if not torch.equal(p, self.rows[name])]


CASES: list[tuple[type[StepNet], list[type[pl.Callback]], dict[str, Any]]] = [
    (WithLARS, [Finetuning], {}),
    (StepNet, [Replacing], {}),
    (StepNet, [Replacing], {"variable_batch": True}),
    (Manual, [], {}),
]


def _late(rank: int) -> list[tuple[str, int, list[str]]]:
    said = []
    for net, callbacks, options in CASES:
        module, recording = net(), Recording()
        own = trainer(
            KrizhevskyHybridStrategy(**options), 2, use_distributed_sampler=False, max_epochs=2,
            callbacks=[*(each() for each in callbacks), recording],
        )  # fmt: skip
        with pytest.raises(ValueError) as error:  # noqa: PT011  the caller looks at what it says
            own.fit(module, batches(rank, 2, STEPS))
        said.append((str(error.value), own.current_epoch, recording.changed(module)))
    return said


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore")
def test_an_optimizer_of_whole_parameters_is_refused_before_its_first_update():
    for said in run_processes(2, _late):
        for message, epoch, changed in said:
            assert "LARS computes with whole parameters" in message
            assert (epoch, changed) == (1, [])


class OfItsOwn(torch.optim.SGD):
    pass


class Unknown(StepNet):
    def configure_optimizers(self) -> Any:
        return OfItsOwn(self.parameters(), lr=0.1)


def _unknown(rank: int) -> list[str]:
    with logged() as said:
        own = trainer(KrizhevskyHybridStrategy(), 2, use_distributed_sampler=False)
        own.fit(Unknown(), batches(rank, 2, STEPS))
    return said


def test_a_warning_of_an_unknown_optimizer_comes_once():
    for said in run_processes(2, _unknown):
        assert sum("OfItsOwn updates" in text for text in said) == 1
