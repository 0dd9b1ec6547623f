"""Weights that change after the head was gathered, in ways that torch does not count: `p.data` is written."""

from __future__ import annotations

import copy
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from lightning_dp import KrizhevskyHybridStrategy
from lightning_dp.collectives.all_to_all import Channel
from lightning_dp.strategies.krizhevsky_hybrid.head import ShardedHead
from lightning_dp.strategies.krizhevsky_hybrid.state import CPU, GatheredHead, ShardedParameters
from tests.ranks import run_processes, run_threads
from tests.strategies.krizhevsky_hybrid.modules import StepNet, all_batches, batches, fit_with
from tests.strategies.krizhevsky_hybrid.test_evaluation import AveragedForValidation, Validated, X
from tests.strategies.krizhevsky_hybrid.test_misuse import logged
from tests.strategies.modules import trainer


class SampleAtStart(pl.Callback):
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.seen = pl_module(X).detach()


def _sanity_checked(rank: int) -> Tensor:
    sample = SampleAtStart()
    callbacks = [AveragedForValidation(), sample]
    runner = trainer(KrizhevskyHybridStrategy(), 2, use_distributed_sampler=False, callbacks=callbacks, max_steps=1)
    runner.fit(Validated(), batches(rank, 2, steps=1), batches(0, 2, steps=1))
    return sample.seen


def test_after_a_sanity_check_of_averaged_weights_the_head_can_be_called():
    with torch.no_grad():
        expected = Validated()(X)
    for seen in run_processes(2, _sanity_checked):
        torch.testing.assert_close(seen, expected, rtol=1e-12, atol=1e-12)


class Initializes(StepNet):
    """Draws other initial weights where each rank has its rows."""

    def on_fit_start(self) -> None:
        nn.init.xavier_uniform_(self.head[-1].weight)


class LoadsWhole(StepNet):
    """Loads pretrained weights in the same place."""

    def on_fit_start(self) -> None:
        self.load_state_dict({name: value * 2 for name, value in StepNet().state_dict().items()})


def _initialized(rank: int) -> list[list[str]]:
    results = []
    for net in (Initializes, LoadsWhole, StepNet):
        with logged() as said:
            fit_with(batches(rank, 2, steps=2), KrizhevskyHybridStrategy(), 2, net, {})
        results.append(said)
    return results


def test_weights_that_are_initialized_as_rows_come_with_a_warning():
    for rows, whole, unchanged in run_processes(2, _initialized):
        assert sum("changed after set-up" in line and "Initialize the head in __init__" in line for line in rows) == 1
        assert not whole
        assert not unchanged


class AveragedForEpoch(AveragedForValidation):
    """Puts its weights in where Lightning's own callback does, after `on_validation_start`."""

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        pass

    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        AveragedForValidation.on_validation_start(self, trainer, pl_module)


def _averaged(rank: int) -> list[Tensor]:
    module = Validated()
    runner = trainer(KrizhevskyHybridStrategy(), 2, use_distributed_sampler=False, callbacks=[AveragedForEpoch()])
    runner.fit(module, batches(rank, 2, steps=2), batches(0, 2, steps=2))
    assert len(runner.callbacks) == 1
    return module.validated


def test_weights_that_are_put_in_at_the_start_of_an_epoch_are_validated():
    module = Validated()
    trainer("auto", 1, callbacks=[AveragedForEpoch()]).fit(module, all_batches(2, steps=2), batches(0, 2, steps=2))
    for validated in run_processes(2, _averaged):
        torch.testing.assert_close(validated, module.validated, rtol=1e-9, atol=1e-12)


HEAD = nn.Linear(32, 128)


def _changed(rank: int, group: Any) -> list[bool]:
    head = ShardedHead(copy.deepcopy(HEAD), Channel(group))
    ShardedParameters(head).shard(CPU)
    gathered = GatheredHead(head)
    found = [gathered.has_same_rows]
    head.parameters[0].data[0, 1] += 1
    return [*found, gathered.has_same_rows]


def test_a_change_of_one_value_is_found():
    assert run_threads(2, _changed) == [[True, False]] * 2
