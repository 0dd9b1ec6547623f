"""Decide whether the update of a step is postponed, and until when. Each reason against it is warned of once."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_dp._lightning import FRAMEWORK, Callback, LightningModule
from lightning_dp._private.torch_names import (
    file_of,
    has_any_step_hooks,
    is_in_backward,
    may_change_saved_tensors,
    on_compile_start,
    step_function,
    without_torch_function,
)
from lightning_dp.strategies.base import hides_parameter_use, is_elementwise, overlapping_parameters
from lightning_dp.strategies.layered_sgd.update import UpdateQueue

log = logging.getLogger(__name__)

EARLY_USES = 3


class Postponement:
    """Decides when each update runs: bucket by bucket within the next forward, in one step before it, or immediately.

    Args:
        updates: holds what is postponed.
        trainer: the Trainer that fits.
        before_forward: always apply the whole update before the forward (``overlap="load"``).
        strategy_name: for messages.
        of_shards: parameters are sharded by FSDP2. Compiled code does not use them, but what FSDP2 gathers from them.
    """

    def __init__(
        self,
        updates: UpdateQueue,
        trainer: Any,
        before_forward: bool,
        strategy_name: str,
        of_shards: bool = False,
    ) -> None:
        self._updates = updates
        self._trainer = trainer
        self._module = module = trainer.lightning_module
        self._strategy_name = strategy_name
        self._warned_of: set[str] = set()
        self._num_early_uses = 0  # steps in a row
        self._of_shards = of_shards
        self._is_use_hidden = not of_shards and hides_parameter_use(module)
        self._before_forward = before_forward
        self._parameters = [p for p in module.parameters() if p.numel() and not p.is_meta]
        if self._is_use_hidden:
            self._stop_within_forward("a part of the module is compiled or scripted")
        self._look_for_shared_memory()
        self._forbidden: str | None = None
        if self.uses_gradients_unseen:
            self._forbid(f"{type(module).__name__}.training_step, which is compiled and steps its optimizers itself,")
        self.close = on_compile_start(self._on_compile_start)

    def is_allowed(self, optimizer: Optimizer) -> bool:
        """Return whether this step of ``optimizer`` may be postponed; if not, warn once of the reason."""
        reason = (
            self._forbidden
            # Asked in each step, because a callback may add another one, or set a hook on an instance.
            or why_hooks_are_not_postponed(self._trainer, self._module)
            or why_step_is_not_postponed(optimizer, self._trainer.precision_plugin)
            or (why_shards_are_not_postponed(optimizer, self._trainer) if self._of_shards else None)
        )
        if reason is not None:
            self._warn_at_once(reason)
        else:
            self._warn_of_early_uses()
        return reason is None

    def _warn_of_early_uses(self) -> None:
        """Warn of a function that waits for sums in step after step. A rare one, such as for a log, costs little."""
        user = self._updates.early_user
        self._updates.early_user = None
        self._num_early_uses = 0 if user is None else self._num_early_uses + 1
        if self._num_early_uses == EARLY_USES:
            self._warn_once(
                f"{user} has used parameters, gradients or optimizer.state between {EARLY_USES} training steps in a "
                "row, before the gradients were summed, so the reduction is not hidden behind what follows; use them "
                "every few steps, or in training_step"
            )

    @property
    def uses_gradients_unseen(self) -> bool:
        """Whether a compiled ``training_step`` steps its optimizers itself: nothing tells when it uses gradients."""
        return self._is_use_hidden and not self._module.automatic_optimization

    @property
    def goes_by_bucket(self) -> bool:
        """Whether parameters may be updated while the forward runs, a bucket at a time."""
        if self._before_forward:
            return False
        if not _clips_by_norm(self._trainer) and not _has_scaler(self._trainer):  # an overflow skips the step
            return True
        self._warn_once(
            "clipping by the norm and gradient scalers need all gradients, so each update is applied as a whole before "
            "the forward, as with overlap='load'"
        )
        return False

    def with_present_clipping(self, step: Callable[[Optimizer], None]) -> Callable[[Optimizer], None]:
        """Return ``step`` with the clipping that the Trainer has now. Callbacks may change it before ``step`` runs."""
        trainer = self._trainer
        staged = (trainer.gradient_clip_val, trainer.gradient_clip_algorithm)

        def clipped_as_staged(optimizer: Optimizer) -> None:
            present = (trainer.gradient_clip_val, trainer.gradient_clip_algorithm)
            trainer.gradient_clip_val, trainer.gradient_clip_algorithm = staged
            try:
                step(optimizer)
            finally:
                trainer.gradient_clip_val, trainer.gradient_clip_algorithm = present

        return clipped_as_staged

    def _look_for_shared_memory(self) -> None:
        shared = next(overlapping_parameters(self._module), None)
        if shared is not None:
            self._stop_within_forward(f"{shared[0]} and {shared[1]} share memory")

    def ends_before_forward(self) -> bool:
        """Return whether the whole update must be applied before the forward that begins now. Ask before each one."""
        if not self._before_forward and not self._of_shards:
            with without_torch_function():
                addresses = {p.data_ptr() for p in self._parameters}
            if len(addresses) < len(self._parameters):  # two were tied by ``p.data = q.data`` since
                self._look_for_shared_memory()
        on_compile_start(self._on_compile_start)  # again, for `torch.compiler.reset` drops it
        return self._before_forward

    def _on_compile_start(self, *_: Any) -> None:  # later versions of torch pass an argument
        """Dynamo is about to trace a function. It must find plain parameters, now and in every later step."""
        if is_in_backward() or self._of_shards:
            return
        was_pending = bool(self._updates)
        self._updates.bring_up_to_date()
        if self._updates.is_in_training_step:
            self._stop_within_forward("training_step runs compiled code")
        elif was_pending and self._forbidden is None:
            self._forbid("compiled code that runs between two training steps")

    def _stop_within_forward(self, reason: str) -> None:
        if not self._before_forward:
            self._before_forward = True
            log.warning(
                f"{self._strategy_name}: {reason}, so a use of parameters can go unseen: each update is applied as a "
                "whole before the forward, as with overlap='load'"
            )

    def _forbid(self, reason: str) -> None:
        self._forbidden = reason
        self._warn_at_once(reason)

    def _warn_at_once(self, reason: str) -> None:
        self._warn_once(
            f"{reason} must run within its own step, so the update is not postponed: the reduction is not hidden "
            "behind the loading of data or the next forward."
        )

    def _warn_once(self, text: str) -> None:
        if text not in self._warned_of:
            self._warned_of.add(text)
            log.warning(f"{self._strategy_name}: {text}")


# Modules whose optimizers compute a parameter's update from its own gradient and state alone, in one pass.
_KNOWN_OPTIMIZERS = ("torch.optim.", "lightning_dp.optim.")
# Where the code of their steps and of its wrappers is.
_KNOWN_FOLDERS = (f"{Path(torch.__file__).parent}{os.sep}", f"{Path(__file__).parents[2]}{os.sep}")


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


def runs_before_backward(trainer: Any, module: LightningModule) -> bool:
    """Return whether the module or a callback has a hook between forward and backward, which may change parameters."""
    return any(
        _overrides(module, name, LightningModule) or any(_overrides(each, name, Callback) for each in trainer.callbacks)
        for name in ("on_before_zero_grad", "on_before_backward")
    )


def why_step_is_not_postponed(optimizer: Optimizer, precision_plugin: Any = None) -> str | None:
    """Name what would notice if this step of ``optimizer`` were taken later, or return None.

    It may communicate (all ranks must then take it at the same time, while a use of a parameter can happen on one rank
    alone), call its closure, or look at gradients that change until then.
    """
    name = type(optimizer).__name__
    step = step_function(optimizer)
    of_class: Any = type(optimizer).step
    if not f"{type(optimizer).__module__}.".startswith(_KNOWN_OPTIMIZERS):
        return f"{name}.step, which is not PyTorch's own,"
    if not _is_known_code(step) or step is not of_class:
        return f"{name}.step, which somebody has replaced,"
    if has_any_step_hooks(optimizer):
        return f"a hook before or after {name}.step"
    if may_change_saved_tensors():  # a postponed step runs under no mode, and backward would get the new weights
        return f"{name}.step within torch.autograd.graph.allow_mutation_on_saved_tensors"
    if precision_plugin is not None and not type(precision_plugin).__module__.startswith(FRAMEWORK + "."):
        return f"{type(precision_plugin).__name__}.optimizer_step"
    return None


def why_shards_are_not_postponed(optimizer: Optimizer, trainer: Any) -> str | None:
    """Name what needs the shards of other ranks in a step, or return None: all ranks must take it at the same time."""
    if _clips_by_norm(trainer):
        return "clipping by the norm of gradients that are sharded"
    if _has_scaler(trainer):
        return "a gradient scaler, which looks at the gradients of all shards,"
    if not is_elementwise(type(optimizer)):
        return f"{type(optimizer).__name__}, which may compute with whole parameters,"
    return None


def _clips_by_norm(trainer: Any) -> bool:
    return bool(trainer.gradient_clip_val) and trainer.gradient_clip_algorithm in (None, "norm")


def _has_scaler(trainer: Any) -> bool:
    return getattr(trainer.precision_plugin, "scaler", None) is not None


def _is_known_code(function: Any) -> bool:
    """Whether ``function`` and all that it wraps are PyTorch's or this package's.

    `functools.wraps` gives a user's function the name, the module and the marks of what it wraps, but not its code.
    """
    while function is not None:
        if not (file_of(function) or "").startswith(_KNOWN_FOLDERS):
            return False
        function = getattr(function, "__wrapped__", None)
    return True


def _overrides(instance: object, name: str, base: type) -> bool:
    """Whether the hook is not the base class's; it may be set on the instance alone, as LambdaCallback does."""
    return getattr(getattr(instance, name), "__func__", None) is not getattr(base, name)
