"""`torch.func.functional_call` of a module with a sharded head: other tensors stand in the place of its parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import DataLoader

from lightning_dp import KrizhevskyHybridStrategy
from lightning_dp.losses import sharded_cross_entropy
from tests.ranks import run_processes
from tests.strategies.krizhevsky_hybrid.modules import HybridNet, Result, StepNet, all_batches, batches
from tests.strategies.modules import assert_same, snapshot, trainer

STEPS = 4


class KeepsOld(HybridNet):
    """Learns from the weights with which it began, and validates others than its own."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def on_train_start(self) -> None:
        self.old = {name: value.clone() for name, value in self.state_dict().items()}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        others = {name: 0.9 * value for name, value in self.state_dict().items()}
        self.seen.append(functional_call(self, others, (batch[0],)))


class ComputedNet(KeepsOld):
    """Computes its weights; several calls of the head, and a penalty, share them."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, target = batch
        with torch.no_grad():
            before = functional_call(self, self.old, (x,)).tanh()
        weights = {name: p.sin() for name, p in self.named_parameters()}
        logits = functional_call(self, weights, (x,)) + functional_call(self, weights, (0.5 * x,))
        penalty = sum(weight.square().sum() for weight in weights.values())
        return self.cost(logits, target) + (logits.tanh() - before).square().mean() + 0.01 * penalty


class OfHead(nn.Module):
    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, features: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return self.head(features), sharded_cross_entropy(self.head, features, target)


class OldStepNet(KeepsOld, StepNet):
    """The same in ``head_step``, and a loss by name. There each pass computes the weights by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.of_head = [OfHead(self.head)]  # in a list, or it would be a second name of the head

    def head_step(self, features: Tensor, target: Tensor) -> Tensor:
        (of_head,) = self.of_head
        old = {name: value for name, value in self.old.items() if name.startswith("head.")}
        now = {name: p.sin() for name, p in of_head.named_parameters()}
        before, of_old = functional_call(of_head, old, (features, target))
        logits, of_now = functional_call(of_head, now, (features, target))
        return of_now + 0.1 * of_old + (logits.tanh() - before.tanh()).square().mean()


def fitted(net: type[KeepsOld], strategy: Any, world_size: int, loader: DataLoader) -> Result:
    module = net()
    runner = trainer(strategy, world_size, use_distributed_sampler=False, max_epochs=2)
    runner.fit(module, loader, DataLoader(all_batches(1).dataset, 2))
    return snapshot(module, runner) | {"seen": torch.stack(module.seen)}


def _fitted(rank: int, net: type[KeepsOld], scheme: Any) -> Result:
    return fitted(net, KrizhevskyHybridStrategy(scheme=scheme), 2, batches(rank, 2, steps=STEPS))


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("scheme", ["a", "c"])
@pytest.mark.parametrize("net", [ComputedNet, OldStepNet])
def test_it_equals_one_process(net, scheme):
    expected = fitted(net, "auto", 1, all_batches(2, steps=STEPS))
    for result in run_processes(2, _fitted, net, scheme):
        assert_same(result, expected)


def _of_shards(rank: int) -> str:
    class Shards(HybridNet):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            functional_call(self, {name: p.detach() for name, p in self.named_parameters()}, (batch[0],))

    with pytest.raises(RuntimeError) as error:
        trainer(KrizhevskyHybridStrategy(), 2).fit(Shards(), all_batches(2), DataLoader(all_batches(1).dataset, 2))
    return str(error.value)


def test_in_validation_local_shards_are_no_weights():
    for rank, said in enumerate(run_processes(2, _of_shards)):
        assert f"a layer of 'head' got a tensor of {(4, 3)[rank]} rows, and it has 7" in said
        assert "state_dict()" in said
