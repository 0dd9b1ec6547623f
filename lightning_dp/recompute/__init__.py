"""Recomputation of activations: keep less for backward, and compute it again. Independent of Lightning."""

from lightning_dp.recompute.apply import RecomputeHandle, apply_recompute, check_policy

__all__ = ["RecomputeHandle", "apply_recompute", "check_policy"]
