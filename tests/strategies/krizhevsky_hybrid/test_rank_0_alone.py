"""What a checkpoint would hold of rank 0 alone is warned of: rows that nobody gathers."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import pytorch_lightning as pl
import torch

from lightning_dp import KrizhevskyHybridStrategy
from tests.ranks import run_processes
from tests.strategies.krizhevsky_hybrid.modules import StepNet, batches
from tests.strategies.krizhevsky_hybrid.test_checkpoint import _saving
from tests.strategies.modules import trainer


class AverageOfWeights(pl.Callback):
    """An exponential moving average as users write it, with a count that has the shape of nothing else."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.average = {name: p.detach().clone() for name, p in pl_module.named_parameters()}

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        for name, p in pl_module.named_parameters():
            self.average[name].lerp_(p.detach(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average, "seen": [torch.zeros(3, 1, 1)]}


def _save_an_average(rank: int, world_size: int, folder: str) -> list[str]:
    options = _saving(folder)
    options["callbacks"].append(AverageOfWeights())
    runner = trainer(KrizhevskyHybridStrategy(), world_size, max_epochs=1, use_distributed_sampler=False, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        runner.fit(StepNet(), batches(rank, world_size, steps=2))
    return sorted({str(each.message) for each in caught if "rows" in str(each.message)})


def test_rows_that_a_callback_saves_are_named(tmp_path):
    """Only rank 0's would be in the checkpoint, and nobody would see it before the average is used."""
    of_rank_0, of_rank_1 = run_processes(2, _save_an_average, 2, str(tmp_path))
    weights = [name for name, p in StepNet().head.named_parameters() if p.ndim > 1]
    assert len(of_rank_0) == len(weights)
    for name in weights:
        assert any(f"['average']['head.{name}'] has the shape" in text for text in of_rank_0), of_rank_0
    assert not of_rank_1


class ScaledByRow(torch.optim.SGD):
    """An elementwise step with a state of another shape, as 8-bit optimizers have."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["scales"] = p.detach().abs().reshape(len(p), -1).amax(1) if p.ndim > 1 else p.abs().amax()
        return super().step(closure)


class ScaledNet(StepNet):
    def configure_optimizers(self) -> Any:
        return ScaledByRow(self.parameters(), lr=0.1)


def _save_scales(rank: int, world_size: int, folder: str, state_dict_type: Any) -> list[str]:
    strategy = KrizhevskyHybridStrategy(state_dict_type=state_dict_type)
    runner = trainer(strategy, world_size, max_epochs=1, use_distributed_sampler=False, **_saving(folder))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        runner.fit(ScaledNet(), batches(rank, world_size, steps=2))
    return sorted({str(each.message) for each in caught if "'scales'" in str(each.message)})


@pytest.mark.parametrize("state_dict_type", ["full", "sharded"])
def test_optimizer_states_that_cannot_be_gathered_are_named(state_dict_type, tmp_path):
    of_rank_0, of_rank_1 = run_processes(2, _save_scales, 2, str(tmp_path), state_dict_type)
    expected = "keeps 'scales' of shape (4,) for this rank's rows of the head, of shape (4, 6)"
    assert any(expected in text for text in of_rank_0), of_rank_0
    assert len(of_rank_0) == sum(p.ndim > 1 for p in StepNet().head.parameters())
    assert not of_rank_1
