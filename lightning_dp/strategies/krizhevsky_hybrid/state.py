"""How the head's parameters and optimizer states become local shards, and whole tensors again.

- `ShardedParameters`: the parameters themselves, at set-up and at the end.
- `gather_parameters`, `gather_optimizer_state`, `own_optimizer_state`: what a checkpoint holds.
- `GatheredHead`: the whole head on every rank, for calls outside of training steps.
- `StateDictHooks`: ``state_dict``, ``load_state_dict`` and ``copy.deepcopy``, which users call by hand.

All ranks must call a function that gathers. On a device nothing here needs more memory than the local shard and one
slice that is being sent, unless the caller wants the whole tensor on that device.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer

from lightning_dp._lightning import LightningModule
from lightning_dp._private.torch_names import (
    ddp_ignored_names,
    has_forward_hooks,
    tree_leaves,
    tree_map_only,
    version_of,
)
from lightning_dp.losses import LastLayer
from lightning_dp.strategies.krizhevsky_hybrid.head import (
    ShardedHead,
    SharedOnDeepcopy,
    refused_inner_calls,
    replaced,
    seeded,
)

log = logging.getLogger(__name__)

State = dict[str, Any]
CPU = torch.device("cpu")

# --- The parameters ---


class ShardedParameters(SharedOnDeepcopy):
    """The head's parameters. They hold the local shard from `shard` to `restore` or `unshard`."""

    def __init__(self, head: ShardedHead) -> None:
        self._head = head
        self._before: dict[Tensor, Tensor] = {}  # this rank's values before `shard`; dropped by `keep`

    def shard(self, device: torch.device) -> None:
        """Leave the local shard in the parameters, on ``device``. All ranks must call it.

        All ranks start from rank 0's values, as under DDP. Rank 0 sends them from where the module was built, usually
        host memory, so no device ever holds the whole. Layers on the meta device have no values yet: each rank
        initializes its shard with the layer's ``reset_parameters``.
        """
        head = self._head
        flags = torch.tensor([any(p.is_meta for p in layer.parameters()) for layer in head.linears], device=device)
        is_meta = head.control.all_gather("meta", flags)[0].tolist()  # on rank 0, whose values all ranks take
        seed = 0
        if any(is_meta):
            seed = int(head.control.all_gather("seed", torch.randint(2**62, (1,)).to(device))[0].item())
        for index, layer in enumerate(head.linears):
            for parameter in layer.parameters():
                if parameter not in self._before:  # two layers may share one
                    self._before[parameter] = parameter.data
                    _set_data(parameter, self._shard_of_rank_0(parameter, device, is_meta[index]))
            if is_meta[index]:
                # Other shards need other numbers, so each rank and layer has its own seed.
                with seeded(seed + index * head.channel.world_size + head.channel.rank, device):
                    layer.reset_parameters()

    def keep(self) -> None:
        """Free the values of before `shard`. Set-up has succeeded, so they are not needed any more."""
        self._before = {}

    def restore(self) -> bool:
        """Put back what the parameters held before `shard`. Set-up has failed, and other ranks may be gone.

        Returns:
            False if `keep` has freed those values, so that the parameters still hold the local shard.
        """
        for parameter, before in self._before.items():
            _set_data(parameter, before)
        is_whole = bool(self._before)
        self._before = {}
        return is_whole

    def unshard(self) -> None:
        """Gather the whole values, in host memory, where Lightning leaves a module after ``fit``."""
        for parameter in self._head.parameters:
            parameter.grad = None
            _set_data(parameter, whole_on_all_ranks(self._head, parameter.data, parameter, CPU))

    def _shard_of_rank_0(self, parameter: Tensor, device: torch.device, is_meta: bool) -> Tensor:
        """Return this rank's part of what ``parameter`` is on rank 0."""
        head, rank = self._head, self._head.channel.rank
        begin, end = head.bounds_of(parameter)[rank]
        shard = torch.empty(end - begin, *parameter.shape[1:], dtype=parameter.dtype, device=device)
        if is_meta:
            return shard
        nothing = shard.new_empty(0)
        for peer, (first, last) in enumerate(head.bounds_of(parameter)):
            if peer == 0:
                continue
            # One peer after the other, so that the GPU of rank 0 holds one slice beside its own, and not all of them.
            sends = [nothing] * head.channel.world_size
            receives = list(sends)
            if rank == 0:
                sends[peer] = parameter.data[first:last].to(device)
            elif rank == peer:
                receives[0] = shard
            head.control.all_to_all("parameters", sends, receives).wait()
        if rank == 0:
            shard.copy_(parameter.data[begin:end])
        return shard


def _set_data(parameter: Tensor, data: Tensor) -> None:
    """Give a parameter other data and no gradient. It stays the same object, which optimizers may refer to."""
    parameter.grad = None
    if parameter.is_meta != data.is_meta:  # torch refuses to assign ``.data`` from and to the meta device
        torch.utils.swap_tensors(parameter, nn.Parameter(data, parameter.requires_grad))
    else:
        # A graph that is still alive holds the node that accumulates the gradient, and that would refuse the new shape.
        # torch makes another node where the dtype changes.
        parameter.data = data.new_empty(0, dtype=torch.float16 if data.dtype == torch.float32 else torch.float32)
        parameter.data = data


def whole_on_all_ranks(head: ShardedHead, shard: Tensor, parameter: Tensor, device: torch.device) -> Tensor:
    """Gather ``shard``, of ``parameter`` or of an optimizer state like it, on every rank, on ``device``."""
    return _gather(head, shard, parameter, device, range(head.channel.world_size))


def whole_on_rank_0(head: ShardedHead, shard: Tensor, parameter: Tensor) -> Tensor:
    """Gather ``shard`` as `whole_on_all_ranks` does, in the host memory of rank 0. Other ranks get theirs back."""
    return _gather(head, shard, parameter, CPU, [0])


# A user's hook may gather in inference mode. Tensors that are made in it have no versions, and cannot be part of a
# graph afterwards.
@torch.inference_mode(False)
def _gather(
    head: ShardedHead, shard: Tensor, parameter: Tensor, device: torch.device, receivers: Sequence[int]
) -> Tensor:
    channel, bounds = head.control, head.bounds_of(parameter)
    rank, world_size = channel.rank, channel.world_size
    shard = shard.detach()
    is_receiver = rank in receivers
    whole = torch.empty(head.whole_shape(parameter) if is_receiver else 0, dtype=shard.dtype, device=device)
    blocks = [whole[begin:end] for begin, end in bounds] if is_receiver else [whole] * world_size
    if shard.device == whole.device:
        sends = [shard if peer in receivers else shard[:0] for peer in range(world_size)]
        channel.all_to_all("parameters", sends, blocks).wait()
    else:
        # Slices arrive on the GPU and are copied to host memory, one after the other, so that no GPU holds the whole.
        for source in range(world_size):
            begin, end = bounds[source]
            arriving = shard.new_empty(end - begin if is_receiver else 0, *shard.shape[1:])
            is_source = rank == source
            sends = [shard if is_source and peer in receivers else shard[:0] for peer in range(world_size)]
            receives = [arriving if peer == source else shard[:0] for peer in range(world_size)]
            channel.all_to_all("parameters", sends, receives).wait()
            if is_receiver and not is_source:
                blocks[source].copy_(arriving)
    if not is_receiver:
        return shard
    blocks[rank].copy_(shard)
    return whole


# --- What a checkpoint holds: whole tensors, gathered one after the other in the host memory of rank 0 ---


def gather_parameters(head: ShardedHead) -> dict[Tensor, Tensor]:
    """Return the value of each of the head's parameters: whole on rank 0, the local shard elsewhere."""
    return {p: whole_on_rank_0(head, p.data, p) for p in head.parameters}


def gather_optimizer_state(optimizer: Optimizer, state: State, head: ShardedHead) -> State:
    """Return ``state``, a state_dict of ``optimizer``, in which the head's part is whole on rank 0."""

    def gather(value: Tensor, p: Tensor) -> Tensor:
        return whole_on_rank_0(head, value, p) if is_like(value, p.shape) else value

    return convert_head(optimizer, state, head, gather)


def own_optimizer_state(optimizer: Optimizer, state: State, head: ShardedHead) -> State:
    """Return a copy of ``state``, a state_dict of ``optimizer``, in which the head's part is cut to the local shard.

    Everything is copied, because ``state`` may be mapped from a file that is replaced while the copy is in use.
    """

    def cut(value: Tensor, p: Tensor) -> Tensor:
        return head.local_shard(value, p).clone() if is_like(value, head.whole_shape(p)) else value

    own = convert_head(optimizer, state, head, cut)
    is_copied = {id(value) for value in tree_leaves(own)} - {id(value) for value in tree_leaves(state)}
    return tree_map_only(Tensor, lambda tensor: tensor if id(tensor) in is_copied else tensor.clone(), own)


def shard_state(optimizer: Optimizer, head: ShardedHead) -> None:
    """Cut the state of ``optimizer`` to the local shard, in place, where it is that of the whole head.

    An optimizer that the module has built before `fit`, or has kept from an earlier one, has such a state, and one that
    has loaded the state of a checkpoint by hand.
    """

    def cut(value: Tensor, p: Tensor) -> Tensor:
        is_whole = is_like(value, head.whole_shape(p)) and not is_like(value, p.shape)
        return head.local_shard(value, p).clone() if is_whole else value

    for p, values in optimizer.state.items():
        if head.owns(p):
            values.update(_convert(values, p, cut))


def make_whole(optimizer: Optimizer, head: ShardedHead) -> None:
    """Gather the state of ``optimizer`` in place, in host memory. All ranks must call it while the head is sharded."""

    def gather(value: Tensor, p: Tensor) -> Tensor:
        return whole_on_all_ranks(head, value, p, CPU) if is_like(value, p.shape) else value

    for p, values in optimizer.state.items():
        if head.owns(p):
            values.update(_convert(values, p, gather))


def convert_head(
    optimizer: Optimizer, state: State, head: ShardedHead, convert: Callable[[Tensor, Tensor], Tensor]
) -> State:
    """Return ``state``, a state_dict of ``optimizer``, with ``convert(value, parameter)`` for the head's tensors."""
    converted = {index: _convert(values, p, convert) for index, p, values in states_of_head(optimizer, state, head)}
    return state | {"state": state["state"] | converted} if converted else state


def _convert(values: State, p: Tensor, convert: Callable[[Tensor, Tensor], Tensor]) -> State:
    """Return the values of ``p`` with ``convert(value, p)`` for each tensor, also for those in lists and dicts."""
    converted: State = tree_map_only(Tensor, lambda value: convert(value, p), values)
    return converted


def states_of_head(optimizer: Optimizer, state: State, head: ShardedHead) -> Iterator[tuple[int, Tensor, State]]:
    """Yield number, parameter and values of the head's part of ``state``, a state_dict of ``optimizer``."""
    by_index = state.get("state", {})  # Lightning's stand-in for the optimizer of a module that has none is empty
    # A state_dict numbers the parameters of all groups in order.
    for index, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        if head.owns(p) and index in by_index:
            yield index, p, by_index[index]


def is_like(value: Any, shape: torch.Size) -> bool:
    """Return whether a state has one number for each of the parameter's. Momentum has; a count of steps has not."""
    return isinstance(value, Tensor) and value.shape == shape


def memory_of(tensor: Tensor) -> tuple[int, torch.Size] | None:
    """Return where the values of ``tensor`` lie, and their shape; None if that is several places, as in sparse ones."""
    try:
        return tensor.data_ptr(), tensor.shape
    except RuntimeError:
        return None


def require_one_trunk(module: LightningModule, head: ShardedHead) -> None:
    """Raise RuntimeError if the trunk's parameters differ between ranks. All ranks must call it."""
    ignored = ddp_ignored_names(module)  # the head's, and those that the user lets each rank have of its own
    # Sums differ in their last bits between kinds of processors, so they are compared with a tolerance.
    trunk = [p.detach().double().abs().sum() for name, p in module.named_parameters() if name not in ignored]
    sums = head.control.all_gather("checksums", torch.stack(trunk)) if trunk else torch.zeros(1)
    if not torch.allclose(sums, sums[:1].expand_as(sums), rtol=1e-6, equal_nan=True):
        raise RuntimeError(
            "the trunk's parameters are not the same on all ranks. Something in the module changes or skips their "
            "gradients depending on this rank's part of the head, as torch.nn.utils.clip_grad_norm_ does; use "
            "self.clip_gradients(optimizer, gradient_clip_val=...), or Trainer(gradient_clip_val=...). Or a backward "
            "leaves parameters out, so that DDP does not reduce the others; use find_unused_parameters=True"
        )


# --- The whole head on every rank ---


class GatheredHead(SharedOnDeepcopy):
    """The whole values of the head's parameters, as they are at construction, for calls outside of training steps.

    Under DDP any rank may call the model at any time: rank 0 logs sample images, traces the model for a graph, or
    validates more batches than the others. The forward of a sharded head needs all ranks, so such a call would wait
    for ranks that never come. Therefore all ranks gather the head at points that all of them reach (`GatherHead`).
    Until the next training step each rank then computes the head alone, and sends nothing.

    The constructor is a collective: all ranks must call it. The methods need no other rank.

    Raises:
        torch.OutOfMemoryError: the whole head does not fit on the device. The message names the option that avoids it.
    """

    def __init__(self, head: ShardedHead) -> None:
        self._head = head
        self._caller = _Caller(head.head)
        # torch counts the changes of a tensor in place. They show whether an optimizer or a user has changed the shard.
        self._versions = {p: version_of(p) for p in head.parameters}
        # They do not show a change of ``p.data``, as some callbacks of averaged weights make it. It changes all values.
        self._samples = {p: _sample_of(p) for p in head.parameters}
        try:
            self._whole = {p: whole_on_all_ranks(head, p.data, p, p.device) for p in head.parameters}
        except torch.OutOfMemoryError as error:
            raise torch.OutOfMemoryError(
                f"evaluation gathers the whole head {head.name!r}, which does not fit on the device beside this rank's "
                f"local shard; use KrizhevskyHybridStrategy(evaluation='sharded'). torch says: {error}"
            ) from error

        self._versions_of_whole = {p: version_of(whole) for p, whole in self._whole.items()}

    def require_unwritten(self) -> None:
        """Raise RuntimeError if somebody has changed the whole values, which ``state_dict`` returns.

        They are copies. The weights would stay as they were, and nobody would know.
        """
        is_written = any(version_of(self._whole[p]) != version for p, version in self._versions_of_whole.items())
        if is_written and self.is_current and not self.has_same_shard:
            raise RuntimeError(
                f"the tensors of {self._head.name!r} that state_dict() has returned were changed in place. During fit "
                "they are copies, and the weights stay as they were; use load_state_dict, which takes whole tensors"
            )

    @property
    def is_current(self) -> bool:
        """Whether the local shard is still the one that was gathered."""
        if any(version_of(p) != version for p, version in self._versions.items()):
            return False
        # `torch.jit.trace` would record the comparison, and warn of it.
        return torch.jit.is_tracing() or all(
            (now := _sample_of(p)).shape == sample.shape and torch.allclose(now, sample, rtol=0, atol=0, equal_nan=True)
            for p, sample in self._samples.items()
        )

    @property
    def has_same_shard(self) -> bool:
        """Whether the local shard is bitwise what was gathered. This reads all values, `is_current` a few."""
        return all(torch.equal(self._head.local_shard(whole, p), p.data) for p, whole in self._whole.items())

    def value_of(self, parameter: Tensor) -> Tensor:
        """Return the whole value of one of the head's parameters."""
        return self._whole[parameter]

    def forward(self, input: Tensor) -> Tensor:
        """Return the head's output for an input (N, *), (N, C), computed on this rank alone as before `fit`."""
        if torch.jit.is_tracing():  # it cannot record a functional_call
            return self._through(self._head.layers, input)
        # Each layer once: torch does not put back what it has replaced under two names of a layer.
        values = {
            f"{path}.{name}": self._in_graph(p, layer)
            for path, layer in self._caller.named_modules()
            if isinstance(layer, nn.Linear)
            for name, p in layer.named_parameters(recurse=False)
        }
        # This calls the head's own forward with other values for its parameters. The parameters themselves keep their
        # shard, and hooks within the head see whole activations.
        return functional_call(self._caller, values, (input,), tie_weights=False)

    def last_layer(self, features: Tensor) -> LastLayer | None:
        """See `ShardedForward`. All classes are those of this rank."""
        *before, last = self._head.layers
        are_rows = features.dim() == 2 or (features.dim() > 2 and self._head.flattens)
        has_hooks = any(has_forward_hooks(part) for part in self._head.head.modules())
        if not isinstance(last, nn.Linear) or has_hooks or not are_rows:
            return None  # before any layer has run: the caller runs them all, and one may work in place
        x = self._through(before, features)
        weight, bias = self._weight_and_bias(last)
        return LastLayer(x, weight, bias, 0, len(weight), lambda tensor: tensor[None])

    def _through(self, layers: Sequence[nn.Module], x: Tensor) -> Tensor:
        """Return the output of ``layers``, one after the other."""
        for layer in layers:
            x = F.linear(x, *self._weight_and_bias(layer)) if isinstance(layer, nn.Linear) else layer(x)
        return x

    def _weight_and_bias(self, layer: nn.Linear) -> tuple[Tensor, Tensor | None]:
        return self._in_graph(layer.weight, layer), None if layer.bias is None else self._in_graph(layer.bias, layer)

    def _in_graph(self, parameter: Tensor, layer: nn.Linear) -> Tensor:
        """Return the whole value as a function of the shard, so that ``backward()`` leaves gradients in ``.grad``.

        What `torch.func.functional_call` has put in a parameter's place is whole already.
        """
        if not self._head.owns(parameter):
            if len(parameter) != layer.out_features:
                raise RuntimeError(
                    f"a layer of {self._head.name!r} got a tensor of {len(parameter)} rows, and it has "
                    f"{layer.out_features}: its parameters hold only this rank's local shard during fit. Outside of a "
                    "training step, pass whole tensors to functional_call, as state_dict() returns them in validation"
                )
            return parameter
        if not torch.is_grad_enabled() or torch.jit.is_tracing():
            return self._whole[parameter]
        begin, end = self._head.bounds_of(parameter)[self._head.channel.rank]
        return _WholeValue.apply(parameter, self._whole[parameter], begin, end)


def _sample_of(parameter: Tensor, size: int = 1024) -> Tensor:
    """Return a copy of about ``size`` values, spread over ``parameter``."""
    values = parameter.data.reshape(-1)
    return values[:: max(1, len(values) // size)].clone()


class _Caller(nn.Module):
    """Calls the ``forward`` of the head's class, and not the one that replaces it on the instance during ``fit``."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        return type(self.head).forward(self.head, x)


class _WholeValue(torch.autograd.Function):
    """Local shard to whole value, which is known already. Backward returns the shard's part of this rank's gradient."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, whole: Tensor, begin: int, end: int) -> Tensor:
        ctx.bounds = begin, end
        return whole.view_as(whole)  # a view, because autograd would mark ``whole`` itself as part of the graph

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        begin, end = ctx.bounds
        return gradients[0][begin:end].clone(), None, None, None


# --- State dicts and copies that users make by hand ---


class StateDictHooks(SharedOnDeepcopy):
    """Converts between local shards and whole tensors where the module's state is read, loaded or copied.

    Users save ``module.state_dict()`` on one rank and expect whole tensors, as under DDP. No other rank takes part in
    that call, so nothing can be gathered in it. While the head is gathered, the whole tensors are at hand; otherwise
    the result holds the local shard, and a warning says so.

    Args:
        head: in its sharded state.
        gathered: returns the gathered head, or None if there is none.
    """

    def __init__(self, head: ShardedHead, gathered: Callable[[], GatheredHead | None]) -> None:
        self._head = head
        self._gathered = gathered
        self._instead: dict[Tensor, Tensor] = {}  # see `returning` and `return_instead`
        self._needs_whole = False  # see `loading_checkpoint`
        self._has_warned = False
        self._registered = ExitStack()  # hooks of the layers, to be removed

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Have the hooks in place within the context."""
        # copy.deepcopy looks it up on the instance.
        with replaced(self._head.head, "__deepcopy__", self._deepcopy), self._registered:
            self._register()
            yield

    @contextmanager
    def returning(self, values: dict[Tensor, Tensor]) -> Iterator[None]:
        """Within the context the parameters hold these values, so that ``state_dict`` returns them, and no warning.

        The parameters themselves, because a module's own ``state_dict`` may copy them past the hooks.
        """
        shards = {p: p.data for p in values}
        self._instead = values
        try:
            for p, value in values.items():
                p.data = value
            yield
        finally:
            for p, shard in shards.items():
                p.data = shard
            self._instead = {}

    def return_instead(self, values: dict[Tensor, Tensor]) -> None:
        """Let ``state_dict`` return these values of the head's parameters from now on. Empty: as usual.

        A module may call it in ``on_save_checkpoint`` and ``on_load_checkpoint``, to choose from it or to compare
        shapes. There it needs what the checkpoint has, which is not always what is gathered.
        """
        self._instead = values

    @contextmanager
    def loading_checkpoint(self) -> Iterator[None]:
        """Within the context ``load_state_dict`` needs whole tensors, or what `return_instead` was given.

        A head with 1/K of the classes has the shape of the local shard, which torch would take for it.
        """
        self._needs_whole = True
        try:
            yield
        finally:
            self._needs_whole = False

    def _register(self) -> None:
        for layer in self._head.linears:
            # torch sets an attribute on the hook. A partial object takes it, a bound method does not.
            self._registered.callback(layer.register_state_dict_post_hook(partial(self._on_state_dict)).remove)
            self._registered.callback(layer.register_load_state_dict_pre_hook(self._on_load).remove)
        self._registered.enter_context(refused_inner_calls(self._head))  # here, so that copies of the head are without

    def _known(self) -> GatheredHead | None:
        gathered = self._gathered()
        return gathered if gathered is not None and gathered.is_current else None

    def _on_state_dict(self, layer: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name, parameter in layer.named_parameters(recurse=False):
            value = state.get(prefix + name)
            # With keep_vars=True the caller wants the parameters themselves. A copy of a single layer has inherited
            # this hook, but its parameters are not the head's.
            if value is None or isinstance(value, nn.Parameter) or not self._head.owns(parameter):
                continue
            if parameter in self._instead:
                state[prefix + name] = self._instead[parameter]
            elif (gathered := self._known()) is not None:
                state[prefix + name] = gathered.value_of(parameter)
            elif not self._has_warned:
                self._has_warned = True
                log.warning(
                    f"state_dict() holds only rank {self._head.channel.rank}'s local shard of {self._head.name!r}, "
                    "because each rank has its own during fit. Use trainer.save_checkpoint(...) on all ranks, or "
                    "let all ranks call trainer.strategy.gather_head() first"
                )

    def _on_load(self, layer: nn.Module, state: dict[str, Any], prefix: str, *others: Any) -> None:
        metadata, *_, errors = others  # those that torch raises when it has loaded all
        for name, parameter in layer.named_parameters(recurse=False):
            value: Any = state.get(prefix + name)
            # While a sharded checkpoint is loaded, `_instead` has the local shards, and so has ``state``. Those of a
            # larger head may have the shape of this whole one: torch refuses them.
            if not self._head.owns(parameter) or parameter in self._instead:
                continue
            # With assign=True torch would put a new parameter there, which nobody makes whole again.
            metadata["assign_to_params_buffers"] = False
            whole_shape = self._head.whole_shape(parameter)
            if is_like(value, whole_shape):
                state[prefix + name] = self._head.local_shard(value, parameter).clone()
            elif self._needs_whole and is_like(value, parameter.shape):
                errors.append(
                    f"size mismatch for {prefix}{name}: the checkpoint has {tuple(value.shape)}, the shape of a local "
                    f"shard, and the whole is {tuple(whole_shape)}."
                )

    def _deepcopy(self, memo: dict[int, Any]) -> nn.Module:
        """Copy the head as an ordinary module with whole tensors, or, if it is not gathered, as one with local shards.

        The second raises when it is called.
        """
        head, gathered = self._head.head, self._known()
        if gathered is not None:
            for parameter in self._head.parameters:
                memo[id(parameter)] = nn.Parameter(gathered.value_of(parameter).clone(), parameter.requires_grad)
        # deepcopy would find this method again, and copy the replaced forward with all that it refers to. Therefore a
        # shallow copy comes first, without either.
        duplicate = copy.copy(head)
        for name in ("forward", "__deepcopy__"):
            vars(duplicate).pop(name, None)
        self._registered.close()  # otherwise the copy's layers would have the hooks, too
        try:
            duplicate = copy.deepcopy(duplicate, memo)
        finally:
            self._register()
        if gathered is None:
            vars(duplicate)["forward"] = partial(_refuse_copy, self._head.name)
        return duplicate


def _refuse_copy(name: str, *_: Any, **__: Any) -> Tensor:
    raise RuntimeError(
        f"this copy of {name!r} was made during fit, when the rank held only its local shard of it. Copy it before "
        "fit, in validation, or after all ranks have called trainer.strategy.gather_head()"
    )
