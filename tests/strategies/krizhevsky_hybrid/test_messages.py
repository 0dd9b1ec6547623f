"""Mistakes that end with an error in any case: it names what is wrong and what to do, and nothing else misleads."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

from lightning_dp import KrizhevskyHybridStrategy
from tests.ranks import run_processes
from tests.strategies.krizhevsky_hybrid.modules import HybridNet, StepNet, batches, fit_with
from tests.strategies.krizhevsky_hybrid.test_misuse import DataOnSelf, TargetInGraph, logged
from tests.strategies.modules import CLASSES


class TupleOfFeatures(StepNet):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.head_step((self.trunk(batch[0]), batch[0]), batch[1])


class Swapped(StepNet):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.head_step(batch[1], self.trunk(batch[0]))


class TupleForHead(HybridNet):
    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.trunk(x), x))


class LayersBehind(StepNet):
    """The head is one layer, and batch norm follows it."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7), nn.Linear(7, CLASSES)).double()


class SlightlyOwnData(DataOnSelf):
    """Changes the loss by less than a thousandth."""

    def head_step(self, features: Tensor, target: Tensor) -> Tensor:
        return StepNet.head_step(self, features, target) * (1 + 1e-5 * self.weights[0])


class CountsLater(StepNet):
    """Begins to count in the second step."""

    def __init__(self) -> None:
        super().__init__()
        self.total = torchmetrics.SumMetric()

    def head_step(self, features: Tensor, target: Tensor) -> Tensor:
        if self.trainer.global_step:
            self.total.update(len(target))
        return super().head_step(features, target)


class Concatenates(StepNet):
    def __init__(self) -> None:
        super().__init__()
        self.targets = torchmetrics.CatMetric()

    def head_step(self, features: Tensor, target: Tensor) -> Tensor:
        self.targets.update(target)
        return super().head_step(features, target)


REFUSED: list[tuple[type[HybridNet], dict[str, Any], str]] = [
    (TupleOfFeatures, {}, "head_step's first argument, 'features', is a tuple; it must be the features"),
    (Swapped, {}, "first argument, 'features', is a tensor of torch.int64 with shape (3,); it must be the features"),
    (TupleForHead, {}, "the argument of 'head' is a tuple"),
    (TargetInGraph, {}, "argument 'target' requires a gradient"),
    (LayersBehind, {"head": "head.0"}, "If it belongs to a layer behind the head, do without head_step"),
    (SlightlyOwnData, {}, "different losses on the ranks for the same samples"),
    (CountsLater, {}, "the SumMetric total is updated within head_step"),
    (Concatenates, {}, "the CatMetric targets is updated within head_step"),
]


def _refused(rank: int) -> list[tuple[str, list[str]]]:
    results = []
    for net, arguments, _ in REFUSED:
        with logged() as said, pytest.raises(ValueError) as error:  # noqa: PT011  the caller looks at what it says
            fit_with(batches(rank, 2), KrizhevskyHybridStrategy(**arguments), 2, net, {})
        results.append((str(error.value), said))
    return results


def test_what_is_wrong_and_what_to_do():
    for results in run_processes(2, _refused):
        for (text, said), (_, _, message) in zip(results, REFUSED, strict=True):
            assert message in text
            # A hint at another cause would lead away from this one.
            assert not any("It may read the weights" in line for line in said)


class LayersBehindInTrainingStep(LayersBehind):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return HybridNet.training_step(self, batch, batch_idx)


class TwoClasses(HybridNet):
    """As many outputs as ranks: each rank holds one row, which torch broadcasts to any shape of the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.Linear(6, CLASSES), nn.Tanh(), nn.Linear(CLASSES, 2)).double()

    def cost(self, logits: Tensor, target: Tensor) -> Tensor:
        return super().cost(logits, target.clamp(max=1))


def _runs(rank: int) -> list[list[str]]:
    results = []
    for net, head in ((LayersBehindInTrainingStep, "head.0"), (TwoClasses, "head")):
        with logged() as said:
            fit_with(batches(rank, 2, steps=2), KrizhevskyHybridStrategy(head=head), 2, net, {})
        results.append(said)
    return results


def test_single_rows_come_with_a_warning_and_the_remedy_for_layers_behind_the_head_works():
    (behind, two), (_, on_other) = run_processes(2, _runs)
    assert not behind
    assert any("head.2 has as many outputs as there are ranks" in line for line in two)
    assert not on_other


class AveragedModel(pl.Callback):
    """Averages weights with torch's own class, whose copy of the module is whole."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.average = torch.optim.swa_utils.AveragedModel(pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.average.update_parameters(pl_module)


def _averaging(rank: int) -> list[str]:
    with logged() as said, pytest.raises(RuntimeError, match="size of tensor"):
        fit_with(batches(rank, 2), KrizhevskyHybridStrategy(), 2, StepNet, {"callbacks": [AveragedModel()]})
    return said


def test_an_average_of_rows_with_a_whole_copy_comes_with_a_hint():
    for rank, said in enumerate(run_processes(2, _averaging)):
        assert any(f"rank {rank} holds only its rows" in line and "torch's AveragedModel" in line for line in said)


def _unequal(rank: int, shorter: int) -> str:
    loader = batches(rank, 2, steps=4)
    if rank == shorter:
        loader = DataLoader(Subset(loader.dataset, range(6)), batch_size=3)
    strategy = KrizhevskyHybridStrategy(timeout=timedelta(minutes=10))
    with pytest.raises(RuntimeError) as error:
        fit_with(loader, strategy, 2, StepNet, {})
    return str(error.value)


@pytest.mark.parametrize("shorter", [0, 1])
def test_ranks_with_different_numbers_of_batches_are_told_so_at_once(shorter):
    # Long before the strategy's timeout. Where one rank raises first, the other may find it gone.
    said = run_processes(2, _unequal, shorter)
    assert any("Ranks whose loaders have different numbers of batches do so, too" in text for text in said)


def test_tensors_of_features_are_recognized():
    from lightning_dp.strategies.krizhevsky_hybrid.passes import require_features

    require_features(torch.zeros(0, 3), "it")
    require_features(torch.zeros(2, 3, dtype=torch.bfloat16), "it")
    with pytest.raises(ValueError, match="it is a float; it must be the features"):
        require_features(1.0, "it")
