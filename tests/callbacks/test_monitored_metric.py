"""Convergence criteria whose metric is not logged in every epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from pytorch_lightning.callbacks import LearningRateFinder, ModelCheckpoint
from torch import Tensor

from lightning_dp.callbacks import AdaptiveGlobalBatchNorm, Plateau
from tests.callbacks.training import STEPS, Net, Probe, fit
from tests.ranks import run_processes

VALUES = (3.0, 2.0, 2.0, 2.0)  # of each validation


class Validating(Net):
    """A network that logs ``val_loss`` from ``VALUES``."""

    def __init__(self) -> None:
        super().__init__()
        self.num_validations = 0

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        if not self.trainer.sanity_checking:
            self.log("val_loss", VALUES[self.num_validations], sync_dist=True)
        return F.cross_entropy(self.net(x), y)

    def on_validation_epoch_end(self) -> None:
        self.num_validations += not self.trainer.sanity_checking


class Asked(pl.Callback):
    """Record of the criterion's state at the end of each epoch."""

    def __init__(self, plateau: Plateau) -> None:
        self.plateau = plateau
        self.states: list[tuple[float | None, int]] = []

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.states.append((self.plateau.best, self.plateau.num_epochs_without_improvement))


def train(rank: int, every_n_epochs: int, sanity_steps: int) -> tuple[list[tuple[float | None, int]], list[bool]]:
    plateau = Plateau("val_loss", patience=2)
    asked, probe = Asked(plateau), Probe()
    fit(
        2,
        AdaptiveGlobalBatchNorm(convergence=plateau),
        asked,
        probe,
        net=Validating(),
        validate=True,
        max_epochs=4 * every_n_epochs,
        check_val_every_n_epoch=every_n_epochs,
        num_sanity_val_steps=sanity_steps,
    )
    return asked.states, probe.is_global[::STEPS]


@pytest.mark.ci
@pytest.mark.parametrize("every_n_epochs", [1, 2, 3])
@pytest.mark.parametrize("sanity_steps", [0, 1])
def test_epochs_without_validation_are_not_counted(every_n_epochs, sanity_steps):
    first, second = run_processes(2, train, every_n_epochs, sanity_steps)
    before = [(None, 0)] * (every_n_epochs - 1)
    after_validation = [(3.0, 0), (2.0, 0), (2.0, 1), (2.0, 2)]
    states = [state for state in after_validation for _ in range(every_n_epochs)]
    assert first[0] == (before + states)[: 4 * every_n_epochs]
    assert second[0] == [(None, 0)] * 4 * every_n_epochs, "rank 0 evaluates the criterion"
    assert first[1] == second[1] == [True] * 4 * every_n_epochs


def train_with_wrong_monitor(rank: int, every_n_epochs: int) -> None:
    options = {"check_val_every_n_epoch": every_n_epochs, "max_epochs": 4, "validate": True}
    asked = Asked(Plateau("val_los"))
    net = Validating()
    with pytest.raises(ValueError, match="monitor='val_los' was not logged; available: "):
        fit(2, asked, AdaptiveGlobalBatchNorm(convergence=asked.plateau), net=net, **options)
    assert net.num_validations == 1
    assert len(asked.states) == every_n_epochs


@pytest.mark.parametrize("every_n_epochs", [1, 3])
def test_a_metric_that_is_missing_after_the_first_validation_is_an_error_on_all_ranks(every_n_epochs):
    run_processes(2, train_with_wrong_monitor, every_n_epochs)


class LoggedOnce(Net):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self.current_epoch == 1:
            self.log("rare", torch.tensor(1.0), on_step=False, on_epoch=True, sync_dist=True)
        return super().training_step(batch, batch_idx)


def train_logged_once(rank: int) -> list[tuple[float | None, int]]:
    asked = Asked(Plateau("rare", patience=1))
    callback = AdaptiveGlobalBatchNorm(convergence=asked.plateau)
    fit(2, callback, asked, net=LoggedOnce(), max_epochs=4, validate=True, check_val_every_n_epoch=4)
    return asked.states


def test_training_metrics_of_earlier_epochs_are_not_counted_again():
    states = run_processes(2, train_logged_once)[0]
    assert states == [(None, 0), (1.0, 0), (1.0, 0), (1.0, 0)]


class LoggedByTheModule(Net):
    """Logs in its own ``on_train_epoch_end``, which Lightning calls after that of the callbacks."""

    def on_train_epoch_end(self) -> None:
        self.log("own", VALUES[self.current_epoch], sync_dist=True)


def train_logged_by_the_module(rank: int, folder: str) -> tuple[Any, ...]:
    plateau, probe = Plateau("own", patience=1), Probe()
    callback = AdaptiveGlobalBatchNorm(convergence=plateau)
    saver = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    fit(2, callback, probe, saver, net=LoggedByTheModule(), max_epochs=4)
    saved = [torch.load(Path(folder, f"epoch={epoch}.ckpt"))["callbacks"][callback.state_key] for epoch in range(4)]
    return (plateau.best, plateau.converged), probe.is_global[::STEPS], [state["converged"] for state in saved]


def test_a_metric_that_the_module_logs_at_the_end_of_the_epoch_is_read(tmp_path):
    (first, is_global, saved), (_, others, _) = run_processes(2, train_logged_by_the_module, str(tmp_path))
    assert first == (2.0, True)
    assert is_global == others == [True, True, True, False]
    assert saved == [False, False, True, True], "a checkpoint has what the criterion said of its epoch"


class SavesFirst(pl.Callback):
    """Saves before the module's own ``on_train_epoch_end``."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.save_checkpoint(self.path, weights_only=False)


def train_and_save_first(rank: int, folder: str, validate: bool) -> tuple[float | None, int]:
    plateau = Plateau("own", patience=9)
    callback = AdaptiveGlobalBatchNorm(convergence=plateau)
    fit(2, callback, SavesFirst(Path(folder, "first.ckpt")), net=LoggedByTheModule(), max_epochs=4, validate=validate)
    return plateau.best, plateau.num_epochs_without_improvement


@pytest.mark.parametrize("validate", [False, True])
def test_a_checkpoint_before_the_module_logs_its_metric_loses_none(tmp_path, validate):
    assert run_processes(2, train_and_save_first, str(tmp_path), validate)[0] == (2.0, 2)


def train_without_the_metric(rank: int) -> None:
    with pytest.raises(ValueError, match="monitor='own' was not logged"):
        fit(2, AdaptiveGlobalBatchNorm(convergence=Plateau("own")), net=Net(), max_epochs=1)


def test_a_metric_that_nobody_logs_in_the_only_epoch_is_an_error():
    run_processes(2, train_without_the_metric)


class Searched(Net):
    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        is_search = not any(isinstance(each, AdaptiveGlobalBatchNorm) for each in self.trainer.callbacks)
        self.log("val_loss", 0.5 if is_search else float(3 - self.current_epoch // 2))


class SearchesInEpoch(LearningRateFinder):
    """At the start of an epoch, as in Lightning's documentation."""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        pass

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch == 0:
            self.lr_find(trainer, pl_module)


@pytest.mark.parametrize("kind", [LearningRateFinder, SearchesInEpoch])
def test_validations_of_a_search_for_the_learning_rate_are_not_counted(tmp_path, kind):
    finder = kind(num_training_steps=3 * STEPS, update_attr=False, early_stop_threshold=None)
    asked = Asked(Plateau("val_loss", patience=9))
    options = {"max_epochs": 4, "validate": True, "check_val_every_n_epoch": 2, "default_root_dir": str(tmp_path)}
    callback = AdaptiveGlobalBatchNorm(convergence=asked.plateau)
    fit(1, finder, callback, asked, net=Searched(), strategy="auto", **options)
    assert asked.states == [(None, 0), (3.0, 0), (3.0, 0), (2.0, 0)]


class LoggedInSomeEpochs(Net):
    def on_train_epoch_end(self) -> None:
        if self.current_epoch % 3 == 0:
            self.log("rare", 1.0, sync_dist=True)


def resume_where_it_is_not_logged(rank: int, folder: str) -> list[tuple[float | None, int]]:
    def counts(max_epochs: int, ckpt_path: Path | None = None) -> tuple[float | None, int]:
        plateau = Plateau("rare", patience=2)
        saver = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, enable_version_counter=False)
        callback = AdaptiveGlobalBatchNorm(convergence=plateau)
        fit(2, callback, saver, net=LoggedInSomeEpochs(), max_epochs=max_epochs, ckpt_path=ckpt_path)
        return plateau.best, plateau.num_epochs_without_improvement

    return [counts(4), counts(4, Path(folder, "epoch=0.ckpt"))]


@pytest.mark.ci
def test_a_run_is_resumed_in_an_epoch_without_the_metric(tmp_path):
    assert run_processes(2, resume_where_it_is_not_logged, str(tmp_path))[0] == [(1.0, 1), (1.0, 1)]
