"""Layers that work over several ranks, and the surgery that puts them into a model. No Lightning here."""

from lightning_dp.layers.global_batch_norm import (
    GlobalBatchNorm,
    GlobalBatchNorm1d,
    GlobalBatchNorm2d,
    GlobalBatchNorm3d,
)
from lightning_dp.layers.surgery import (
    NoEffectWarning,
    apply_global_batch_norm,
    average_running_statistics,
    global_batch_norm_layers,
)

__all__ = [
    "GlobalBatchNorm",
    "GlobalBatchNorm1d",
    "GlobalBatchNorm2d",
    "GlobalBatchNorm3d",
    "NoEffectWarning",
    "apply_global_batch_norm",
    "average_running_statistics",
    "global_batch_norm_layers",
]
