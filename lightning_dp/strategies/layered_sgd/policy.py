"""When an update may be postponed, and when it may be done a bucket at a time: predicates without state."""

from __future__ import annotations

from typing import Any

from torch.nn import Embedding, EmbeddingBag, Module
from torch.optim import LBFGS, Optimizer, SparseAdam

from lightning_dp._lightning import FRAMEWORK, Callback, LightningModule
from lightning_dp._private.torch_names import has_step_hooks
from lightning_dp.strategies.compiled import hides_parameter_use


def why_not_postponed(trainer: Any, module: LightningModule) -> str | None:
    """Name the hook that makes postponing the update visible, or return None if there is none.

    These hooks run during the step, or read the gradients between two steps; run later, they would log into the next
    batch, or find gradients that are gone.
    """
    if hides_parameter_use(module) and not module.automatic_optimization:
        return f"{type(module).__name__}.training_step, which is compiled and steps its optimizers itself,"
    for name in ("on_before_optimizer_step", "on_before_zero_grad"):
        for callback in trainer.callbacks:
            if _overrides(callback, name, Callback):
                return f"{type(callback).__name__}.{name}"
    for name in ("on_before_optimizer_step", "on_before_zero_grad", "configure_gradient_clipping"):
        if _overrides(module, name, LightningModule):
            return f"{type(module).__name__}.{name}"
    return None


def _overrides(instance: object, name: str, base: type) -> bool:
    """Whether the hook is not the base class's; it may be set on the instance alone, as LambdaCallback does."""
    return getattr(getattr(instance, name), "__func__", None) is not getattr(base, name)


def steps_by_bucket(optimizer: Optimizer, trainer: Any) -> bool:
    """Whether updating some parameters before the gradients of others are there gives the same result.

    It does if each parameter's update depends on its own gradient alone: not with clipping by the global norm, with a
    gradient scaler (one overflow skips the whole step), in an optimizer that is not known to work so, or with a
    precision plugin of the user's own, which would not be asked.
    """
    own_gradient_only = type(optimizer).__module__.startswith("torch.optim.") and not isinstance(
        optimizer, (LBFGS, SparseAdam)
    )
    return (
        own_gradient_only
        and not has_step_hooks(optimizer)
        and not trainer.gradient_clip_val
        and getattr(trainer.precision_plugin, "scaler", None) is None
        and type(trainer.precision_plugin).__module__.startswith(FRAMEWORK + ".")
    )


def check_supported(module: Module, optimizers: list[Optimizer], strategy_name: str) -> None:
    """Raise ValueError for an optimizer or a layer that cannot work with postponed gradients."""
    for optimizer in optimizers:
        if isinstance(optimizer, LBFGS):
            raise ValueError(
                f"{strategy_name} cannot run {type(optimizer).__name__}: it evaluates the closure several times in one "
                "step and needs each gradient at once; use a first-order optimizer or DDPStrategy"
            )
    for name, part in module.named_modules():
        if isinstance(part, (Embedding, EmbeddingBag)) and part.sparse:
            raise ValueError(f"{strategy_name} cannot sum the sparse gradients of {name!r}; build it with sparse=False")
