"""Weights that change after the head was gathered, in ways that torch does not count: `p.data` is written."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

from lightning_dp import KrizhevskyHybridStrategy
from lightning_dp.collectives.all_to_all import Channel
from lightning_dp.strategies.krizhevsky_hybrid.head import ShardedHead
from lightning_dp.strategies.krizhevsky_hybrid.state import CPU, GatheredHead, ShardedParameters
from tests.ranks import run_processes, run_threads
from tests.strategies.krizhevsky_hybrid.modules import NamedNet, Result, all_batches, batches
from tests.strategies.krizhevsky_hybrid.test_evaluation import AveragedForValidation, Validated, X
from tests.strategies.modules import CLASSES, assert_same, snapshot, trainer


class SampleAtStart(pl.Callback):
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.seen = pl_module(X).detach()


def _sanity_checked(rank: int) -> Tensor:
    sample = SampleAtStart()
    callbacks = [AveragedForValidation(), sample]
    runner = trainer(KrizhevskyHybridStrategy(), 2, use_distributed_sampler=False, callbacks=callbacks, max_steps=1)
    runner.fit(Validated(), batches(rank, 2, steps=1), batches(0, 2, steps=1))
    return sample.seen


@pytest.mark.ci
def test_after_a_sanity_check_of_averaged_weights_the_head_can_be_called():
    with torch.no_grad():
        expected = Validated()(X)
    for seen in run_processes(2, _sanity_checked):
        torch.testing.assert_close(seen, expected, rtol=1e-12, atol=1e-12)


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


@pytest.mark.ci
def test_weights_that_are_put_in_at_the_start_of_an_epoch_are_validated():
    module = Validated()
    trainer("auto", 1, callbacks=[AveragedForEpoch()]).fit(module, all_batches(2, steps=2), batches(0, 2, steps=2))
    for validated in run_processes(2, _averaged):
        torch.testing.assert_close(validated, module.validated, rtol=1e-9, atol=1e-12)


class SwapsByItself(Validated):
    """A module that keeps averaged weights of its own, and puts them in in its own hook."""

    def on_validation_epoch_start(self) -> None:
        AveragedForValidation.on_validation_start(self, self.trainer, self)

    def on_validation_epoch_end(self) -> None:
        AveragedForValidation.on_validation_end(self, self.trainer, self)


def _validation(num_batches: int) -> DataLoader:
    return DataLoader(Subset(all_batches(1).dataset, range(3 * num_batches)), batch_size=3)


def _swapping(rank: int, evaluation: Any) -> list[Tensor]:
    module = SwapsByItself()
    runner = trainer(KrizhevskyHybridStrategy(evaluation=evaluation), 2, use_distributed_sampler=False)
    more = rank if evaluation == "gathered" else 0  # then ranks need not have equally many batches
    runner.fit(module, batches(rank, 2, steps=2), _validation(2 + more))
    assert "on_validation_epoch_start" not in vars(module)
    return module.validated


@pytest.mark.ci
@pytest.mark.parametrize("evaluation", ["gathered", "sharded"])
def test_weights_that_the_module_itself_puts_in_are_validated(evaluation):
    module = SwapsByItself()
    trainer("auto", 1).fit(module, all_batches(2, steps=2), _validation(2))
    first, second = run_processes(2, _swapping, evaluation)
    torch.testing.assert_close(first, module.validated, rtol=1e-9, atol=1e-12)
    if evaluation == "gathered":
        assert len(second) == len(first) + 1
        second.pop()
    torch.testing.assert_close(second, module.validated, rtol=1e-9, atol=1e-12)


class Imprinted(NamedNet):
    """Takes prototypes of the classes for the rows of its weight: all of them, as plain training has them."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, CLASSES, bias=False).double()
        self.validated: list[Tensor] = []

    def configure_optimizers(self) -> Any:
        self.head.weight.data = torch.linspace(-1, 1, 6 * CLASSES).double().view(CLASSES, 6)
        return super().configure_optimizers()

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 0:
            return
        generator = torch.Generator().manual_seed(self.current_epoch)
        self.head.weight.data = torch.randn(CLASSES, 6, generator=generator, dtype=torch.float64)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 1:
            self.head.weight.data = 0.1 * torch.arange(6.0 * CLASSES).double().view(CLASSES, 6)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.append(self(batch[0]))

    def on_validation_start(self) -> None:
        self.head.weight.data = self.head.weight.new_ones(CLASSES, 6)


def _imprinted(rank: int | None, evaluation: Any = None) -> tuple[Result, list[Tensor]]:
    module = Imprinted()
    strategy = "auto" if rank is None else KrizhevskyHybridStrategy(evaluation=evaluation)
    loader = all_batches(2, steps=3) if rank is None else batches(rank, 2, steps=3)
    runner = trainer(strategy, 1 if rank is None else 2, use_distributed_sampler=False, max_epochs=2)
    runner.fit(module, loader, _validation(2))
    return snapshot(module, runner), module.validated


@pytest.mark.ci
@pytest.mark.parametrize("evaluation", ["gathered", "sharded"])
def test_whole_values_that_are_assigned_to_the_data_of_a_parameter_are_those_of_plain_training(evaluation):
    expected, expected_logits = _imprinted(None)
    for values, logits in run_processes(2, _imprinted, evaluation):
        assert_same(values, expected)
        torch.testing.assert_close(logits, expected_logits, rtol=1e-9, atol=1e-12)


class CopiesItself(pl.Callback):
    """A copy made during fit has the hooks of its class."""

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        copy.deepcopy(pl_module).on_validation_epoch_start()


class Counts(Validated):
    def on_validation_epoch_start(self) -> None:
        self.seen = [*getattr(self, "seen", []), id(self)]


def _copying(rank: int) -> int:
    module = Counts()
    runner = trainer(KrizhevskyHybridStrategy(), 2, use_distributed_sampler=False, callbacks=[CopiesItself()])
    runner.fit(module, batches(rank, 2, steps=2), batches(0, 2, steps=2))
    assert set(module.seen) == {id(module)}
    return len(module.seen)


@pytest.mark.ci
def test_a_copy_gathers_nothing():
    assert run_processes(2, _copying) == [2, 2]


class WritesStateDict(pl.Callback):
    """Changes the weights through the tensors of ``state_dict``, which in plain training are the weights."""

    def __init__(self, place: str) -> None:
        setattr(self, place, self.write)

    def write(self, trainer: Any, module: pl.LightningModule) -> None:
        for value in module.state_dict().values():
            value.mul_(0.5)


def _writing(rank: int) -> None:
    for place in ("on_train_start", "on_validation_start", "on_train_end"):
        callbacks = [WritesStateDict(place)]
        runner = trainer(KrizhevskyHybridStrategy(), 2, use_distributed_sampler=False, callbacks=callbacks)
        with pytest.raises(
            RuntimeError, match=r"state_dict\(\) has returned were changed in place.* use load_state_dict"
        ):
            runner.fit(Validated(), batches(rank, 2, steps=2), batches(0, 2, steps=1))


@pytest.mark.ci
def test_what_is_written_to_the_tensors_of_a_state_dict_is_not_lost_silently():
    run_processes(2, _writing)


HEAD = nn.Linear(32, 128)


def _changed(rank: int, group: Any) -> list[bool]:
    head = ShardedHead(copy.deepcopy(HEAD), Channel(group))
    ShardedParameters(head).shard(CPU)
    gathered = GatheredHead(head)
    found = [gathered.has_same_shard]
    head.parameters[0].data[0, 1] += 1
    return [*found, gathered.has_same_shard]


def test_a_change_of_one_value_is_found():
    assert run_threads(2, _changed) == [[True, False]] * 2


def _not_begun(rank: int, group: Any) -> torch.Tensor:
    head = ShardedHead(nn.Sequential(nn.ELU(inplace=True), nn.Linear(4, 3)), Channel(group))
    ShardedParameters(head).shard(CPU)
    features = -torch.ones(2, 5, 4)
    assert GatheredHead(head).last_layer(features) is None
    return features


def test_a_head_without_a_last_layer_for_a_loss_is_not_begun():
    """The caller runs it from the start: an activation in place would come twice."""
    for features in run_threads(2, _not_begun):
        assert features.eq(-1).all()
