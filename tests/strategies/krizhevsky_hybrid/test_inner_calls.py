"""A layer within the head holds rows during fit, so a call of it alone is refused, and the head itself works."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from lightning_dp import KrizhevskyHybridStrategy
from tests.ranks import run_processes
from tests.strategies.krizhevsky_hybrid.modules import HybridNet, StepNet, batches
from tests.strategies.modules import CLASSES, FEATURES, trainer

X = torch.randn(4, FEATURES, dtype=torch.float64, generator=torch.Generator().manual_seed(9))


class InnerPenalty(HybridNet):
    """A penalty on hidden activations."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + 0.1 * self.head[1](self.trunk(batch[0])).square().mean()


class InnerStep(StepNet):
    """The same, within head_step."""

    def head_step(self, features: Tensor, target: Tensor) -> Tensor:
        return super().head_step(features, target) + 0.1 * self.head[1](features).square().mean()


class ByLayers(HybridNet):
    """Calls the layers one by one, nested ones together, and the last one alone."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.trunk(x)
        for layer in self.head:
            x = layer(x)
        return x


class Validated(StepNet):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self(batch[0])


class InValidation(StepNet):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.head[3](torch.zeros(2, 7, dtype=torch.float64))


REFUSED = {
    InnerPenalty: "'head.1' was called by itself on rank",
    InnerStep: "'head.1' was called by itself on rank",
    ByLayers: "'head.1' was called by itself on rank",
    InValidation: "'head.3.1' was called by itself on rank",
}


def fit(module: HybridNet, rank: int, world_size: int, head: str = "head", **options: Any) -> None:
    own = trainer(KrizhevskyHybridStrategy(head), world_size, use_distributed_sampler=False, **options)
    # Lightning warns of a loader without a validation_step.
    has_validation = isinstance(module, (Validated, InValidation))
    own.fit(module, batches(rank, world_size, 2), batches(rank, world_size, 1) if has_validation else None)


def _refused(rank: int) -> list[str]:
    said = []
    for net in REFUSED:
        module = net()
        with pytest.raises(RuntimeError) as error:
            fit(module, rank, 2)
        said.append(str(error.value))
        # After an exception the head holds a part, also of hidden layers, with which somebody may compute features.
        for layers in (module.head, module.head[:2]):
            with pytest.raises(RuntimeError, match="'head' holds only one rank's local shard"):
                layers(torch.zeros(2, 6, dtype=torch.float64))
    return said


@pytest.mark.ci
def test_a_call_of_an_inner_layer_is_refused_by_name():
    for said in run_processes(2, _refused):
        for text, message in zip(said, REFUSED.values(), strict=True):
            assert message in text
            assert f"head={message.split()[0]}" in text


class Uses(pl.Callback):
    """Calls the gathered head, and whole copies of it, on one rank alone. A copy of a layer that has rows raises."""

    def on_validation_end(self, trainer: Any, module: HybridNet) -> None:
        if trainer.global_rank == 1:
            with_gradient = module(X)
            duplicate = copy.deepcopy(module)
            assert [name for name, layer in duplicate.head.named_modules() if "forward" in vars(layer)] == []
            torch.testing.assert_close(duplicate(X), with_gradient, rtol=0, atol=0)
            features = module.trunk(X)
            assert duplicate.head[1](features).shape == (4, 7)
            with torch.no_grad():
                torch.testing.assert_close(module(X), with_gradient, rtol=0, atol=0)
            with pytest.raises(RuntimeError, match=r"head\.1.* was called by itself"):
                copy.deepcopy(module.head[1])(features)
            with pytest.raises(RuntimeError, match=r"head\.1.* was called by itself"):
                module.head[1](features)


class BareHead(HybridNet):
    """The head is its only layer."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, CLASSES).double()


def _works(rank: int) -> None:
    module = Validated()
    fit(module, rank, 2, callbacks=[Uses()])
    assert [name for name, layer in module.head.named_modules() if "forward" in vars(layer)] == []
    assert module.head[1](module.trunk(X)).shape == (4, 7)  # after fit the layers are ordinary again
    fit(BareHead(), rank, 2)
    fit(ByLayers(), rank, 2, head="head.4")  # the remedy


@pytest.mark.ci
def test_the_head_and_its_copies_work():
    run_processes(2, _works)


def _alone(rank: int) -> None:
    fit(InnerPenalty(), rank, 1)


def test_one_rank_has_the_whole_layer():
    run_processes(1, _alone)
