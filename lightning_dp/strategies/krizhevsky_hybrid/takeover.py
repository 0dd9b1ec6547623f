"""What hybrid parallelism replaces during ``fit``, and how each replacement is undone.

- The head's ``forward``, and in training steps the module's ``head_step``: they run passes through the sharded head.
- ``state_dict``, ``load_state_dict`` and ``copy.deepcopy`` of the head: they convert between rows and whole tensors.
- The precision plugin's clipping by norm, and its gradient scaler: both must take all ranks' shards into account.
- DDP's list of parameters: the head's are left out.

What a call of the head means depends on when it comes, and is set by replacing ``forward``, never by a flag:

==================================  ==================================  ================================
when                                ``head(x)`` calls                   who must call it
==================================  ==================================  ================================
in ``training_step``, in backward   `HeadPasses.own_batch`              all ranks
in ``head_step``                    `HeadPasses.forward_in_pass`        all ranks, with the same features
in validation, between steps        `Takeover._forward_outside`         any rank alone
==================================  ==================================  ================================

With ``evaluation="sharded"`` the head is never whole: a call in validation is made by all ranks, and one between steps
is refused.
"""

from __future__ import annotations

import inspect
import logging
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim import Optimizer

from lightning_dp._lightning import LightningModule
from lightning_dp._private.torch_names import ignore_in_ddp, scaler_device, stop_ignoring_in_ddp
from lightning_dp.strategies.krizhevsky_hybrid.counting_metrics import no_counting
from lightning_dp.strategies.krizhevsky_hybrid.gathered_head import GatheredHead
from lightning_dp.strategies.krizhevsky_hybrid.head_passes import HeadPasses
from lightning_dp.strategies.krizhevsky_hybrid.head_update import clip_by_global_norm, update_head
from lightning_dp.strategies.krizhevsky_hybrid.initial_rows import InitialRows
from lightning_dp.strategies.krizhevsky_hybrid.sharded_head import SharedByCopies
from lightning_dp.strategies.krizhevsky_hybrid.state_dict_hooks import StateDictHooks
from lightning_dp.strategies.krizhevsky_hybrid.step_arguments import require_features

log = logging.getLogger(__name__)

HeadStep = Callable[..., Tensor]


class Takeover(SharedByCopies):
    """The replacements for one run of ``fit``. They are in place from construction to `undo`.

    Args:
        module: the user's module, whose head is sharded.
        passes: the passes through that head.
        plugin: Lightning's precision plugin.
        variable_batch: whether the head is updated after each pass.
        optimizers: returns the optimizers. They do not exist yet when the replacements are made.
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
        self._gathered: GatheredHead | None = None  # from `gather_head` to the next training step
        self._initial: InitialRows | None = None  # from `remember_rows` to the first training step
        self.state_dict_hooks = StateDictHooks(passes.head, lambda: self._gathered)
        # If one of these raises, the block undoes those before it. The user's module must not keep half of them.
        with ExitStack() as stack:
            stack.enter_context(passes.head.forwarding_to(self._forward_outside))
            stack.enter_context(self.state_dict_hooks.installed())
            stack.enter_context(replaced(plugin, "clip_grad_by_norm", self._clip_grad_by_norm))
            stack.enter_context(_sharded_scaler(plugin))
            stack.enter_context(_ignored_in_ddp(module, list(passes.head.names_in(module))))
            self._stack = stack.pop_all()

    def undo(self) -> None:
        """Put everything back, the last replacement first. A second call does nothing."""
        self._stack.close()

    def remember_rows(self) -> None:
        """Remember the rows at the end of set-up, for a warning if a hook changes them before the first step."""
        self._initial = InitialRows(self._passes.head)

    @property
    def has_current_head(self) -> bool:
        """Whether the head was gathered, and the rows of this rank are still those that were gathered."""
        return self._gathered is not None and self._gathered.is_current and self._gathered.has_same_rows

    def gather_head(self) -> None:
        """Gather the head, so that each rank can call it alone until the next training step. All ranks must call it."""
        self._gathered = None  # free the old one first, or two whole heads would be in memory
        self._gathered = GatheredHead(self._passes.head)

    def forget_gathered_head(self) -> None:
        """Free the gathered head: the rows are about to change, or it is no longer needed."""
        self._gathered = None

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """Make calls of the head collective within the context: all ranks must make the same calls."""
        with self._passes.head.forwarding_to(self._passes.own_batch):
            yield

    @contextmanager
    def training_step(self) -> Iterator[None]:
        """Run a training step within the context: calls of the head and of ``head_step`` are collective.

        Raises:
            ValueError: ``variable_batch`` is on, and ``head_step`` was not called.
        """
        passes, module = self._passes, self._module
        num_steps = passes.num_steps
        passes.begin_training_step(module)
        if self._initial is not None and not self.state_dict_hooks.has_loaded:
            self._initial.warn_if_changed()
        self._initial = None
        self.forget_gathered_head()
        with ExitStack() as stack:
            stack.enter_context(self.exchanging())
            if hasattr(module, "head_step"):
                stack.enter_context(replaced(module, "head_step", self._with_passes(cast(HeadStep, module.head_step))))
            try:
                yield
            except Exception as error:
                # Errors of ours name their own cause.
                if passes.num_calls == 0 and not is_raised_here(error):
                    self._hint_at_weights()
                raise
        if self._variable_batch and passes.num_steps == num_steps:
            raise ValueError(
                "variable_batch=True updates the head within head_step, and training_step did not call it; call "
                f"self.head_step(features, target) instead of self.{passes.head.name}(features)"
            )

    @contextmanager
    def backward(self, loss: Tensor) -> Iterator[None]:
        """Run backward of ``loss`` within the context, in which it may call the head (`torch.utils.checkpoint`).

        Raises:
            ValueError: the loss leaves out what the head has returned, or there are wrong gradients in the head.
        """
        # Manual optimization may have several losses, of which only some go through the head.
        if self._module.automatic_optimization:
            self._passes.require_part_in(loss)
        with self.exchanging():
            yield
        self._check_gradients()

    def _check_gradients(self) -> None:
        """Raise ValueError if backward has left wrong gradients in the head.

        With ``variable_batch``, ``head_step`` has consumed all gradients of the head. A gradient that is left comes
        from elsewhere, for example from a penalty on the weights. The optimizer would make an additional update of the
        head with that gradient alone.
        """
        head = self._passes.head
        if not any(p.grad is not None for p in head.parameters):
            return
        if self._variable_batch:
            raise ValueError(
                f"{head.name!r} got a gradient outside of head_step, where variable_batch=True updates it; compute "
                "everything that trains the head (a penalty on its weights, too) within head_step"
            )
        if self._passes.num_calls == 0:
            raise ValueError(
                f"{head.name!r} got a gradient, but training_step never called it: it seems to {self._read_weights()}"
            )

    def _hint_at_weights(self) -> None:
        """Log a likely cause, beside the error itself, when the first step fails before it has called the head."""
        log.warning(f"training_step failed before it called the head. It may {self._read_weights()}")

    def _read_weights(self) -> str:
        """Return the end of a message: what ``training_step`` seems to do, and the remedy."""
        name = self._passes.head.name
        return (
            f"read the weights of {name!r} directly, as F.normalize(self.{name}.weight) does. During fit, rank "
            f"{self._passes.channel.rank} holds only its own rows of them. Call the head as a module, or pass another "
            "submodule as head=..."
        )

    def _forward_outside(self, features: Tensor) -> Tensor:
        name = self._passes.head.name
        if self._gathered is None:
            raise RuntimeError(
                f"{name!r} was called on rank {self._passes.channel.rank} outside of a training step, but the whole "
                f"head has not been gathered: the rank holds only its own rows. Call {name!r} in validation "
                "(evaluation='gathered' gathers it there), or have all ranks call trainer.strategy.gather_head() first"
            )
        if not self._gathered.is_current:
            raise RuntimeError(
                f"the parameters of {name!r} were changed on rank {self._passes.channel.rank} after they had been "
                "gathered from all ranks; have all ranks call trainer.strategy.gather_head() again, then call the head"
            )
        return self._gathered.forward(features)

    def _with_passes(self, head_step: HeadStep) -> HeadStep:
        """Return what replaces ``head_step``: it runs the user's on the samples of all ranks, pass by pass."""
        signature = inspect.signature(head_step)

        def run(*args: Any, **kwargs: Any) -> Tensor:
            # Without gradients there is no backward to run at once: the head's own call exchanges what is needed.
            if not torch.is_grad_enabled():
                return head_step(*args, **kwargs)
            # Bound by name, so that each argument keeps its place however the user passes it. The first parameter is
            # the features, whatever it is called.
            arguments = signature.bind(*args, **kwargs).arguments
            first = next(iter(arguments))
            features = arguments.pop(first)
            require_features(features, f"head_step's first argument, {first!r},")

            def of_pass(x: Tensor, others: dict[str, Any]) -> Tensor:
                bound = inspect.BoundArguments(signature, {first: x, **others})
                return head_step(*bound.args, **bound.kwargs)

            return self._step(features, arguments, of_pass)

        return run

    def _step(self, features: Tensor, arguments: dict[str, Any], head_step: HeadStep) -> Tensor:
        passes, trainer = self._passes, self._module.trainer
        scaler = getattr(self._plugin, "scaler", None)
        scale = {} if scaler is None else {"scale": scaler.scale}
        named = self._module.named_parameters()
        others = {name: p for name, p in named if p.requires_grad and not passes.head.owns(p)}
        # With variable_batch the head's updates are done when backward begins. Whatever the user multiplies the loss by
        # afterwards reaches the trunk alone, so it may only be what Lightning itself divides by. On GPUs it is checked
        # in the first step only: reading the factor waits.
        only_factor = None
        if self._variable_batch and not (features.is_cuda and passes.num_steps):
            only_factor = 1 / trainer.accumulate_grad_batches
        update = self._update_head if self._variable_batch else None
        with no_counting(self._module, passes.channel.world_size):
            return passes.step(features, arguments, head_step, update, others=others, only_factor=only_factor, **scale)

    def _update_head(self, gradients: Any) -> None:
        update_head(self._module, self._plugin, self._optimizers(), self._passes.head, gradients)

    def _clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        clip_by_global_norm(self._plugin.main_params(optimizer), clip_val, self._passes.head)


def is_raised_here(error: BaseException) -> bool:
    """Return whether a module of this package has raised ``error``, or called what raised it."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].f_globals.get("__name__", "").startswith("lightning_dp.")


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Within the context, give the instance ``owner`` another value of an attribute."""
    was_set = name in vars(owner)
    before = vars(owner).get(name)
    # Past __setattr__, with which a module would register the value as a submodule or parameter.
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
    """If one rank's shard overflows, skip the step on all ranks. Otherwise their trunks would differ afterwards."""
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
    """Keep DDP from reducing these parameters, which differ between ranks, and from broadcasting those of rank 0."""
    ignore_in_ddp(module, names)
    try:
        yield
    finally:
        stop_ignoring_in_ddp(module, names)
