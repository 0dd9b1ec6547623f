"""Metrics in head_step would count each sample once per rank: they raise, unless they declare to be the same."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
import torchmetrics
from torch import Tensor
from torchmetrics import Metric, classification
from torchmetrics.utilities.data import dim_zero_cat

from lightning_dp import KrizhevskyHybridStrategy
from lightning_dp.strategies.krizhevsky_hybrid import checks
from lightning_dp.strategies.krizhevsky_hybrid.checks import no_counting
from tests.ranks import run_processes
from tests.strategies.krizhevsky_hybrid.modules import HybridNet, StepNet, all_batches, batches, fit_with
from tests.strategies.modules import CLASSES, assert_same, trainer


class Correct(Metric):
    """A user's own count."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, prediction: Tensor, target: Tensor) -> None:
        self.total = self.total + (prediction == target).sum()

    def compute(self) -> Tensor:
        return self.total


class Collected(Metric):
    values: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("values", [], dist_reduce_fx="cat")

    def update(self, prediction: Tensor, target: Tensor) -> None:
        self.values.append(prediction)

    def compute(self) -> Tensor:
        return dim_zero_cat(self.values)


class OwnRatio(Correct):
    """A user's own ratio, declared."""

    same_if_repeated = True
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, prediction: Tensor, target: Tensor) -> None:
        super().update(prediction, target)
        self.count = self.count + len(target)

    def compute(self) -> Tensor:
        return self.total / self.count


class Net(StepNet):
    """Updates a metric in head_step."""

    make: Callable[[], Any]

    def __init__(self) -> None:
        super().__init__()
        self.metric = type(self).make()

    def head_step(self, features: Tensor, target: Tensor) -> Tensor:
        metric = self.metric["count"] if isinstance(self.metric, dict) else self.metric
        metric = metric[0] if isinstance(metric, deque) else metric
        metric.update(target, target)
        return super().head_step(features, target)


def net_with(make: Callable[[], Any]) -> type[Net]:
    return type("Net", (Net,), {"make": staticmethod(make)})


def _declared() -> Metric:
    score = classification.MulticlassF1Score(CLASSES)
    score.same_if_repeated = True
    return score


class AccuracyCount(classification.MulticlassAccuracy):
    def compute(self) -> Tensor:
        return self.tp.sum()


@dataclass
class Holder:
    """Has a metric as an attribute."""

    count: Metric

    def update(self, *arguments: Tensor) -> None:
        self.count.update(*arguments)


class Attributes(dict[str, Metric]):
    """As Lightning's `AttributeDict` is, a dictionary of another class."""


def _of_same_states() -> torchmetrics.MetricCollection:
    """The second is updated through the first, whose value is a mean."""
    both = [classification.MulticlassAccuracy(CLASSES), classification.MulticlassStatScores(CLASSES)]
    collection = torchmetrics.MetricCollection(both, compute_groups=[[type(each).__name__ for each in both]])
    collection.update(torch.arange(CLASSES), torch.arange(CLASSES))  # as a validation before has done
    return collection


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (Correct, "the Correct metric is updated within head_step"),
    (Collected, "set same_if_repeated = True on it or in its class"),
    (lambda: classification.MulticlassF1Score(CLASSES), "the MulticlassF1Score metric is updated"),
    (lambda: AccuracyCount(CLASSES), "the AccuracyCount metric is updated"),
    (lambda: torchmetrics.MetricCollection({"c": Correct()}), "the Correct metric.c is updated"),
    (lambda: torchmetrics.ClasswiseWrapper(classification.MulticlassF1Score(CLASSES)), "metric.metric is updated"),
    (lambda: Holder(Correct()), "the Correct metric is updated"),
    (lambda: Attributes(count=Correct()), "the Correct metric is updated"),
    (lambda: deque([Correct()]), "the Correct metric is updated"),
    (  # it resets the metric that it has updated
        lambda: torchmetrics.wrappers.Running(classification.MulticlassStatScores(CLASSES), window=2),
        "the MulticlassStatScores metric.base_metric is updated",
    ),
    (_of_same_states, "the MulticlassStatScores metric.MulticlassStatScores is updated"),
]


class LogsSum(StepNet):
    reduce_fx: Any = "sum"

    def head_step(self, features: Tensor, target: Tensor) -> Tensor:
        self.log("n", float(len(target)), reduce_fx=self.reduce_fx, sync_dist=True, on_step=False, on_epoch=True)
        return super().head_step(features, target)


class LogsSumByPosition(StepNet):
    def head_step(self, features: Tensor, target: Tensor) -> Tensor:
        self.log("n", float(len(target)), False, None, False, True, torch.sum)
        return super().head_step(features, target)


class LogsDictionary(StepNet):
    def head_step(self, features: Tensor, target: Tensor) -> Tensor:
        self.log_dict({"n": float(len(target))}, reduce_fx=sum)
        return super().head_step(features, target)


class Contrasts(StepNet):
    """Its negatives are the samples of all ranks."""

    def cost(self, logits: Tensor, target: Tensor) -> Tensor:
        negatives = self.all_gather(logits).flatten(0, -2)  # without gradients
        return torch.logsumexp(logits @ negatives.T, 1).mean()


class ContrastsInStep(Contrasts):
    training_step = HybridNet.training_step


class LogsMean(LogsSum):
    """Logs the mean in head_step, and a sum in training_step."""

    reduce_fx = "mean"

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("sum", 1.0, reduce_fx="sum", sync_dist=True, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def on_train_end(self) -> None:
        assert self.trainer.callback_metrics["sum"] == 2 * self.trainer.global_step


class LogsWithPrefix(LogsMean):
    """Has a method of its own, which takes one argument more than Lightning's."""

    def log(self, name: str, value: Any, prefix: str = "", **options: Any) -> None:
        super().log(prefix + name, value, **options)

    def head_step(self, features: Tensor, target: Tensor) -> Tensor:
        self.log("mean", 1.0, prefix="own ")
        return super().head_step(features, target)


LOGS = (LogsSum, LogsSumByPosition, LogsDictionary)
ALLOWED: list[type[StepNet]] = [
    LogsMean,
    LogsWithPrefix,
    net_with(OwnRatio),
    net_with(_declared),
    net_with(lambda: torchmetrics.MetricCollection([_declared()])),
    net_with(lambda: classification.MulticlassAccuracy(CLASSES)),
    net_with(torchmetrics.MeanMetric),
]


def _fit(rank: int) -> tuple[list[str], list[str]]:
    counting, logging = [], []
    for make, _ in REFUSED:
        with pytest.raises(ValueError) as error:  # noqa: PT011  the caller looks at what it says
            fit_with(batches(rank, 2, 2), KrizhevskyHybridStrategy(), 2, net_with(make), {})
        counting.append(str(error.value))
    for net in LOGS:
        with pytest.raises(ValueError) as error:  # noqa: PT011  the caller looks at what it says
            fit_with(batches(rank, 2, 2), KrizhevskyHybridStrategy(), 2, net, {})
        logging.append(str(error.value))
    for net in ALLOWED:
        fit_with(batches(rank, 2, 2), KrizhevskyHybridStrategy(), 2, net, {})
    return counting, logging


@pytest.mark.ci
def test_what_counts_each_sample_once_per_rank_is_refused():
    for counting, logging in run_processes(2, _fit):
        for text, (_, message) in zip(counting, REFUSED, strict=True):
            assert message in text
        assert all("self.log('n', ..., reduce_fx=" in text and "counted 2 times" in text for text in logging)


def _contrasting(rank: int) -> None:
    with pytest.raises(ValueError, match=r"self.all_gather\(...\) is called within head_step.* be there 2 times"):
        fit_with(batches(rank, 2), KrizhevskyHybridStrategy(), 2, Contrasts, {})
    fitted = [fit_with(batches(rank, 2), s, 2, ContrastsInStep, {}) for s in (KrizhevskyHybridStrategy(), "ddp")]
    assert_same(*fitted, 1e-9)


@pytest.mark.filterwarnings("ignore:torch.distributed.nn.functional.all_gather")  # which Lightning calls
def test_samples_that_head_step_gathers_would_be_there_once_per_rank():
    run_processes(2, _contrasting)


def _interrupted(net: StepNet) -> None:
    with no_counting(net, 2):
        assert "log" in vars(net)
        raise KeyError


def test_the_module_logs_by_itself_afterwards():
    net = StepNet()
    with pytest.raises(KeyError):
        _interrupted(net)
    assert "log" not in vars(net)


class Penalized(StepNet):
    """Its losses differ between ranks by the penalty, so that head_step runs with other features, too, to see why."""

    center: Tensor
    spread: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = classification.MulticlassAccuracy(CLASSES, average="micro")
        self.register_buffer("spread", torch.ones(1, dtype=torch.float64))
        self.collection = torchmetrics.MetricCollection([classification.MulticlassAccuracy(CLASSES, average="macro")])
        self.register_buffer("center", torch.zeros(6, dtype=torch.float64))
        self.calls, self.costs = 0, {"train": [torch.zeros(())]}
        self.kept = torch.zeros(())  # no buffer

    def head_step(self, features: Tensor, target: Tensor) -> Tensor:
        logits = self.head(features)
        # Changed in place, and needed by the backward of the loss.
        self.spread.mul_(0.9).add_(0.1 * logits.detach().abs().mean())
        cost = self.cost(logits / self.spread, target)
        self.accuracy(logits, target)
        self.collection(logits, target)
        self.log_dict({"cost": cost.detach(), "accuracy": self.accuracy}, on_step=False, on_epoch=True, sync_dist=True)
        self.center = 0.9 * self.center + 0.1 * features.detach().mean(0)
        self.calls += 1
        self.kept += random.random() + np.random.rand()
        self.costs["train"].append(cost.detach())
        features.register_hook(lambda gradient: gradient)
        (slope,) = torch.autograd.grad(cost, features, create_graph=True)
        cost = cost + slope.square().sum()
        return cost + 1e-2 * sum(p.square().sum() for p in self.head.parameters())


def _recorded(loader: Any, strategy: Any, world_size: int) -> dict[str, Tensor]:
    pl.seed_everything(1)
    module = Penalized()
    runner = trainer(strategy, world_size, use_distributed_sampler=False)
    runner.fit(module, loader)
    own = {"center": module.center, "costs": torch.stack(module.costs["train"]), "kept": module.kept}
    own |= {"spread": module.spread, "calls": torch.tensor(module.calls)}
    return {**runner.callback_metrics, **module.collection.compute(), **own}


def _recorded_on_rank(rank: int) -> dict[str, Tensor]:
    return _recorded(batches(rank, 2, 2), KrizhevskyHybridStrategy(), 2)


@pytest.mark.ci
def test_a_penalty_on_weights_leaves_what_is_logged_and_kept_as_in_one_process():
    expected = _recorded(all_batches(2, 2), "auto", 1)
    assert len(expected) == 8
    del expected["kept"]
    recorded = run_processes(2, _recorded_on_rank)
    # Random numbers within head_step are those of all ranks, and not those of one process.
    assert recorded[0]["kept"] == recorded[1]["kept"]
    for actual in recorded:
        del actual["kept"]
        assert_same(actual, expected, 1e-6)


def test_a_list_of_a_part_that_is_parametrized_is_looked_into():
    part = torch.nn.Linear(2, 2)
    part.counts = [Correct()]
    torch.nn.utils.parametrizations.weight_norm(part)
    assert [type(metric) for _, metric in checks._metrics(torch.nn.Sequential(part))] == [Correct]


class Labels(list[Any]):
    """Those of all images of a data set, which a module keeps. Counts how many are looked at."""

    num_seen = 0

    def __iter__(self) -> Iterator[Any]:
        for each in super().__iter__():
            self.num_seen += 1
            yield each


def test_of_many_labels_each_step_looks_at_a_thousand():
    module = pl.LightningModule()
    module.labels = Labels(range(5000))
    module.counts = {"train": [Correct()]}
    assert [type(metric) for _, metric in checks._metrics(module)] == [Correct]
    assert module.labels.num_seen <= 1000


def test_a_container_may_contain_itself():
    module = pl.LightningModule()
    module.tree = {"children": [Correct()]}
    module.tree["root"] = module.tree
    assert [type(metric) for _, metric in checks._metrics(module)] == [Correct]
