"""Optimizers, parameter groups, schedules and scaling rules for large batches."""

from lightning_dp.optim.krizhevsky import (
    KrizhevskySGD,
    Rule,
    krizhevsky_schedule,
    scale_for_batch_size,
    scale_learning_rate,
    scale_weight_decay,
    trunk_and_head_groups,
)
from lightning_dp.optim.large_batch import LARS, multistep_with_warmup, polynomial_with_warmup, weight_decay_groups

__all__ = [
    "LARS",
    "KrizhevskySGD",
    "Rule",
    "krizhevsky_schedule",
    "multistep_with_warmup",
    "polynomial_with_warmup",
    "scale_for_batch_size",
    "scale_learning_rate",
    "scale_weight_decay",
    "trunk_and_head_groups",
    "weight_decay_groups",
]
