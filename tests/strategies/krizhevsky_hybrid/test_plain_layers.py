"""Layers of the head that are not what their class says, from the start or after set-up. Once ignored silently."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

from lightning_dp import KrizhevskyHybridStrategy
from lightning_dp.strategies.base import overlapping_parameters
from lightning_dp.strategies.krizhevsky_hybrid.head import divisible_layers
from tests.ranks import run_processes
from tests.strategies.krizhevsky_hybrid.modules import HybridNet, batches
from tests.strategies.krizhevsky_hybrid.test_policy import check
from tests.strategies.modules import CLASSES, trainer


def triple(x: Tensor) -> Tensor:
    return 3 * x


@pytest.mark.parametrize("path", ["head", "head.1", "head.2", "head.3", "head.3.1"])
def test_a_forward_that_is_set_on_an_instance(path):
    module = HybridNet()
    module.get_submodule(path).forward = triple
    with pytest.raises(ValueError, match=rf"{path} has a forward that was set on the instance.*del .*{path}\.forward"):
        check(module)


def test_a_forward_that_is_set_on_a_head_of_one_layer():
    layer = nn.Linear(3, 4)
    layer.forward = triple
    with pytest.raises(ValueError, match="head has a forward that was set on the instance"):
        divisible_layers(layer, "head")


def with_parameter(layer: nn.Linear) -> None:
    layer.temperature = nn.Parameter(torch.full((1,), 2.0))


def with_child(layer: nn.Linear) -> None:
    layer.adapter = nn.Linear(2, 2)


def with_buffer_as_bias(layer: nn.Linear) -> None:
    del layer.bias
    layer.register_buffer("bias", torch.zeros(4))


def with_small_bias(layer: nn.Linear) -> None:
    layer.bias = nn.Parameter(torch.zeros(1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_parameter, r"head\.0 has a parameter 'temperature', and .* holds a shard of weight and bias only"),
        (with_child, r"head\.0 has a parameter 'adapter\.weight'"),
        (with_buffer_as_bias, r"head\.0 computes its bias"),
        (with_small_bias, r"head\.0\.bias is \(1,\), and not \(4,\)"),
        (lambda layer: prune.l1_unstructured(layer, "bias", 0.25), r"head\.0 computes its bias .*prune\.remove"),
        (lambda layer: prune.l1_unstructured(layer, "weight", 0.25), r"head\.0 computes its weight"),
    ],
)
def test_a_linear_layer_with_other_parameters_than_its_own(change, message):
    head = nn.Sequential(nn.Linear(3, 4))
    change(head[0])
    with pytest.raises(ValueError, match=message):
        divisible_layers(head, "head")


def tied(first: str, second: str) -> HybridNet:
    module = HybridNet()
    module.trunk[0], module.spare = nn.Linear(3, 7), nn.Linear(3, 7)
    module.get_parameter(second).data = module.get_parameter(first).data
    return module


@pytest.mark.parametrize(
    ("first", "second"),
    [("trunk.0.bias", "head.1.bias"), ("head.1.bias", "spare.bias"), ("head.3.1.bias", "head.3.1.weight")],
)
def test_memory_that_the_head_shares(first, second):
    module = tied(first, second) if "3.1" not in first else HybridNet()
    if "3.1" in first:
        module.head[3][1].bias.data = module.head[3][1].weight.data[:, 0].as_strided((5,), (1,))
    with pytest.raises(ValueError, match=r"(head|trunk|spare)\..* and (head|trunk|spare)\..* share memory.*untie them"):
        check(module)


def test_memory_that_the_trunk_shares_within_itself():
    check(tied("trunk.0.bias", "spare.bias"))


def test_one_parameter_in_two_layers_of_the_head():
    module = HybridNet()
    module.head = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    module.head[2].weight = module.head[0].weight
    check(module)


def test_all_that_overlap_are_found():
    module, flat = nn.Module(), torch.zeros(10)
    for name, (begin, end) in {"all": (0, 10), "left": (0, 4), "middle": (3, 6), "right": (6, 10)}.items():
        module.register_parameter(name, nn.Parameter(flat[begin:end]))
    pairs = {frozenset(pair) for pair in overlapping_parameters(module)}
    assert pairs == {frozenset(pair.split()) for pair in ("all left", "all middle", "all right", "left middle")}


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


class OneLayer(HybridNet):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, CLASSES).double()


def replace_head(module: pl.LightningModule) -> None:
    module.head = nn.Linear(6, CLASSES).double()


def replace_weight(module: pl.LightningModule) -> None:
    module.head[1].weight = nn.Parameter(module.head[1].weight.detach().clone())


def prune_head(module: pl.LightningModule) -> None:
    prune.l1_unstructured(module.head, "weight", 0.25)


def parametrize_head(module: pl.LightningModule) -> None:
    parametrize.register_parametrization(module.head, "weight", Doubled())


def replace_activation(module: pl.LightningModule) -> None:
    module.head[2] = nn.ReLU()


def append_activation(module: pl.LightningModule) -> None:
    module.head.append(nn.Tanh())


def wrap_head(module: pl.LightningModule) -> None:
    module.head = nn.Sequential(module.head, nn.Tanh())


CHANGES: dict[Callable[[Any], None], type[HybridNet]] = {
    replace_head: OneLayer,
    replace_activation: HybridNet,
    append_activation: HybridNet,
    wrap_head: HybridNet,
    replace_weight: HybridNet,
    prune_head: OneLayer,
    parametrize_head: OneLayer,
}


class InSecondEpoch(pl.Callback):
    def __init__(self, change: Callable[[Any], None]) -> None:
        self.change = change

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch == 1:
            self.change(pl_module)


def _changed(rank: int) -> dict[str, str]:
    said = {}
    for change, net in CHANGES.items():
        runner = trainer(KrizhevskyHybridStrategy(), 2, max_epochs=2, callbacks=[InSecondEpoch(change)])
        with pytest.raises(RuntimeError) as error:
            runner.fit(net(), batches(rank, 2, steps=1))
        said[change.__name__] = str(error.value)
    return said


@pytest.mark.ci
def test_new_parameters_and_layers_of_the_head_after_set_up():
    for said in run_processes(2, _changed):
        for change in CHANGES:
            assert said[change.__name__].startswith("head was changed after set-up"), said[change.__name__]


def _fit_twice(rank: int) -> None:
    module = HybridNet()
    for _ in range(2):
        trainer(KrizhevskyHybridStrategy(), 2, max_epochs=2).fit(module, batches(rank, 2, steps=2))
    check(module)


@pytest.mark.ci
def test_a_second_fit():
    run_processes(2, _fit_twice)
