"""Every strategy with every callback: two steps with DDP's result where the docs allow it, otherwise the error."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from lightning_fabric.utilities.warnings import PossibleUserWarning
from pytorch_lightning.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from pytorch_lightning.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp import (
    AdaptiveGlobalBatchNorm,
    KrizhevskyHybridStrategy,
    LayeredSGDStrategy,
    Memonger,
    RanksAgree,
    StepTimer,
)
from tests.ranks import run_processes

pytestmark = pytest.mark.ci

STRATEGIES: dict[str, Callable[[], Any]] = {
    "ddp": DDPStrategy,
    "layered_sgd, one group": LayeredSGDStrategy,
    "layered_sgd, overlap=step": lambda: LayeredSGDStrategy(1),
    "layered_sgd, overlap=load": lambda: LayeredSGDStrategy(1, overlap="load"),
    "layered_sgd, sharded": lambda: LayeredSGDStrategy(1, communicator="sharded"),
    "layered_sgd, ring": lambda: LayeredSGDStrategy(1, all_reduce="ring"),
    "hybrid, scheme=a": KrizhevskyHybridStrategy,
    "hybrid, scheme=b": lambda: KrizhevskyHybridStrategy(scheme="b"),
    "hybrid, scheme=c": lambda: KrizhevskyHybridStrategy(scheme="c"),
    "hybrid, variable_batch": lambda: KrizhevskyHybridStrategy(scheme="c", variable_batch=True),
}
CALLBACKS: dict[str, Callable[[], list[Any]]] = {
    "none": list,
    "agbn": lambda: [AdaptiveGlobalBatchNorm()],
    "agbn, local": lambda: [AdaptiveGlobalBatchNorm(max_batch_size=2)],
    "memonger": lambda: [Memonger()],
    "ranks_agree": lambda: [RanksAgree(every_n_steps=1)],
    "step_timer": lambda: [StepTimer()],
    "ema": lambda: [EMAWeightAveraging(decay=0.9)],
    "swa": lambda: [StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1, device=None)],
    "all": lambda: [AdaptiveGlobalBatchNorm(), Memonger(), RanksAgree(every_n_steps=1), StepTimer()],
}
# docs/methods/krizhevsky_hybrid.md: callbacks that copy parameters raise an error.
REFUSED = {
    (strategy, callback): "keeps copies of the parameters, and each rank holds only a part of the head's"
    for strategy in STRATEGIES
    for callback in ("ema", "swa")
    if strategy.startswith("hybrid")
}
# The head's parameters change between the passes, so they cannot be recomputed from.
CHANGED_TOO_EARLY = "updates the head within the training step"
REFUSED |= {("hybrid, variable_batch", callback): CHANGED_TOO_EARLY for callback in ("memonger", "all")}
ANOTHER_RESULT = {"hybrid, variable_batch"}  # it updates the head several times in a step


class Net(pl.LightningModule):
    """A trunk with batch norm and a head of two linear layers, in float64."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.trunk = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
        self.head = nn.Sequential(nn.Linear(16, 6), nn.ReLU(), nn.Linear(6, 4))
        self.double()

    def head_step(self, features: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.head(features), target)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, target = batch
        return self.head_step(self.trunk(x), target)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9)


def fit(strategy: str, callbacks: str) -> dict[str, Tensor] | str:
    """Train two steps. Return the weights, or the message of the error."""
    generator = torch.Generator().manual_seed(3)
    images = torch.randn(16, 2, 4, 4, dtype=torch.float64, generator=generator)
    data = DataLoader(TensorDataset(images, torch.randint(4, (16,), generator=generator)), batch_size=4)
    net = Net()
    try:
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=2,
            max_epochs=1 if callbacks != "swa" else 2,
            limit_train_batches=2 if callbacks != "swa" else 1,
            strategy=STRATEGIES[strategy](),
            callbacks=CALLBACKS[callbacks](),
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(net, data)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    expected = 2 if callbacks != "swa" else 3  # it adds an epoch for batch norm
    if trainer.global_step != expected:
        return f"{trainer.global_step} steps"
    return {name: value.detach().clone() for name, value in net.state_dict().items()}


def fit_all(rank: int) -> dict[tuple[str, str], dict[str, Tensor] | str]:
    warnings.simplefilter("ignore", PossibleUserWarning)
    warnings.simplefilter("ignore", UserWarning)  # a running average of one layer has no momentum, and the like
    return {(strategy, callback): fit(strategy, callback) for strategy in STRATEGIES for callback in CALLBACKS}


@pytest.fixture(scope="module")
def results():
    """What rank 0 found, for each combination."""
    return run_processes(2, fit_all)[0]


@pytest.mark.parametrize("callback", CALLBACKS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_combination_runs_or_is_refused(strategy, callback, results):
    found = results[strategy, callback]
    if (strategy, callback) in REFUSED:
        assert REFUSED[strategy, callback] in found
        return
    assert not isinstance(found, str), found
    reference = results["ddp", callback]
    assert found.keys() == reference.keys()
    if strategy not in ANOTHER_RESULT:
        for name, value in reference.items():
            torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


def test_the_callbacks_make_a_difference(results):
    """Otherwise the comparison with DDP would show nothing about them."""
    plain = results["ddp", "none"]
    for callback in ("agbn", "swa"):
        changed = results["ddp", callback]
        assert any(not torch.equal(value, plain[name]) for name, value in changed.items()), callback
