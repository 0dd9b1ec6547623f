"""What hybrid parallelism replaces while fitting, and how each replacement is undone.

- the head's ``forward``, and the module's ``head_step``: passes through the sharded head;
- the precision plugin's clipping by norm, and its gradient scaler: decisions that need all ranks' slices;
- DDP's list of parameters: the head's are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim import Optimizer

from lightning_dp._lightning import LightningModule
from lightning_dp._private.torch_names import ignore_in_ddp, scaler_device, stop_ignoring_in_ddp
from lightning_dp.strategies.krizhevsky_hybrid.head_passes import HeadPasses, HeadStep
from lightning_dp.strategies.krizhevsky_hybrid.head_update import clip_by_global_norm, update_head


class Takeover:
    """The replacements for one run of ``fit``; they are in place until `undo`.

    Args:
        module: the user's module, whose head is sharded.
        passes: the passes through that head.
        plugin: Lightning's precision plugin.
        variable_batch: update the head after each pass.
        optimizers: returns the optimizers, which do not exist yet when the replacements are made.
    """

    def __init__(
        self,
        module: LightningModule,
        passes: HeadPasses,
        plugin: Any,
        variable_batch: bool,
        optimizers: Callable[[], list[Optimizer]],
    ) -> None:
        self._module = module
        self._passes = passes
        self._plugin = plugin
        self._variable_batch = variable_batch
        self._optimizers = optimizers
        # Leaving this block by an exception undoes what is replaced so far.
        with ExitStack() as stack:
            stack.enter_context(passes.head.forwarding_to(passes.own_batch))
            if hasattr(module, "head_step"):
                self._head_step = cast(HeadStep, module.head_step)
                stack.enter_context(replaced(module, "head_step", self._run_head_step))
            stack.enter_context(replaced(plugin, "clip_grad_by_norm", self._clip_grad_by_norm))
            stack.enter_context(_sharded_scaler(plugin))
            stack.enter_context(_ignored_in_ddp(module, list(passes.head.names_in(module))))
            self._stack = stack.pop_all()

    def undo(self) -> None:
        """Put everything back, the last replacement first. A second call does nothing."""
        self._stack.close()

    def _run_head_step(self, features: Tensor, target: Any) -> Tensor:
        """Run the module's ``head_step`` on the examples of all ranks, pass by pass; in evaluation, on its own ones."""
        if not (torch.is_grad_enabled() and self._module.trainer.training):
            return self._head_step(features, target)
        scaler = getattr(self._plugin, "scaler", None)
        scale = {} if scaler is None else {"scale": scaler.scale}
        update = self._update_head if self._variable_batch else None
        named = self._module.named_parameters()
        others = {name: p for name, p in named if p.requires_grad and not self._passes.head.owns(p)}
        return self._passes.step(features, target, self._head_step, update, others=others, **scale)

    def _update_head(self, gradients: Any) -> None:
        update_head(self._module, self._plugin, self._optimizers(), self._passes.head, gradients)

    def _clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        clip_by_global_norm(self._plugin.main_params(optimizer), clip_val, self._passes.head)


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute of the instance ``owner`` within."""
    was_set = name in vars(owner)
    before = vars(owner).get(name)
    # Modules and plugins may define __setattr__; what is put there for a while must not be registered anywhere.
    object.__setattr__(owner, name, value)
    try:
        yield
    finally:
        if was_set:
            object.__setattr__(owner, name, before)
        else:
            object.__delattr__(owner, name)


@contextmanager
def _sharded_scaler(plugin: Any) -> Iterator[None]:
    """Let an overflow in one rank's slice skip the step on all ranks: their parameters would differ after it."""
    scaler = getattr(plugin, "scaler", None)
    if scaler is None or isinstance(scaler, ShardedGradScaler):
        yield
        return
    sharded = ShardedGradScaler(scaler_device(scaler))
    sharded.load_state_dict(scaler.state_dict())
    with replaced(plugin, "scaler", sharded):
        try:
            yield
        finally:
            scaler.load_state_dict(sharded.state_dict())


@contextmanager
def _ignored_in_ddp(module: LightningModule, names: list[str]) -> Iterator[None]:
    """Keep DDP from reducing these parameters, which are different on each rank, and from broadcasting rank 0's."""
    ignore_in_ddp(module, names)
    try:
        yield
    finally:
        stop_ignoring_in_ddp(module, names)
