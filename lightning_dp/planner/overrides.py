"""What `recipes/train.py` is told to use a method."""

from __future__ import annotations

from lightning_dp.planner.profile import StepProfile

POWER_SGD = "{_target_:lightning_dp.strategies.PowerSGD,rank:4}"
# The other methods are no option of the recipes: Lightning ignores communication hooks on CPU.
OVERRIDES = {
    "ddp": ["strategy=ddp"],
    "ddp_accumulate_4": ["strategy=ddp", "trainer.accumulate_grad_batches=4"],
    "ddp_global_batch_norm": ["strategy=ddp", "callbacks=agbn"],
    "layered_sgd_load": ["strategy=layered_sgd", "strategy.overlap=load"],
    "layered_sgd_step": ["strategy=layered_sgd", "strategy.overlap=step"],
    "layered_sgd_step_sharded": ["strategy=layered_sgd", "strategy.overlap=step", "strategy.communicator=sharded"],
    "layered_sgd_step_bf16": ["strategy=layered_sgd", "strategy.overlap=step", "strategy.compression=bf16"],
    "layered_sgd_step_int8": ["strategy=layered_sgd", "strategy.overlap=step", "strategy.compression=int8"],
    "layered_sgd_step_power_sgd": [
        "strategy=layered_sgd",
        "strategy.overlap=step",
        f"strategy.compression={POWER_SGD}",
    ],
    "hybrid_a": ["strategy=krizhevsky_hybrid", "strategy.scheme=a"],
    "hybrid_b": ["strategy=krizhevsky_hybrid", "strategy.scheme=b"],
    "hybrid_c": ["strategy=krizhevsky_hybrid", "strategy.scheme=c"],
}
MEMONGER = ("ddp_memonger", "ddp_memonger_larger_batch")
"""Their options depend on the job: a budget in bytes, and the number of images."""
WITH_PLAN = (*OVERRIDES, *MEMONGER)
"""The methods that the recipes have."""


def overrides_of(name: str, profile: StepProfile, world_size: int) -> list[str] | None:
    """Return the overrides for a method, None if the recipes do not have it, or the job has no plan for it.

    Args:
        name: in `METHODS`.
        profile: the measured job.
        world_size: number of ranks that will train. ``data.batch_size`` counts the images of all of them.
    """
    if name not in MEMONGER:
        return OVERRIDES.get(name)
    plan = profile.recomputation
    if plan is None:
        return None
    is_larger = name == "ddp_memonger_larger_batch"
    factor = plan.batch_factor if is_larger else 1
    overrides = [
        "strategy=ddp",
        "callbacks=memonger",
        "callbacks.memonger.policy=budget",
        # A budget is for the batch that is trained with, and activations grow with it.
        f"callbacks.memonger.budget_bytes={round(factor * plan.held_bytes)}",
    ]
    return overrides + ([f"data.batch_size={factor * profile.batch_size * world_size}"] if is_larger else [])
