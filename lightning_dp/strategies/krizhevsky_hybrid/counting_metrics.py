"""Metrics that count samples must not be updated in ``head_step``, which every rank runs with all ranks' samples."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torchmetrics
from torch import nn
from torchmetrics import Metric, MetricCollection, classification, regression, wrappers

from lightning_dp._lightning import LightningModule

# Each value is a mean, a ratio, a curve of ratios or an extremum: the same if every update is repeated. Confusion
# matrices and the counts of StatScores are not.
_PER_TASK = (
    *("Accuracy", "AUROC", "AveragePrecision", "CalibrationError", "CohenKappa", "CoverageError", "EER", "ExactMatch"),
    *("F1Score", "FBetaScore", "HammingDistance", "HingeLoss", "JaccardIndex", "LogAUC", "MatthewsCorrCoef"),
    *("NegativePredictiveValue", "Precision", "PrecisionAtFixedRecall", "PrecisionRecallCurve", "ROC", "Recall"),
    *("RankingAveragePrecision", "RankingLoss", "RecallAtFixedPrecision", "SensitivityAtSpecificity", "Specificity"),
    "SpecificityAtSensitivity",
)
_OF_REGRESSION = (
    *("CosineSimilarity", "ExplainedVariance", "JensenShannonDivergence", "KLDivergence", "LogCoshError"),
    *("MeanAbsoluteError", "MeanAbsolutePercentageError", "MeanSquaredError", "MeanSquaredLogError"),
    *("PearsonCorrCoef", "R2Score", "RelativeSquaredError", "SpearmanCorrCoef", "SymmetricMeanAbsolutePercentageError"),
    *("TweedieDevianceScore", "WeightedMeanAbsolutePercentageError"),
)
# Those that wrap others are functions of them, and each of the others is checked by itself.
_WRAPPERS = ("ClasswiseWrapper", "MinMaxMetric", "MultioutputWrapper", "MultitaskWrapper")
# Exact types, because a subclass may compute anything. A type that this version of torchmetrics lacks becomes None.
REPEATABLE = {
    *(
        getattr(classification, task + name, None)
        for task in ("Binary", "Multiclass", "Multilabel")
        for name in _PER_TASK
    ),
    *(getattr(regression, name, None) for name in _OF_REGRESSION),
    *(getattr(wrappers, name, None) for name in _WRAPPERS),
    *(torchmetrics.MeanMetric, torchmetrics.MaxMetric, torchmetrics.MinMetric, torchmetrics.metric.CompositionalMetric),
} - {None}
# With another value of these options the types above sum, or return a value for each sample.
_OPTIONS = {"reduction": "mean", "multidim_average": "global", "adjusted": 0}
_REDUCE_FX = list(inspect.signature(LightningModule.log).parameters).index("reduce_fx") - 1  # without self
_EVERY_SAMPLE = "within head_step, where every rank sees the samples of all ranks"


@contextmanager
def no_counting(module: LightningModule, world_size: int) -> Iterator[None]:
    """Raise ValueError if samples are counted within: they would count K times as much, for K ranks.

    Means and ratios may be updated in ``head_step``, because the factor K cancels. Other metrics must declare it, with
    the class attribute ``same_if_repeated = True``.
    """
    if world_size == 1:
        yield
        return
    before = {id(part): part.update_count for part in module.modules() if isinstance(part, Metric)}
    with _no_logged_sums(module):
        yield
    updated = {
        id(part)
        for part in module.modules()
        if isinstance(part, Metric) and part.update_count != before.get(id(part), 0)
    }
    if updated:
        _add_groups(module, updated)
        for name, part in module.named_modules():
            if id(part) in updated:
                _require_repeatable(name, part, world_size)


def _add_groups(module: nn.Module, updated: set[int]) -> None:
    """Add the metrics that share their state with one in ``updated``: a collection updates one metric of a group."""
    for collection in module.modules():
        if isinstance(collection, MetricCollection):
            metrics = {name: id(metric) for name, metric in collection.named_children()}
            for names in collection.compute_groups.values():
                group = {metrics[name] for name in names}
                if group & updated:
                    updated |= group


def _require_repeatable(name: str, metric: nn.Module, world_size: int) -> None:
    kind = type(metric)
    # Not inherited: a subclass may compute something else.
    if vars(kind).get("same_if_repeated", False):
        return
    options = [(option, value) for option, value in _OPTIONS.items() if getattr(metric, option, value) != value]
    if kind in REPEATABLE and not options:
        return
    what, remedy = f"the {kind.__name__} {name} is updated {_EVERY_SAMPLE}", "use a mean or a ratio of torchmetrics"
    if kind not in REPEATABLE:
        rule = f"so each sample would be counted {world_size} times, and it is not known to be a mean or a ratio"
        remedy += f", or, if it is one, declare same_if_repeated = True in the class {kind.__name__}"
    else:
        option, value = options[0]
        rule = f"so with {option}={getattr(metric, option)!r} each sample would be counted {world_size} times"
        remedy = f"use {option}={value!r}"
    raise ValueError(f"{what}, {rule}. Update it in training_step or in validation, or {remedy}")


@contextmanager
def _no_logged_sums(module: LightningModule) -> Iterator[None]:
    """Raise ValueError if ``module`` logs a sum within."""
    if "log" in vars(module):  # the user has replaced it
        yield
        return
    # Past __setattr__, which is slow. A method, because torch.compile would take a new function for new code.
    vars(module)["log"] = MethodType(_log, module)
    try:
        yield
    finally:
        del vars(module)["log"]


def _log(module: LightningModule, *args: Any, **kwargs: Any) -> None:
    reduce_fx = kwargs.get("reduce_fx", args[_REDUCE_FX] if len(args) > _REDUCE_FX else "mean")
    # Lightning takes "sum" in any case, sum and torch.sum.
    if getattr(reduce_fx, "__name__", str(reduce_fx)).lower() == "sum":
        name = kwargs.get("name", *args[:1])
        raise ValueError(
            f"self.log({name!r}, ..., reduce_fx={reduce_fx!r}) is called {_EVERY_SAMPLE}, so each sample would be "
            f"counted {module.trainer.world_size} times. Log it in training_step, or use reduce_fx='mean'"
        )
    type(module).log(module, *args, **kwargs)
