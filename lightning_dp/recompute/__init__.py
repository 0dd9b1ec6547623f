"""Recomputation of activations: keep less for backward, and compute it again. Independent of Lightning."""

from lightning_dp.recompute.activations import ActivationRow, ActivationTable, activation_bytes
from lightning_dp.recompute.apply import RecomputeHandle, apply_recompute, check_budget, check_policy
from lightning_dp.recompute.plan import RecomputePlan, make_plan, plan_recompute
from lightning_dp.recompute.policies import Policy
from lightning_dp.recompute.profile import Profiler

__all__ = [
    "ActivationRow",
    "ActivationTable",
    "Policy",
    "Profiler",
    "RecomputeHandle",
    "RecomputePlan",
    "activation_bytes",
    "apply_recompute",
    "check_budget",
    "check_policy",
    "make_plan",
    "plan_recompute",
]
