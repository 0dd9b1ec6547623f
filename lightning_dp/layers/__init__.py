"""Global batch normalization: the layers, and functions that put them into a model. Independent of Lightning."""

from lightning_dp.layers.global_batch_norm import (
    GlobalBatchNorm,
    GlobalBatchNorm1d,
    GlobalBatchNorm2d,
    GlobalBatchNorm3d,
    average_running_statistics,
)
from lightning_dp.layers.surgery import (
    NoEffectWarning,
    apply_global_batch_norm,
    global_batch_norm_layers,
    revert_global_batch_norm,
    unconverted_layer_names,
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
    "revert_global_batch_norm",
    "unconverted_layer_names",
]
