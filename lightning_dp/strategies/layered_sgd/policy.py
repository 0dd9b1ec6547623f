"""When an update may be postponed, and when it may be applied bucket by bucket: predicates without state."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.nn import Embedding, EmbeddingBag, Module
from torch.optim import LBFGS, Optimizer

from lightning_dp._lightning import FRAMEWORK, Callback, LightningModule
from lightning_dp._private.torch_names import file_of, has_any_step_hooks, step_function
from lightning_dp.strategies.compiled import hides_parameter_use

# Modules whose optimizers compute a parameter's update from its own gradient and state alone, in one pass.
_KNOWN_OPTIMIZERS = ("torch.optim.", "lightning_dp.optim.")
# Where the code of their steps and of its wrappers is.
_KNOWN_FOLDERS = (f"{Path(torch.__file__).parent}{os.sep}", f"{Path(__file__).parents[2]}{os.sep}")


def why_module_is_not_postponed(module: LightningModule) -> str | None:
    """Name what the module does that makes postponing visible, or return None."""
    if hides_parameter_use(module) and not module.automatic_optimization:
        return f"{type(module).__name__}.training_step, which is compiled and steps its optimizers itself,"
    return None


def why_hooks_are_not_postponed(trainer: Any, module: LightningModule) -> str | None:
    """Name the hook of the module or of a callback that makes postponing visible, or return None.

    These hooks run during the step, or read the gradients between two steps. Run later, they would log into the next
    batch, or find other gradients.
    """
    for name in ("on_before_optimizer_step", "on_before_zero_grad"):
        for callback in trainer.callbacks:
            if _overrides(callback, name, Callback):
                return f"{type(callback).__name__}.{name}"
    for name in ("on_before_optimizer_step", "on_before_zero_grad", "configure_gradient_clipping", "clip_gradients"):
        if _overrides(module, name, LightningModule):
            return f"{type(module).__name__}.{name}"
    return None


def why_step_is_not_postponed(optimizer: Optimizer, precision_plugin: Any) -> str | None:
    """Name what would notice if this step of ``optimizer`` were taken later, or return None.

    It may communicate (all ranks must then take it at the same time, while a use of a parameter can happen on one rank
    alone), call its closure, or look at gradients that change until then.
    """
    name = type(optimizer).__name__
    step = step_function(optimizer)
    if not f"{type(optimizer).__module__}.".startswith(_KNOWN_OPTIMIZERS):
        return f"{name}.step, which is not PyTorch's own,"
    if not _is_known_code(step) or step is not _of_class(optimizer):
        return f"{name}.step, which somebody has replaced,"
    if has_any_step_hooks(optimizer):
        return f"a hook before or after {name}.step"
    if not type(precision_plugin).__module__.startswith(FRAMEWORK + "."):
        return f"{type(precision_plugin).__name__}.optimizer_step"
    return None


def _is_known_code(function: Any) -> bool:
    """Whether ``function`` and all that it wraps are PyTorch's or this package's.

    `functools.wraps` gives a user's function the name, the module and the marks of what it wraps, but not its code.
    """
    while function is not None:
        if not (file_of(function) or "").startswith(_KNOWN_FOLDERS):
            return False
        function = getattr(function, "__wrapped__", None)
    return True


def _of_class(optimizer: Optimizer) -> Any:
    return type(optimizer).step


def _overrides(instance: object, name: str, base: type) -> bool:
    """Whether the hook is not the base class's; it may be set on the instance alone, as LambdaCallback does."""
    return getattr(getattr(instance, name), "__func__", None) is not getattr(base, name)


def steps_by_bucket(trainer: Any) -> bool:
    """Return whether some parameters may be updated before the gradients of others are there.

    Not with clipping by the global norm, nor with a gradient scaler: one overflow skips the whole step.
    """
    return not trainer.gradient_clip_val and getattr(trainer.precision_plugin, "scaler", None) is None


def check_optimizers(optimizers: Iterable[Optimizer], strategy_name: str) -> None:
    """Raise ValueError for an optimizer that cannot work on several ranks, by name."""
    for optimizer in optimizers:
        if isinstance(optimizer, LBFGS):
            raise ValueError(
                f"{strategy_name} cannot run {type(optimizer).__name__}: it calls its closure until this rank's own "
                "loss meets a criterion, so ranks would run different numbers of backward passes and wait for each "
                "other (under DDPStrategy, too); use a first-order optimizer"
            )


def check_layers(module: Module, strategy_name: str) -> None:
    """Raise ValueError for a layer whose gradients cannot be summed in groups, by name."""
    for name, part in module.named_modules():
        if isinstance(part, (Embedding, EmbeddingBag)) and part.sparse:
            raise ValueError(f"{strategy_name} cannot sum the sparse gradients of {name!r}; build it with sparse=False")


def check_options(**choices: tuple[str, Iterable[str]]) -> None:
    """Raise ValueError for a value that is not among its choices: value and possible values, by name."""
    for name, (value, allowed) in choices.items():
        if value not in allowed:
            raise ValueError(f"{name}={value!r} is not known; use one of {', '.join(map(repr, allowed))}")


def check_ddp_options(ddp_kwargs: dict[str, Any]) -> None:
    """Raise ValueError for an option of DDPStrategy and DistributedDataParallel that cannot be given.

    ``gradient_as_bucket_view`` is taken out of ``ddp_kwargs``.
    """
    for name in ("ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper", "model_averaging_period", "mixed_precision"):
        if ddp_kwargs.get(name) is not None:
            raise ValueError(
                f"{name} cannot be given: layered SGD reduces the gradients itself; use DDPStrategy for it"
            )
    if not ddp_kwargs.pop("gradient_as_bucket_view", True):
        raise ValueError(
            "gradient_as_bucket_view=False cannot work: the gradients must be views of the buckets, which are summed "
            "in place after backward; leave the option out"
        )
