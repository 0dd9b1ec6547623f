"""Metrics in head_step: those that count each sample once per rank are refused, the others are the same as alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchmetrics
from packaging.version import Version
from torch import Tensor
from torchmetrics import Metric, classification, regression
from torchmetrics.utilities.data import dim_zero_cat

from lightning_dp import KrizhevskyHybridStrategy
from lightning_dp.strategies.krizhevsky_hybrid import checks
from lightning_dp.strategies.krizhevsky_hybrid.checks import REPEATABLE, no_counting
from tests.ranks import run_processes
from tests.strategies.krizhevsky_hybrid.modules import StepNet, batches, fit_with
from tests.strategies.modules import CLASSES

N = 40


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


class CountAgain(OwnRatio):
    """Inherits the declaration, and returns a count."""

    def compute(self) -> Tensor:
        return self.total


class Confusion(classification.MulticlassConfusionMatrix):
    pass


class AccuracyCount(classification.MulticlassAccuracy):
    def compute(self) -> Tensor:
        return self.tp.sum()


class Net(StepNet):
    """Updates a metric in head_step, with what `numbers` makes of the targets."""

    make: Callable[[], Any]
    numbers: Callable[[Tensor], tuple[Tensor, ...]] = staticmethod(lambda target: (target, target))

    def __init__(self) -> None:
        super().__init__()
        self.metric = type(self).make()

    def head_step(self, features: Tensor, target: Tensor) -> Tensor:
        self.metric.update(*type(self).numbers(target))
        return super().head_step(features, target)


def net_with(make: Callable[[], Any], numbers: Callable[[Tensor], Any] | None = None) -> type[Net]:
    namespace: dict[str, Any] = {"make": staticmethod(make)}
    if numbers is not None:
        namespace["numbers"] = staticmethod(numbers)
    return type("Net", (Net,), namespace)


def _rows(target: Tensor) -> tuple[Tensor, Tensor]:
    rows = torch.nn.functional.one_hot(target, CLASSES).float() * 0.9 + 0.025
    return rows, rows.flip(0)


def _group() -> torchmetrics.MetricCollection:
    """Its second metric shares the state of the first, and is not updated itself."""
    metrics = {"accuracy": classification.MulticlassAccuracy(4), "count": classification.MulticlassStatScores(4)}
    return torchmetrics.MetricCollection(metrics, compute_groups=[["accuracy", "count"]])


def _samplewise() -> Metric:
    return classification.MulticlassAccuracy(4, multidim_average="samplewise")


REFUSED: list[tuple[Callable[[], Any], Any, str]] = [
    (Correct, None, "the Correct metric is updated within head_step"),
    (Collected, None, "declare same_if_repeated = True in the class Collected"),
    (CountAgain, None, "the CountAgain metric is updated"),
    (lambda: Confusion(CLASSES), None, "the Confusion metric is updated"),
    (lambda: AccuracyCount(CLASSES), None, "the AccuracyCount metric is updated"),
    (lambda: torchmetrics.MetricCollection({"c": Correct()}), None, "the Correct metric.c is updated"),
    (_group, None, "the MulticlassStatScores metric.count is updated"),
    (lambda: torchmetrics.ClasswiseWrapper(classification.MulticlassStatScores(4)), None, "metric.metric is updated"),
    (torchmetrics.CosineSimilarity, _rows, "so with reduction='sum' each sample would be counted 2 times"),
    (lambda: torchmetrics.KLDivergence(reduction="sum"), _rows, "or use reduction='mean'"),
    (lambda: torchmetrics.MinkowskiDistance(2), _rows, "the MinkowskiDistance metric is updated"),
    (_samplewise, lambda t: (t[:, None], t[:, None]), "or use multidim_average='global'"),
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


class LogsMean(LogsSum):
    """Logs the mean in head_step, and a sum in training_step."""

    reduce_fx = "mean"

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("sum", 1.0, reduce_fx="sum", sync_dist=True, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def on_train_end(self) -> None:
        assert self.trainer.callback_metrics["sum"] == 2 * self.trainer.global_step


LOGS = (LogsSum, LogsSumByPosition, LogsDictionary)
ALLOWED: list[type[StepNet]] = [
    LogsMean,
    net_with(OwnRatio),
    net_with(lambda: classification.MulticlassAccuracy(CLASSES)),
    net_with(lambda: torchmetrics.CosineSimilarity(reduction="mean"), _rows),
    net_with(lambda: torchmetrics.MetricCollection([classification.MulticlassAccuracy(CLASSES)])),
    net_with(torchmetrics.MeanMetric, lambda target: (target.float(), torch.ones(len(target)))),
]


def _fit(rank: int) -> tuple[list[str], list[str]]:
    counting, logging = [], []
    for make, numbers, _ in REFUSED:
        with pytest.raises(ValueError) as error:  # noqa: PT011  the caller looks at what it says
            fit_with(batches(rank, 2, 2), KrizhevskyHybridStrategy(), 2, net_with(make, numbers), {})
        counting.append(str(error.value))
    for net in LOGS:
        with pytest.raises(ValueError) as error:  # noqa: PT011  the caller looks at what it says
            fit_with(batches(rank, 2, 2), KrizhevskyHybridStrategy(), 2, net, {})
        logging.append(str(error.value))
    for net in ALLOWED:
        fit_with(batches(rank, 2, 2), KrizhevskyHybridStrategy(), 2, net, {})
    return counting, logging


def test_what_counts_each_sample_once_per_rank_is_refused():
    for counting, logging in run_processes(2, _fit):
        for text, (_, _, message) in zip(counting, REFUSED, strict=True):
            assert message in text
        assert all("self.log('n', ..., reduce_fx=" in text and "counted 2 times" in text for text in logging)


def _options(name: str) -> dict[str, Any]:
    ends = {"AtFixedRecall": "recall", "AtFixedPrecision": "precision"}
    ends |= {"AtSpecificity": "specificity", "AtSensitivity": "sensitivity"}
    options: dict[str, Any] = {f"min_{what}": 0.5 for end, what in ends.items() if name.endswith(end)}
    if name.endswith("FBetaScore"):
        options["beta"] = 2.0
    if name.startswith("Multiclass"):
        options["num_classes"] = 4
    if name.startswith("Multilabel"):
        options["num_labels"] = 4
    return options | ({"reduction": "mean"} if name.endswith(("Similarity", "Divergence")) else {})


def _numbers(name: str) -> tuple[Tensor, Tensor]:
    if name.startswith("Binary"):
        return torch.rand(N), torch.randint(2, (N,))
    if name.startswith("Multiclass"):
        return torch.rand(N, 4).softmax(1), torch.randint(4, (N,))
    if name.startswith("Multilabel"):
        return torch.rand(N, 4), torch.randint(2, (N, 4))
    if name.endswith(("Similarity", "Divergence")):
        return torch.rand(N, 4).softmax(1), torch.rand(N, 4).softmax(1)
    return torch.rand(N), torch.rand(N)


PLAIN = {kind for kind in REPEATABLE if kind.__module__.startswith(("torchmetrics.cl", "torchmetrics.reg"))}


@pytest.mark.filterwarnings("ignore")  # some keep all samples, or found no threshold
@pytest.mark.parametrize("kind", sorted(PLAIN, key=lambda kind: kind.__name__))
def test_a_metric_that_is_allowed_is_the_same_if_its_updates_are_repeated(kind):
    torch.manual_seed(0)
    name = kind.__name__
    once, repeated = kind(**_options(name)), kind(**_options(name))
    for numbers in [_numbers(name) for _ in range(3)]:
        once.update(*numbers)
        for _ in range(3):
            repeated.update(*numbers)
    torch.testing.assert_close(repeated.compute(), once.compute(), rtol=1e-4, atol=1e-5, equal_nan=True)


def test_what_torchmetrics_has_is_named_in_full():
    names = {f"{task}{name}" for task in ("Binary", "Multiclass", "Multilabel") for name in checks._PER_TASK}
    counting = {"ConfusionMatrix", "StatScores", "Fairness", "GroupStatRates"}
    known = {n for n in classification.__all__ if n.startswith(("Binary", "Multi")) and not n.endswith((*counting,))}
    assert known <= names
    missing = set(checks._OF_REGRESSION) - set(regression.__all__)
    assert missing == ({"JensenShannonDivergence"} if Version(torchmetrics.__version__) < Version("1.7") else set())


def _interrupted(net: StepNet) -> None:
    with no_counting(net, 2):
        assert "log" in vars(net)
        raise KeyError


def test_the_module_logs_by_itself_afterwards():
    net = StepNet()
    with pytest.raises(KeyError):
        _interrupted(net)
    assert "log" not in vars(net)
