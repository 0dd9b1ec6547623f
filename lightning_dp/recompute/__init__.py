"""Recomputation of activations: keep less for backward, and compute it again. Independent of Lightning."""

from lightning_dp.recompute.activations import ActivationRow, ActivationTable, activation_bytes
from lightning_dp.recompute.apply import RecomputeHandle, apply_recompute, check_policy

__all__ = [
    "ActivationRow",
    "ActivationTable",
    "RecomputeHandle",
    "activation_bytes",
    "apply_recompute",
    "check_policy",
]
