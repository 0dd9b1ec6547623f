"""One run of ``fit``: what exists from set-up to teardown, and what is replaced meanwhile.

`HybridFitState` is the life of it. What a call of the head means depends on when it comes, and is set by replacing its
``forward``, never by a flag:

- in ``training_step``, and in backward: `HeadPasses.forward_local_batch`. All ranks must call it;
- in ``head_step``: `MicroBatch`. All ranks call it with the same features;
- in validation and between steps: `_OutsideSteps`. Any rank may call it alone.

With ``evaluation="sharded"`` the head is never whole: a call in validation is made by all ranks, and one between steps
raises. So does one after a run that has left a rank's local shard in the head.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from types import MethodType
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim import Optimizer

from lightning_dp._lightning import Callback, DDPStrategy, LightningModule
from lightning_dp._private.lightning_names import end_when_stop_check_times_out, strategy_timeout
from lightning_dp._private.torch_names import (
    ShardedScaler,
    ignore_in_ddp,
    is_in_backward,
    scaler_device,
    stop_ignoring_in_ddp,
    tree_leaves,
    tree_map_only,
)
from lightning_dp.collectives.all_to_all import Channel, make_host_group
from lightning_dp.collectives.groups import OnStage, destroy_group, unbound_default_group
from lightning_dp.collectives.point_to_point import peer_error
from lightning_dp.layers.surgery import local_statistics
from lightning_dp.losses import LastLayer, ShardedForward
from lightning_dp.strategies.base import is_a
from lightning_dp.strategies.krizhevsky_hybrid import checks
from lightning_dp.strategies.krizhevsky_hybrid.checks import Options, no_counting, nothing_recorded
from lightning_dp.strategies.krizhevsky_hybrid.exchange import Scheme, require_features
from lightning_dp.strategies.krizhevsky_hybrid.head import ShardedHead, SharedOnDeepcopy, replaced
from lightning_dp.strategies.krizhevsky_hybrid.passes import HeadPasses, require_same_factor
from lightning_dp.strategies.krizhevsky_hybrid.state import (
    GatheredHead,
    ShardedParameters,
    State,
    StateDictHooks,
    gather_optimizer_state,
    gather_parameters,
    make_whole,
    own_optimizer_state,
    require_one_trunk,
    shard_state,
)

log = logging.getLogger(__name__)

HeadStep = Callable[..., Tensor]


class HybridFitState(SharedOnDeepcopy):
    """Shards the head of ``module`` for one run of ``fit``, and makes it whole again. All ranks must construct it.

    From construction to the end of the run, these are replaced:

    - The head's ``forward``, and in training steps the module's ``head_step``: they run passes through the head.
    - ``state_dict``, ``load_state_dict`` and ``copy.deepcopy`` of the head: see `StateDictHooks`.
    - The precision plugin's clipping by norm, and its gradient scaler: both must take all ranks' shards into account.
    - DDP's list of parameters: the head's are left out.

    A run ends with one of three methods: `fail` if set-up fails, `abandon` after an exception, otherwise `finish`.

    Args:
        options: the user's arguments.
        module: on the device where it was built, usually the CPU.
        strategy: the Trainer's. Its optimizers need not exist yet.
        on_stage: called with name, start and end of each stage.

    Raises:
        ValueError: the module, its head or the Trainer has something that does not work with a sharded head.
    """

    def __init__(self, options: Options, module: LightningModule, strategy: DDPStrategy, on_stage: OnStage) -> None:
        self._options = options
        self._gathers = options.evaluation == "gathered"
        self._keeps_shards = options.state_dict_type == "sharded"
        self._module = module
        self._strategy = strategy
        self._device = strategy.root_device
        self._gathered: GatheredHead | None = None  # until the next training step
        # Of each optimizer, how many trainable parameters its groups had when it was checked.
        self._checked: WeakKeyDictionary[Optimizer, list[int]] = WeakKeyDictionary()
        self._cut: WeakKeyDictionary[Optimizer, Any] = WeakKeyDictionary()  # of each optimizer, the state that was cut
        checks.check_module(module, module.trainer, options.head, options.variable_batch)
        # If anything in here raises, what was done is undone, the last first, and the user's module is as it was. Where
        # all goes well, `pop_all` keeps the callbacks for the end, when `succeed` has left nothing to restore.
        with ExitStack() as stack:
            timeout = strategy_timeout(strategy)
            sharded = sharded_passes(
                module, options.head, options.scheme, options.num_passes, self._device, timeout, on_stage
            )
            self.passes, self._parameters = stack.enter_context(sharded)
            self.head, features = self.passes.head, self.passes.channel
            self._places = Channel(features.host_group or features.group, hint=checks.LIKELY_REASONS)  # see `meet`
            self._state_dict_hooks = StateDictHooks(self.head, lambda: self._gathered)
            self._replace(stack)
            self._stack = stack.pop_all()

    def _replace(self, stack: ExitStack) -> None:
        """Replace what the class lists. ``stack`` undoes it, the last first."""
        plugin = self._strategy.precision_plugin
        stack.enter_context(self.head.forwarding_to(_OutsideSteps(self._current_head)))
        stack.enter_context(self._state_dict_hooks.installed())
        stack.enter_context(replaced(plugin, "clip_grad_by_norm", self._clip_grad_by_norm))
        stack.enter_context(_sharded_scaler(plugin))
        stack.callback(end_when_stop_check_times_out(self._module.trainer))

    # --- From set-up to the end ---

    def succeed(self) -> None:
        """Complete set-up, and gather the head for what comes before the first step. All ranks must call it.

        Raises:
            ValueError: an optimizer cannot work on a local shard.
        """
        self._check_optimizers()
        # If set-up has failed on another rank, this call fails, while `fail` can still restore the module.
        self.head.control.all_gather("end of set-up", torch.zeros(1, device=self._device))
        self._parameters.keep()
        self.head.cut_assigned()  # by configure_optimizers
        self._shard_states()
        if self._gathers:
            self._gather_now()
        self._stack.enter_context(GatherHead(self).installed(self._module))
        self._stack.enter_context(_in_summaries(self._module.trainer, self._shown_whole))

    def fail(self) -> None:
        """Restore the module after set-up has failed on this rank. No other rank is needed."""
        if self._parameters.restore():
            self._stack.close()
        else:
            self.abandon()

    def abandon(self) -> None:
        """Leave the local shard in the head. After an exception the other ranks may be gone, and theirs with them."""
        self._leave_shards("after an exception", "Build the module again and load a checkpoint before you use it")

    def finish(self) -> None:
        """Make the head and its optimizer states whole again on every rank, in host memory. All ranks must call it."""
        self.meet()
        if self._keeps_shards:
            self._leave_shards(
                "after fit with state_dict_type='sharded'",
                "To use the whole head, convert a checkpoint with lightning_dp.strategies.consolidate_checkpoint, and "
                "load it into a new module",
            )
        else:
            # The gathered values were copies. Free them and the memory of gradients first, because what follows is the
            # peak of memory: each rank ends with the whole weights and optimizer states.
            self._forget_gathered()
            self.passes.gradient_memory.clear()
            for optimizer in self._strategy.optimizers:
                make_whole(optimizer, self.head)
            self._parameters.unshard()
            self._stack.close()

    def _leave_shards(self, when: str, remedy: str) -> None:
        """End with this rank's local shard in the head, which must not be called: it has some of the outputs only."""
        self._stack.close()
        name, channel = self._options.head, self.head.channel
        if channel.world_size > 1:  # otherwise the shard is the whole head
            log.warning(f"{when} rank {channel.rank} holds only its local shard of {name!r}. {remedy}")
            for layer in (self.head.head, *self.head.linears):
                vars(layer)["forward"] = partial(_refuse_shard, name)

    @contextmanager
    def marked(self) -> Iterator[None]:
        """Let the module have one parameter more within the context, in which DDP wraps it: the mark of the head.

        With ``find_unused_parameters`` DDP leaves out what a backward does not reach, once that has reached the first
        of DDP's parameters. Without the mark, one that reaches the head alone would leave the trunk's gradients of
        earlier batches unreduced, or end the next backward in an error.
        """
        name, parameter = "mark_of_the_head", self.head.parameters[0]
        self.passes.mark = nn.Parameter(parameter.new_zeros(()))
        self._module.register_parameter(name, self.passes.mark)
        try:
            yield
        finally:
            delattr(self._module, name)

    # --- Steps ---

    @contextmanager
    def training_step(self) -> Iterator[None]:
        """Run a training step within the context: calls of the head and of ``head_step`` are collective.

        Raises:
            ValueError: ``variable_batch`` is on, and ``head_step`` was not called; or the ranks have multiplied the
                loss of ``head_step`` by different factors in the step before.
        """
        self._check_optimizers()  # before head_step, which may update the head
        self.head.cut_assigned()
        self._shard_states()
        passes = self.passes
        own = passes.take_factors()
        factors = own.repeat(self._places.world_size, 1)
        said = self._places.all_to_all("training step", [own] * len(factors), list(factors))  # see `meet`
        num_steps = passes.num_steps
        passes.begin_training_step(self._module)
        checks.check_hooks(self.head)
        self._forget_gathered()  # the local shard is about to change
        try:
            with self._running_passes():
                yield
        except StopIteration:  # by which an iterator that training_step reads ends the epoch, on all ranks
            said.wait()
            require_same_factor(factors)
            raise
        if self._options.variable_batch and passes.num_steps == num_steps:
            raise ValueError(
                "variable_batch=True updates the head within head_step, and training_step did not call it; call "
                f"self.head_step(features, target) instead of self.{self.head.name}(features)"
            )
        said.wait()
        require_same_factor(factors)
        # 1, 2, 4, 8, ...: most mistakes show at once, and later it costs nothing.
        if passes.num_training_steps.bit_count() == 1:
            require_one_trunk(self._module, self.head)

    @contextmanager
    def backward(self, loss: Tensor) -> Iterator[None]:
        """Run backward of ``loss`` within the context, in which it may call the head (`torch.utils.checkpoint`).

        Raises:
            ValueError: the loss leaves out what the head has returned, or there are wrong gradients in the head.
        """
        places, said = self._places, None
        # Manual optimization may have several losses, of which only some go through the head.
        if self._module.automatic_optimization:
            self.passes.require_part_in(loss)
            # A rank that is still in a call of the head, which this one has not made, receives it there, and raises.
            if not self.passes.sends_in_backward_of(loss):
                here = torch.zeros(places.world_size, 1)
                said = places.all_to_all("backward", list(here), list(here.clone()))
        # Old gradients are gone by now: a head_step in the module's `backward` or `on_after_backward` adds to new ones.
        with replaced(self, "_forget_old_gradients", lambda: None), self._running_passes():
            yield
        if said is not None:
            said.wait()
        self._check_gradients()
        self._check_optimizers()  # again, because on_after_backward may have changed them

    def validation_step(self) -> AbstractContextManager[None]:
        """Run a validation step within the context. If the head is never gathered, its calls are collective there."""
        return nullcontext() if self._gathers else self.head.forwarding_to(self.passes.forward_local_batch)

    @contextmanager
    def _running_passes(self) -> Iterator[None]:
        """Make calls of the head and of ``head_step`` collective within the context."""
        module, forward = self._module, self.passes.forward_local_batch
        # They are already in a backward of manual optimization, within training_step. Wrapped twice, a head_step that
        # runs again there (`torch.utils.checkpoint`) would get each sample once per rank.
        is_nested = vars(self.head.head)["forward"] == forward
        with ExitStack() as stack:
            stack.enter_context(self.head.forwarding_to(forward))
            if hasattr(module, "head_step") and not is_nested:
                stack.enter_context(replaced(module, "head_step", self._with_passes(cast(HeadStep, module.head_step))))
            yield

    def _check_gradients(self) -> None:
        """Raise ValueError if backward has left wrong gradients in the head.

        With ``variable_batch``, ``head_step`` has consumed all gradients of the head. A gradient that is left comes
        from elsewhere, for example from a penalty on the weights. The optimizer would make an additional update of the
        head with that gradient alone.
        """
        head = self.head
        if not any(p.grad is not None for p in head.parameters):
            return
        if self._options.variable_batch:
            raise ValueError(
                f"{head.name!r} got a gradient outside of head_step, where variable_batch=True updates it; compute "
                "everything that trains the head (a penalty on its weights, too) within head_step"
            )
        if self.passes.num_calls == 0:
            raise ValueError(
                f"{head.name!r} got a gradient, but training_step never called it: it seems to read the "
                f"weights of {head.name!r} directly, as F.normalize(self.{head.name}.weight) does. During fit, rank "
                f"{head.channel.rank} holds only its local shard of them. Call the head as a module, or pass "
                "another submodule as head=..."
            )

    # --- The whole head, between steps ---

    def gather(self) -> None:
        """Gather the head, so that each rank can call it alone until the next training step. All ranks must call it."""
        self.meet()
        self._gather_now()

    def gather_if_changed(self) -> None:
        """Gather the head unless what was gathered is still the same on all ranks. All ranks must call it.

        They only `meet` if it is never gathered.

        At the start of a validation this comes after the hooks of all callbacks. A callback may have put averaged
        weights into the module. `GatherHead` may be missing: Lightning's tuner removes callbacks.
        """
        self.meet()
        if not self._gathers:
            return
        gathered = self._gathered
        is_current = gathered is not None and gathered.is_current and gathered.has_same_shard
        is_changed = torch.tensor([float(not is_current)], device=self._device)
        if self.head.control.all_gather("is changed", is_changed).any():
            self._gather_now()

    def _gather_now(self) -> None:
        self._forget_gathered()  # first, or two whole heads would be in memory
        self._gathered = GatheredHead(self.head)

    def _forget_gathered(self) -> None:
        if self._gathered is not None:
            self._gathered.require_unwritten()
        self._gathered = None

    def meet(self) -> None:
        """Raise CallMismatchError if a rank is in another batch, instead of waiting for it. All ranks must call it.

        Raise ValueError if the ranks have multiplied a loss of ``head_step`` by different factors since they last met.

        A rank whose loader has ended comes here, while the others begin another batch. Each rank says so at the begin
        of a training step, and does not wait for the answer, so this rank receives it in place of what it expects.
        """
        self._state_dict_hooks.return_instead({})
        # Before a batch, Lightning broadcasts from rank 0 whether the job was told to stop, in the default group: 0 or
        # 1, one integer. The ranks that wait for that number get it from here, and go on to their training step.
        go_on = torch.zeros(1, dtype=torch.int64, device=self._device)
        try:
            dist.broadcast(go_on, src=0)
        except RuntimeError as error:
            group = dist.group.WORLD
            assert group is not None
            raise peer_error(group, "reach", 0 if dist.get_rank() else 1, error) from error
        require_same_factor(self._places.all_gather("between training steps", self.passes.take_factors()))
        self.head.cut_assigned()

    def _current_head(self) -> GatheredHead:
        """Return the gathered head, or raise RuntimeError if there is none, or the shard has changed since."""
        name, rank = self.head.name, self.head.channel.rank
        if self._gathered is None:
            raise RuntimeError(
                f"{name!r} was called on rank {rank} outside of a training step, but the whole head has not been "
                f"gathered: the rank holds only its local shard. Call {name!r} in validation (evaluation='gathered' "
                "gathers it there), or have all ranks call trainer.strategy.gather_head() first"
            )
        if not self._gathered.is_current:
            raise RuntimeError(
                f"the parameters of {name!r} were changed on rank {rank} after they had been gathered from all ranks; "
                "have all ranks call trainer.strategy.gather_head() again, then call the head"
            )
        return self._gathered

    @contextmanager
    def _shown_whole(self) -> Iterator[None]:
        """Give the parameters their whole shapes within the context, for Lightning's summary, and no values."""
        head = self.head

        def of_its_shape(input: Tensor) -> Tensor:
            return head.by_rows(lambda x: x.new_zeros(len(x), head.output_bounds[-1][1]), input)

        shards = {p: p.data for p in head.parameters}
        with head.forwarding_to(of_its_shape if self._gathered is None else self._gathered.forward):
            for p, shard in shards.items():
                p.data = shard.new_empty(1).expand(head.whole_shape(p))  # one number in memory
            try:
                yield
            finally:
                for p, shard in shards.items():
                    p.data = shard

    # --- Checkpoints ---

    def module_state(self, state_dict: Callable[[], State]) -> State:
        """Return the module's state for a checkpoint: whole on rank 0, or the local shard. All ranks must call it."""
        self.meet()
        require_one_trunk(self._module, self.head)
        head = self.head
        values = {p: p.detach() for p in head.parameters} if self._keeps_shards else gather_parameters(head)
        # A module may give its parameters other names and forms in its state_dict.
        with self._state_dict_hooks.returning(values):
            state = state_dict()
        # If it lists the parameters themselves, these hold the local shard again. Otherwise it stays the same object: a
        # new dictionary would lose the versions of the layers, which torch keeps in an attribute of it.
        if any(isinstance(each, Tensor) and each in values for each in tree_leaves(state)):
            state = tree_map_only(Tensor, lambda each: values.get(each, each), state)
        if self._keeps_shards or self._gathered is None or not self._gathered.is_current:
            self._state_dict_hooks.return_instead(values)
        return state

    def end_checkpoint(self) -> None:
        """Let ``state_dict`` return what is gathered again: the hooks that change the checkpoint have run."""
        self._state_dict_hooks.return_instead({})

    def begin_loading_shards(self) -> None:
        """Let ``state_dict`` return local shards, as a sharded checkpoint has them, until the ranks `meet`."""
        self._state_dict_hooks.return_instead({p: p.detach() for p in self.head.parameters})

    def loading_checkpoint(self) -> AbstractContextManager[None]:
        """Load the module's state of a checkpoint within the context: whole tensors are cut, others are an error."""
        return self._state_dict_hooks.loading_checkpoint()

    def optimizer_state(self, optimizer: Optimizer, state: State) -> State:
        """Return an optimizer's state for a checkpoint, like `module_state`. All ranks must call it."""
        return state if self._keeps_shards else gather_optimizer_state(optimizer, state, self.head)

    def own_states(self, states: list[State]) -> list[State]:
        """Return the optimizers' states of a checkpoint, cut to the local shard."""
        # Lightning, too, ignores states without an optimizer.
        both = zip(self._strategy.optimizers, states, strict=False)
        return [own_optimizer_state(optimizer, state, self.head) for optimizer, state in both]

    # --- What a call of ``head_step`` does ---

    def _with_passes(self, head_step: HeadStep) -> HeadStep:
        """Return what replaces ``head_step``: it runs the user's on the samples of all ranks, pass by pass."""
        signature = inspect.signature(head_step)
        if [p.kind for p in signature.parameters.values()][:1] == [inspect.Parameter.VAR_POSITIONAL]:
            # That of a decorator without functools.wraps, or of an nn.Module.
            signature = inspect.signature(lambda features, *args, **kwargs: None)

        @torch.compiler.disable  # as the head's calls, which a compiled training_step or forward may make, too
        def run(*args: Any, **kwargs: Any) -> Tensor:
            # Without gradients there is no backward to run at once: the head's own call exchanges what is needed.
            if not torch.is_grad_enabled():
                return head_step(*args, **kwargs)
            # Bound by name, so that each argument keeps its place however the user passes it. The first parameter is
            # the features, whatever it is called.
            arguments = signature.bind(*args, **kwargs).arguments
            first = next(iter(arguments), "features")
            features = arguments.pop(first, None)
            require_features(features, f"head_step's first argument, {first!r},")

            def of_pass(x: Tensor, others: dict[str, Any]) -> Tensor:
                bound = inspect.BoundArguments(signature, {first: x, **others})
                return head_step(*bound.args, **bound.kwargs)

            # A call of itself within, as for the two targets of MixUp, is for the samples of all ranks already. Passes
            # of their own would have each sample once per rank.
            with replaced(self._module, "head_step", head_step):
                return self._run_head_step(features, arguments, of_pass)

        return run

    def _run_head_step(self, features: Tensor, arguments: dict[str, Any], head_step: HeadStep) -> Tensor:
        """Run ``head_step`` by `HeadPasses.step`, as the options and the precision plugin want it."""
        module, passes, plugin = self._module, self.passes, self._strategy.precision_plugin
        update = self._update_head if self._options.variable_batch else None
        only_factor: float | None = None
        if update is not None:
            if is_in_backward():
                raise RuntimeError(
                    "torch.utils.checkpoint runs head_step again in backward, and with variable_batch=True it would "
                    "update the head again; use checkpoint around the trunk alone"
                )
            # The head's updates are done when backward begins. Whatever the user multiplies the loss by afterwards
            # reaches the trunk alone, so it may only be what Lightning itself divides by. On GPUs it is checked in the
            # first step only: reading the factor waits.
            if not (features.is_cuda and passes.num_steps):
                only_factor = 1 / module.trainer.accumulate_grad_batches
        scaler = getattr(plugin, "scaler", None)
        scale = {} if scaler is None else {"scale": scaler.scale}
        others = {name: p for name, p in module.named_parameters() if p.requires_grad and not self.head.owns(p)}
        probing = partial(nothing_recorded, module)
        self._forget_old_gradients()
        # All ranks have the samples of all. In statistics of all ranks, each would count K times.
        with no_counting(module, passes.channel.world_size), local_statistics(module):
            return passes.step(
                features, arguments, head_step, update, others=others, only_factor=only_factor, probing=probing, **scale
            )

    def _update_head(self, gradients: Sequence[Tensor | None]) -> None:
        """Update the head alone with the gradients of one pass (arXiv 1404.5997, section 4.2). All ranks must call it.

        It steps the user's own optimizers, as Lightning does after a backward: with the hooks ``on_after_backward`` and
        ``on_before_optimizer_step`` and with clipping. Parameters outside the head have no gradient meanwhile, so the
        optimizers skip them.
        """
        module, optimizers = self._module, self._strategy.optimizers
        plugin: Any = self._strategy.precision_plugin
        own = dict(zip(self.head.parameters, gradients, strict=True))
        of_optimizers = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
        everything = dict.fromkeys([*module.parameters(), *of_optimizers])
        # The forward of the head may have run under autocast. An update does not.
        with _gradients_alone(everything, own), torch.autocast(self._device.type, enabled=False):
            plugin.post_backward(torch.zeros(()), module)  # calls on_after_backward; it returns the loss, unused here
            for optimizer in optimizers:
                if any(p in own for group in optimizer.param_groups for p in group["params"]):
                    plugin.optimizer_step(optimizer, model=module, closure=lambda: None)

    def _forget_old_gradients(self) -> None:
        """Free the head's gradients of the last step if Lightning would, between ``training_step`` and backward.

        The passes compute the new ones before that, and both together may not fit.
        """
        module, optimizers = self._module, self._strategy.optimizers
        # Only Lightning knows which batch is the first: it counts those of a ``dataloader_iter`` in a way of its own.
        accumulates = module.trainer.accumulate_grad_batches > 1
        is_seen = _sees_old_gradients(module, optimizers)
        if module.automatic_optimization and not (accumulates or is_seen):
            # Lightning keeps those of parameters that the user trains with an optimizer of his own.
            zeroed = {p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
            for p in zeroed.intersection(self.head.parameters):
                p.grad = None

    # --- Optimizers ---

    def _clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        clip_by_global_norm(self._strategy.precision_plugin.main_params(optimizer), clip_val, self.head)

    def _check_optimizers(self) -> None:
        """Check those that are new, or train other parameters: callbacks add groups, and replace optimizers."""
        for optimizer in self._strategy.optimizers:
            sizes = [sum(p.requires_grad for p in group["params"]) for group in optimizer.param_groups]
            if self._checked.get(optimizer) != sizes:
                checks.check_optimizer(optimizer, self.head)
                self._checked[optimizer] = sizes

    def _shard_states(self) -> None:
        """Cut what is the state of the whole head: of an optimizer that had one before `fit`, or has loaded one."""
        for optimizer in self._strategy.optimizers:
            if self._cut.get(optimizer) is not optimizer.state:  # load_state_dict makes a new dictionary
                shard_state(optimizer, self.head)
                self._cut[optimizer] = optimizer.state


@contextmanager
def sharded_passes(
    module: nn.Module,
    head: str,
    scheme: Scheme,
    num_passes: int | None,
    device: torch.device,
    timeout: timedelta,
    on_stage: OnStage | None = None,
) -> Iterator[tuple[HeadPasses, ShardedParameters]]:
    """Shard the head of ``module``, and let DDP leave it out within the context. All ranks must enter it.

    Process groups of the passes live as long as the context. Its end puts back what the head held before, unless
    `ShardedParameters.keep` was called.

    Args:
        module: contains the head.
        head: dotted name of the submodule.
        scheme: see `HeadPasses`.
        num_passes: see `HeadPasses`.
        device: of the local shard.
        timeout: of every message.
        on_stage: called with name, start and end of each stage.
    """
    # Two groups, because features travel while the head exchanges activations, and the messages of one group must start
    # in the same order on all ranks.
    with unbound_default_group(None):
        groups = [dist.new_group(timeout=timeout) for _ in range(2)]
    host = make_host_group(groups[0], device, timeout)
    hidden = Channel(groups[0], on_stage, checks.LIKELY_REASONS)
    features = Channel(groups[1], on_stage, checks.LIKELY_REASONS, host)
    # Parameters and checks travel in the features' group. If one rank gathers the head while another begins a step,
    # each receives a message that it does not expect, and raises at once. In two groups both would wait.
    control = Channel(features.group, hint=checks.LIKELY_REASONS)
    sharded = ShardedHead(module.get_submodule(head), hidden, head, control)
    parameters = ShardedParameters(sharded)
    with ExitStack() as stack:
        stack.callback(parameters.restore)
        for group in (*groups, host):
            stack.callback(destroy_group, group)
        parameters.shard(device)
        # Their values differ between ranks: DDP must neither reduce their gradients nor broadcast those of rank 0.
        names = list(sharded.names_in(module))
        ignore_in_ddp(module, names)
        stack.callback(stop_ignoring_in_ddp, module, names)
        yield HeadPasses(sharded, scheme, features, num_passes), parameters


def _sees_old_gradients(module: LightningModule, optimizers: Sequence[Optimizer]) -> bool:
    """Return whether the user has code in the hooks that run before Lightning sets gradients to zero, or does it."""
    hooks: list[Any] = [module.on_before_zero_grad, module.optimizer_zero_grad]
    hooks += [optimizer.zero_grad for optimizer in optimizers]
    trainer: Any = module.trainer
    hooks += [callback.on_before_zero_grad for callback in trainer.callbacks]
    of_lightning = {LightningModule.on_before_zero_grad, LightningModule.optimizer_zero_grad}
    own = {*of_lightning, Callback.on_before_zero_grad, Optimizer.zero_grad}
    return any(getattr(hook, "__func__", None) not in own for hook in hooks)


class _OutsideSteps(ShardedForward, SharedOnDeepcopy):
    """The head's ``forward`` outside of training steps: this rank computes all of it alone."""

    def __init__(self, current_head: Callable[[], GatheredHead]) -> None:
        self._current_head = current_head

    @torch.compiler.disable
    def __call__(self, input: Tensor) -> Tensor:
        return self._current_head().forward(input)

    @torch.compiler.disable
    def last_layer(self, features: Tensor) -> LastLayer | None:
        """See `ShardedForward`."""
        return self._current_head().last_layer(features)


def _refuse_shard(name: str, *_: Any, **__: Any) -> Tensor:
    raise RuntimeError(
        f"{name!r} holds only one rank's local shard: its last run ended with an exception, or has "
        "state_dict_type='sharded'. Build the module again, and load a checkpoint"
    )


@contextmanager
def _sharded_scaler(plugin: Any) -> Iterator[None]:
    """If one rank's shard overflows, skip the step on all ranks. Otherwise their trunks would differ afterwards."""
    scaler = getattr(plugin, "scaler", None)
    if scaler is None or not scaler.is_enabled() or isinstance(scaler, ShardedGradScaler):
        yield
        return
    sharded = ShardedScaler(scaler_device(scaler))
    sharded.load_state_dict(scaler.state_dict())
    with replaced(plugin, "scaler", sharded):
        try:
            yield
        finally:
            scaler.load_state_dict(sharded.state_dict())


@contextmanager
def _in_summaries(trainer: Any, shown_whole: Callable[[], Any]) -> Iterator[None]:
    """Run Lightning's summaries of the model in the context of ``shown_whole``. They would count this rank's shard."""

    def summarize(on_fit_start: Callable[..., None], *args: Any) -> None:
        with shown_whole():
            on_fit_start(*args)

    with ExitStack() as stack:
        for callback in trainer.callbacks:
            if is_a(callback, "ModelSummary"):
                stack.enter_context(replaced(callback, "on_fit_start", partial(summarize, callback.on_fit_start)))
        yield


# --- When the whole head is gathered ---


class GatherHead(SharedOnDeepcopy, Callback):
    """Gathers the head when training or a validation begins, and when training ends.

    It is a callback because Lightning calls the hooks of callbacks first, then those of the module, and those of the
    strategy last. From a hook of the strategy, the gather would come after the ``on_validation_start`` and
    ``on_train_end`` of all others, which may call the head.
    """

    def __init__(self, fitting: HybridFitState) -> None:
        self._fitting = fitting

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Gather if something has changed the local shard since set-up. Lightning calls this on all ranks.

        A checkpoint may have been loaded, or a callback has put other weights in for the sanity check and back.
        """
        self._fitting.gather_if_changed()

    def on_validation_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Gather what training has changed. Lightning calls this on all ranks, also on those without a batch."""
        self._fitting.gather_if_changed()

    def on_train_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Meet, before Lightning reduces the metrics of the epoch, in which ranks would wait for those in a batch."""
        self._fitting.meet()

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Gather what training has changed. Lightning calls this on all ranks."""
        self._fitting.gather_if_changed()

    @contextmanager
    def installed(self, module: LightningModule) -> Iterator[None]:
        """Be the first of the Trainer's callbacks within the context, and gather after ``on_validation_epoch_start``.

        In that hook, callbacks and the module may put in other weights, such as averages. The module's comes last.
        """
        trainer: Any = module.trainer
        own = module.on_validation_epoch_start

        def then_gather(each: LightningModule) -> None:
            if each is not module:  # a deep copy of the module, which has this method, too
                type(each).on_validation_epoch_start(each)
                return
            own()
            self._fitting.gather_if_changed()

        # A new list each time, because Lightning may be iterating over the old one.
        trainer.callbacks = [self, *trainer.callbacks]
        try:
            with replaced(module, "on_validation_epoch_start", MethodType(then_gather, module)):
                yield
        finally:
            trainer.callbacks = [callback for callback in trainer.callbacks if callback is not self]


# --- Gradients of the head alone, and clipping by a norm to which every rank contributes ---


@contextmanager
def _gradients_alone(parameters: Iterable[Tensor], gradients: Mapping[Tensor, Tensor | None]) -> Iterator[None]:
    """Within the context, ``parameters`` have these gradients, or none. Afterwards those of ``gradients`` have none."""
    # With gradient accumulation the trunk has gradients of earlier batches, which it keeps for its own step.
    before = {p: p.grad for p in parameters if p not in gradients}
    for p in (*before, *gradients):
        p.grad = gradients.get(p)
    try:
        yield
    finally:
        for p in (*before, *gradients):
            p.grad = before.get(p)


def clip_by_global_norm(parameters: Iterable[Tensor], clip_val: float, head: ShardedHead) -> None:
    """Clip gradients, in place, by the norm of the whole gradient. All ranks must call it.

    Each rank holds slices of the head's gradients. The norm that it would compute alone differs from the other ranks',
    and the trunks, scaled by different factors, would drift apart.
    """
    parameters = list(parameters)
    device = head.parameters[0].device
    ours = [p.grad for p in parameters if p.grad is not None and head.owns(p)]
    others = [p.grad for p in parameters if p.grad is not None and not head.owns(p)]
    norm_of_head, norm_of_others = (torch.nn.utils.get_total_norm(each).to(device) for each in (ours, others))
    # In 64 bits, because the square of a norm above 256 is infinite in 16, and all gradients would become 0.
    square_of_head = head.channel.all_gather("norm", norm_of_head.double() ** 2).sum()
    norm = (norm_of_others.double() ** 2 + square_of_head).sqrt()
    dtype = torch.promote_types(norm_of_head.dtype, norm_of_others.dtype)
    torch.nn.utils.clip_grads_with_norm_(parameters, clip_val, norm.to(dtype))
