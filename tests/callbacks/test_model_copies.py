"""Running statistics of the copies of a model that other callbacks hold, after steps with local statistics."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import (
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from lightning_dp.callbacks import AdaptiveGlobalBatchNorm
from lightning_dp.callbacks.adaptive_global_batch_norm import model_copies
from tests.callbacks.training import Net, assert_same, fit, state_of
from tests.ranks import logged, run_processes


class Validated(pl.Callback):
    """The state with which each validation runs."""

    def __init__(self) -> None:
        self.states: list[dict[str, Tensor]] = []

    def on_validation_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        self.states.append(state_of(pl_module))


class OwnAverage(pl.Callback):
    """As in a user's code: averages from the beginning of training, and copies the result at its end."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.average = copy.deepcopy(pl_module)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        for own, other in zip(self.average.state_dict().values(), pl_module.state_dict().values(), strict=True):
            own.lerp_(other, 0.3) if own.is_floating_point() else own.copy_(other)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        pl_module.load_state_dict(self.average.state_dict())


class AverageOfPart(OwnAverage):
    """The same of the network alone, within a module of its own."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.average = nn.ModuleDict({"net": copy.deepcopy(pl_module.net)})


AVERAGING = {
    "WeightAveraging": WeightAveraging,
    "EMAWeightAveraging": lambda: EMAWeightAveraging(decay=0.7),
    "StochasticWeightAveraging": lambda: StochasticWeightAveraging(0.1, swa_epoch_start=1),
    "the user's": OwnAverage,
    "the user's, of a part": AverageOfPart,
}


def train(rank: int, name: str, averaging_first: bool, folder: str, max_steps: int) -> dict[str, Any]:
    validated = Validated()
    callbacks = [AVERAGING[name](), AdaptiveGlobalBatchNorm(max_batch_size=1)]  # local in every step
    if not averaging_first:
        callbacks.reverse()
    save = ModelCheckpoint(folder, every_n_train_steps=3, save_on_train_epoch_end=False, save_top_k=-1)
    options = {"max_epochs": 2, "max_steps": max_steps, "gradient_clip_val": 1.0, "validate": True}
    net, _ = fit(2, *callbacks, validated, save, **options)
    return {"validated": validated.states, "final": state_of(net)}


@pytest.mark.parametrize("max_steps", [-1, 6])  # the second ends within an epoch
@pytest.mark.parametrize("averaging_first", [True, False])
@pytest.mark.parametrize("name", AVERAGING)
def test_all_ranks_validate_and_end_with_the_same_averaged_model(name, averaging_first, max_steps, tmp_path):
    if name == "StochasticWeightAveraging" and max_steps > 0:
        pytest.skip("it updates batch norm in an additional epoch, which max_steps would cut off")
    first, second = run_processes(2, train, name, averaging_first, str(tmp_path), max_steps)
    assert_same(first["final"], second["final"])
    assert len(first["validated"]) > 0
    for ours, theirs in zip(first["validated"], second["validated"], strict=True):
        assert_same(ours, theirs)


def held_by(*values: Any) -> list[pl.Callback]:
    callbacks = [pl.Callback() for _ in values]
    for callback, value in zip(callbacks, values, strict=True):
        callback.held = value
    return callbacks


def test_copies_are_found_once_and_other_modules_are_not():
    net, copied, other = Net(), Net(), Net()
    other.net[1] = nn.BatchNorm1d(7)
    average = AveragedModel(net)
    callbacks = held_by(net, copied, average, copied, other, net.net, nn.Linear(2, 2), None)
    assert model_copies(callbacks, net) == [copied, average.module]


class OnRankZero(OwnAverage):
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero:
            super().on_train_start(trainer, pl_module)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        if trainer.is_global_zero:
            super().on_train_batch_end(trainer, pl_module, *args)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        pass


def train_with_copy_on_rank_0(rank: int) -> tuple[dict[str, Tensor], list[str]]:
    with logged() as messages:
        net, _ = fit(2, AdaptiveGlobalBatchNorm(max_batch_size=1), OnRankZero())
    return state_of(net), [message for message in messages if "copies" in message]


def test_a_copy_on_some_ranks_only_is_left_out_with_a_warning():
    first, second = run_processes(2, train_with_copy_on_rank_0)
    assert_same(first[0], second[0])
    assert "hold [1, 0] copies of the model" in first[1][0]
    assert second[1] == []


@pytest.mark.ci
def test_the_average_is_that_of_the_ranks(tmp_path):
    """The validated average has the mean of the running statistics that each rank's own average would have."""
    averaged = run_processes(2, train, "EMAWeightAveraging", False, str(tmp_path), 4)[0]["validated"][0]
    own = run_processes(2, average_by_hand, str(tmp_path / "own"))
    for name in ("net.1.running_mean", "net.4.running_var"):
        expected = (own[0][name] + own[1][name]) / 2
        assert not torch.allclose(own[0][name], own[1][name])
        torch.testing.assert_close(averaged[name], expected, rtol=1e-10, atol=1e-10)


def average_by_hand(rank: int, folder: str) -> dict[str, Tensor]:
    """A moving average of the buffers that no callback holds as a module, so that it stays that of the rank."""

    class Buffers(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
            current = {name: buffer.clone() for name, buffer in pl_module.named_buffers()}
            if trainer.global_step == 1:
                self.average = current  # AveragedModel copies the first one
            else:
                self.average = {name: 0.7 * self.average[name] + 0.3 * current[name] for name in current}

    buffers = Buffers()
    fit(2, AdaptiveGlobalBatchNorm(max_batch_size=1), buffers, max_steps=4, gradient_clip_val=1.0)
    return buffers.average
