"""Mistakes that end with an error in any case: it names what is wrong and what to do, and nothing else misleads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from torch import Tensor, nn

from lightning_dp import KrizhevskyHybridStrategy
from tests.ranks import run_processes
from tests.strategies.krizhevsky_hybrid.modules import HybridNet, StepNet, batches, fit_with
from tests.strategies.krizhevsky_hybrid.test_misuse import DataOnSelf, TargetInGraph
from tests.strategies.modules import CLASSES


class TupleOfFeatures(StepNet):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.head_step((self.trunk(batch[0]), batch[0]), batch[1])


class Swapped(StepNet):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.head_step(batch[1], self.trunk(batch[0]))


class NoArguments(StepNet):
    def head_step(self) -> Tensor:
        return self.cost(self.head(self.features), self.target)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.features, self.target = self.trunk(batch[0]), batch[1]
        return self.head_step()


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


class NormalizedOwnData(SlightlyOwnData):
    """Its loss does not depend on the length of the features."""

    def head_step(self, features: Tensor, target: Tensor) -> Tensor:
        return super().head_step(F.normalize(features), target)


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


class InList(StepNet):
    """Keeps its metric where torch does not look for modules."""

    def __init__(self) -> None:
        super().__init__()
        self.totals = [{"all": torchmetrics.SumMetric()}]

    def head_step(self, features: Tensor, target: Tensor) -> Tensor:
        self.totals[0]["all"].update(len(target))
        return super().head_step(features, target)


REFUSED: list[tuple[type[HybridNet], dict[str, Any], str]] = [
    (TupleOfFeatures, {}, "head_step's first argument, 'features', is a tuple; it must be the features"),
    (Swapped, {}, "first argument, 'features', is a tensor of torch.int64 with shape (3,); it must be the features"),
    (NoArguments, {}, "head_step's first argument, 'features', is a NoneType; it must be the features"),
    (TupleForHead, {}, "the argument of 'head' is a tuple"),
    (TargetInGraph, {}, "argument 'target' requires a gradient"),
    (LayersBehind, {"head": "head.0"}, "If it belongs to a layer behind the head, do without head_step"),
    (SlightlyOwnData, {}, "different losses on the ranks for the same samples"),
    (NormalizedOwnData, {}, "different losses on the ranks for the same samples"),
    (CountsLater, {}, "the SumMetric total is updated within head_step"),
    (Concatenates, {}, "the CatMetric targets is updated within head_step"),
    (InList, {}, "the SumMetric totals is updated within head_step"),
]


def _refused(rank: int) -> list[str]:
    results = []
    for net, arguments, _ in REFUSED:
        with pytest.raises(ValueError) as error:  # noqa: PT011  the caller looks at what it says
            fit_with(batches(rank, 2, steps=20), KrizhevskyHybridStrategy(**arguments), 2, net, {})
        results.append(str(error.value))
    return results


@pytest.mark.ci
def test_what_is_wrong_and_what_to_do():
    for results in run_processes(2, _refused):
        for text, (_, _, message) in zip(results, REFUSED, strict=True):
            assert message in text


class LayersBehindInTrainingStep(LayersBehind):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return HybridNet.training_step(self, batch, batch_idx)


def _runs(rank: int) -> Any:
    return fit_with(batches(rank, 2), KrizhevskyHybridStrategy(head="head.0"), 2, LayersBehindInTrainingStep, {})


def test_the_remedy_for_layers_behind_the_head_works():
    first, second = run_processes(2, _runs)
    head = {name for name in first if name.startswith("head.0")}
    assert head
    for name in head:
        torch.testing.assert_close(first[name], second[name])


def test_tensors_of_features_are_recognized():
    from lightning_dp.strategies.krizhevsky_hybrid.exchange import require_features

    require_features(torch.zeros(0, 3), "it")
    require_features(torch.zeros(2, 3, dtype=torch.bfloat16), "it")
    with pytest.raises(ValueError, match="it is a float; it must be the features"):
        require_features(1.0, "it")
