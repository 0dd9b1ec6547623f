"""Metrics that count samples must not be updated in ``head_step``, which every rank runs with all ranks' samples."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torchmetrics import SumMetric
from torchmetrics.classification import (
    BinaryConfusionMatrix,
    BinaryStatScores,
    MulticlassConfusionMatrix,
    MulticlassStatScores,
    MultilabelConfusionMatrix,
    MultilabelStatScores,
)

from lightning_dp.strategies.krizhevsky_hybrid.head_passes import HeadPasses

# Their subclasses (accuracy, Jaccard index) are ratios, in which the factor K cancels.
_COUNTING = {
    *(BinaryConfusionMatrix, MulticlassConfusionMatrix, MultilabelConfusionMatrix),
    *(BinaryStatScores, MulticlassStatScores, MultilabelStatScores),
}


@contextmanager
def no_counting(module: nn.Module, passes: HeadPasses) -> Iterator[None]:
    """Raise ValueError if the first step updates a metric that counts: it would count K times as much, for K ranks.

    Means and ratios may be updated in ``head_step``, because the factor K cancels.
    """
    modules = module.named_modules()
    metrics = [(name, part) for name, part in modules if isinstance(part, SumMetric) or type(part) in _COUNTING]
    counts = [metric.update_count for _, metric in metrics]
    yield
    if passes.num_steps > 1 or passes.channel.world_size == 1:
        return
    for (name, metric), before in zip(metrics, counts, strict=True):
        if metric.update_count > before:
            raise ValueError(
                f"the {type(metric).__name__} {name} is updated within head_step, where every rank sees the samples "
                f"of all ranks, so each sample would be counted {passes.channel.world_size} times. Update it in "
                "training_step, or use a metric of a mean or a ratio"
            )
