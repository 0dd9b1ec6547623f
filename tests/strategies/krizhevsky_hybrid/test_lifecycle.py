"""What a user does with one Trainer and module over a working day: the same as in one process."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_dp import KrizhevskyHybridStrategy
from tests.ranks import run_processes
from tests.strategies.krizhevsky_hybrid.modules import Result, ScheduledNet, all_batches, batches
from tests.strategies.modules import assert_same, snapshot, trainer

STEPS = 5


class Day(ScheduledNet):
    """Is evaluated in each way."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("value", self.cost(self(batch[0]), batch[1]))

    test_step = validation_step


def prefixed(prefix: str, values: Result) -> Result:
    return {f"{prefix} {name}": value for name, value in values.items()}


def live(make: Callable[[], Any], world_size: int, loader: DataLoader, folder: str) -> Result:
    """Validate, fit, predict, fit again, test; then resume from the middle of the epoch, and train a pickled copy."""
    common = batches(0, 2, steps=2)
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    options = {"use_distributed_sampler": False}
    module = Day()
    day = trainer(make(), world_size, callbacks=[saver], enable_checkpointing=True, val_check_interval=2, **options)
    seen = [day.validate(module, common, verbose=False)[0]["value"]]
    day.fit(module, loader, common)
    found = prefixed("first", snapshot(module, day))
    predicted = torch.cat(day.predict(module, common))
    copied = pickle.loads(pickle.dumps(copy.deepcopy(module)))  # noqa: S301
    day.fit_loop.max_epochs = 2
    day.fit(module, loader, common)
    found |= prefixed("again", snapshot(module, day))
    seen += [day.test(module, common, verbose=False)[0]["value"], day.callback_metrics["value"].item()]

    resumed = Day()
    day = trainer(make(), world_size, max_epochs=2, **options)
    day.fit(resumed, loader, ckpt_path=Path(folder, "step=3.ckpt"))
    found |= prefixed("resumed", snapshot(resumed, day))
    day = trainer(make(), world_size, **options)
    day.fit(copied, loader)
    found |= prefixed("copied", snapshot(copied, day))
    return found | {"predicted": predicted, "seen": torch.tensor(seen, dtype=torch.float64)}


def _live(rank: int, folder: str) -> dict[str, Tensor]:
    return live(lambda: KrizhevskyHybridStrategy(scheme="c"), 2, batches(rank, 2, steps=STEPS), folder)


class KeepsGraphs(ScheduledNet):
    """Keeps the loss of the last step with its graph, as a module that plots it may do."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.kept = super().training_step(batch, batch_idx)
        return self.kept


def backward_before_and_after(strategy: Any, world_size: int, loader: DataLoader) -> Result:
    """Call the module by hand, before `fit` and after it, while the graphs of earlier calls are alive."""
    module, x = KeepsGraphs(), all_batches(2).dataset[:4][0]
    before = module(x).square().sum()
    trainer(strategy, world_size, use_distributed_sampler=False).fit(module, loader)
    module.zero_grad()
    module(x).square().sum().backward()
    assert before.requires_grad
    return {name: p.grad for name, p in module.named_parameters()}


def _backward(rank: int) -> Result:
    return backward_before_and_after(KrizhevskyHybridStrategy(), 2, batches(rank, 2))


@pytest.mark.ci
def test_backward_of_the_whole_module_after_fit():
    expected = backward_before_and_after("auto", 1, all_batches(2))
    for result in run_processes(2, _backward):
        assert_same(result, expected, 1e-9)


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore")
def test_a_day_equals_one_process(tmp_path):
    expected = live(lambda: "auto", 1, all_batches(2, steps=STEPS), str(tmp_path / "one"))
    for result in run_processes(2, _live, str(tmp_path / "two")):
        assert_same(result, expected, 1e-9)
