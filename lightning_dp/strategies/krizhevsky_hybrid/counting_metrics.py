"""Metrics that count samples must not be updated in ``head_step``, which every rank runs with all ranks' samples."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torchmetrics import CatMetric, SumMetric
from torchmetrics.aggregation import RunningSum
from torchmetrics.classification import (
    BinaryConfusionMatrix,
    BinaryStatScores,
    MulticlassConfusionMatrix,
    MulticlassStatScores,
    MultilabelConfusionMatrix,
    MultilabelStatScores,
)

# Their subclasses (accuracy, Jaccard index) are ratios, in which the factor K cancels.
_COUNTING = {
    *(BinaryConfusionMatrix, MulticlassConfusionMatrix, MultilabelConfusionMatrix),
    *(BinaryStatScores, MulticlassStatScores, MultilabelStatScores),
}


@contextmanager
def no_counting(module: nn.Module, world_size: int) -> Iterator[None]:
    """Raise ValueError if a metric that counts is updated within: it would count K times as much, for K ranks.

    Means and ratios may be updated in ``head_step``, because the factor K cancels.
    """
    if world_size == 1:
        yield
        return
    modules = module.named_modules()
    kept = (SumMetric, CatMetric, RunningSum)
    metrics = [(name, part) for name, part in modules if isinstance(part, kept) or type(part) in _COUNTING]
    counts = [metric.update_count for _, metric in metrics]
    yield
    for (name, metric), before in zip(metrics, counts, strict=True):
        if metric.update_count > before:
            raise ValueError(
                f"the {type(metric).__name__} {name} is updated within head_step, where every rank sees the samples "
                f"of all ranks, so each sample would be counted {world_size} times. Update it in "
                "training_step, or use a metric of a mean or a ratio"
            )
