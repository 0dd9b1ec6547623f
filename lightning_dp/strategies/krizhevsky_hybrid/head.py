"""A fully-connected head whose linear layers are sharded over ranks by output features (arXiv 1404.5997, section 4)."""

from __future__ import annotations

import gc
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import takewhile
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_dp._private.torch_names import (
    backward_number,
    child_entries,
    declare_no_unseen_changes,
    is_memory_shared,
    version_of,
)
from lightning_dp.collectives.all_to_all import Channel, Finish
from lightning_dp.collectives.ring import chunk_bounds
from lightning_dp.losses import add_product

Bounds = list[tuple[int, int]]
"""Begin and end of each rank's part of the features."""


class SharedOnDeepcopy:
    """Base of the objects of one run of ``fit``. A deep copy of what refers to them, such as the Trainer, shares them.

    They hold process groups, which cannot be copied.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a module whose head is sharded cannot be pickled during fit; use trainer.save_checkpoint(...), or pickle "
            "copy.deepcopy(module). Leave it out of what a checkpoint pickles: save_hyperparameters(ignore=[...])"
        )


class ShardedHead(SharedOnDeepcopy):
    """``head`` on the ranks of ``channel``: each holds, and computes, a slice of every layer's features.

    `ShardedParameters.shard` leaves each rank with its local shard of each weight and bias, in the same parameters with
    the same names. Sizes that the number of ranks does not divide differ by one.

    Args:
        head: an nn.Linear, or an nn.Sequential (of Sequentials) of nn.Linear, `ELEMENTWISE` layers and, before the
            first nn.Linear, nn.Flatten.
        channel: for the activations between layers.
        name: of the head in its module, for messages.
        control: for parameters and checks, whose bytes are not counted as those of training steps. None: a channel of
            the same group as ``channel``.

    Attributes:
        parameters: of all linear layers. They hold this rank's local shard while sharded.
        output_bounds: begin and end of each rank's columns of the head's output.
        flattens: whether the head makes rows of features that have several dimensions.

    Raises:
        ValueError: the head has a layer that cannot be sharded, by name, or no nn.Linear.
    """

    def __init__(self, head: nn.Module, channel: Channel, name: str = "head", control: Channel | None = None) -> None:
        self.head = head
        self.channel = channel
        self.control = Channel(channel.group) if control is None else control
        self.name = name
        self.layers = [layer for _, layer in divisible_layers(head, name)]
        self.linears = list(dict.fromkeys(layer for layer in self.layers if isinstance(layer, nn.Linear)))
        self._bounds = {layer: chunk_bounds(layer.out_features, channel.world_size) for layer in self.linears}
        self._bounds_of_parameter: dict[Tensor, Bounds] = {
            p: self._bounds[layer] for layer in self.linears for p in layer.parameters()
        }
        self.parameters = list(self._bounds_of_parameter)
        last = next(layer for layer in reversed(self.layers) if isinstance(layer, nn.Linear))
        self.output_bounds = self._bounds[last]
        self.flattens = any(isinstance(layer, nn.Flatten) for layer in self.layers)
        # In place, perhaps on a view, as nn.Flatten makes it.
        before_linear = takewhile(lambda layer: not isinstance(layer, nn.Linear), self.layers)
        self._changes_features = any(getattr(layer, "inplace", False) for layer in before_linear)

    def owns(self, parameter: Tensor) -> bool:
        """Return whether ``parameter`` is one of the head's."""
        return parameter in self._bounds_of_parameter

    def bounds_of(self, parameter: Tensor) -> Bounds:
        """Return begin and end of each rank's local shard of ``parameter``."""
        return self._bounds_of_parameter[parameter]

    def whole_shape(self, parameter: Tensor) -> torch.Size:
        """Return the shape of ``parameter`` when it is not sharded."""
        return torch.Size([self._bounds_of_parameter[parameter][-1][1], *parameter.shape[1:]])

    @cached_property
    def shapes_of_shards(self) -> set[torch.Size]:
        """The shapes that the parameters have on any of the ranks."""
        of_parameters = self._bounds_of_parameter.items()
        return {torch.Size([end - begin, *p.shape[1:]]) for p, bounds in of_parameters for begin, end in bounds}

    def local_shard(self, whole: Tensor, parameter: Tensor) -> Tensor:
        """Return this rank's local shard of ``whole``, a tensor with the shape of the whole ``parameter``: a view."""
        begin, end = self._bounds_of_parameter[parameter][self.channel.rank]
        return whole[begin:end]

    def cut_assigned(self) -> None:
        """Cut whole values that somebody has assigned meanwhile (``weight.data = whole``), as plain training has them.

        Each rank would go on with all classes as if they were its own, and sums over ranks would count each K times.
        """
        for parameter, bounds in self._bounds_of_parameter.items():
            if len(bounds) > 1 and len(parameter) == bounds[-1][1]:
                own = self.local_shard(parameter.data, parameter)
                if len(own) != len(parameter):  # one rank may have all rows, where there are few
                    parameter.data = own.clone()

    @property
    def has_computed_weights(self) -> bool:
        """Whether `torch.func.functional_call` has put tensors in the place of parameters.

        Several passes, calls, and code outside of the head may share the graph that has computed them.
        """
        return not all(self.owns(p) for layer in self.linears for p in layer.parameters())

    def shard_of(self, layer: nn.Linear) -> tuple[Tensor, Tensor | None]:
        """Return this rank's weight and bias of ``layer``. `torch.func.functional_call` may put whole tensors there."""

        def own(value: Tensor) -> Tensor:
            if self.owns(value) or len(value) != layer.out_features:
                return value
            begin, end = self._bounds[layer][self.channel.rank]
            return value[begin:end]

        return own(layer.weight), None if layer.bias is None else own(layer.bias)

    def names_in(self, module: nn.Module) -> dict[str, Tensor]:
        """Return the head's parameters by their names in ``module``. A shared one appears under each of its names."""
        named = module.named_parameters(remove_duplicate=False)
        return {name: parameter for name, parameter in named if self.owns(parameter)}

    @property
    def draws_random_numbers(self) -> bool:
        """Whether the next call needs a seed."""
        return any(isinstance(layer, nn.Dropout) and layer.training for layer in self.layers)

    def __call__(self, x: Tensor, seed: int | None = None, gradients: ParameterGradients | None = None) -> Tensor:
        """Compute this rank's columns of the output, (N, own columns). All ranks must call it.

        Args:
            x: features (N, *), the same on all ranks. Its gradient is this rank's part of a sum over ranks.
            seed: seed for dropout, the same on all ranks. All ranks then drop the same elements of ``x``, and each rank
                draws for its own columns. The state of the global generator is kept. None: use the global generator.
            gradients: sums the parameters' gradients in backward, in the place of autograd.
        """
        return self._compute(self.layers, x, seed, gradients)[0]

    def logits(self, x: Tensor, seed: int | None = None, gradients: ParameterGradients | None = None) -> Tensor:
        """Return all columns of the output, (N, C), the same on all ranks. Arguments as for a call.

        The layers behind the last nn.Linear are computed by every rank for all columns. Autograd may keep their output
        for backward, and a second derivative reaches what is kept: if each rank kept its own columns, it would come
        past the logits, and a hook on them would not get it.
        """
        count = 1 + max(number for number, layer in enumerate(self.layers) if isinstance(layer, nn.Linear))
        own, _ = self._compute(self.layers[:count], x, seed, gradients)
        logits = gathered(own, self.output_bounds, self.channel, "logits")
        with seeded(None if seed is None else seed + 1 + self.channel.world_size, x.device):
            for layer in self.layers[count:]:
                logits = _elementwise(layer, logits)
        return logits

    def input_of_last_layer(
        self, x: Tensor, seed: int | None = None, gradients: ParameterGradients | None = None
    ) -> Tensor:
        """Return the input (N, D) of the last layer, an nn.Linear, the same on all ranks. Arguments as for a call."""
        x, bounds = self._compute(self.layers[:-1], x, seed, gradients)
        if bounds is None:
            self._require_rows(x)
            return x
        return gathered_for_local_shards(x, bounds, self.channel, gradients)

    def _compute(
        self, layers: Sequence[nn.Module], x: Tensor, seed: int | None, gradients: ParameterGradients | None
    ) -> tuple[Tensor, Bounds | None]:
        """Return the output of ``layers``, and each rank's columns of it, or None if every rank has all of it."""
        self.cut_assigned()  # also what training_step has assigned
        bounds = None
        if self._changes_features:
            x = x.clone()  # the caller still needs the features
        with seeded(seed, x.device):
            for layer in layers:
                if not isinstance(layer, nn.Linear):
                    x = _elementwise(layer, x)
                    continue
                if bounds is not None:
                    x = gathered_for_local_shards(x, bounds, self.channel, gradients)
                else:
                    self._require_rows(x)
                    # From here on x is a slice, and equal masks on all ranks would drop the same columns of each.
                    if seed is not None:
                        for generator in generators(x.device):
                            generator.manual_seed(seed + 1 + self.channel.rank)
                x = (gradients.linear if gradients else F.linear)(x, *self.shard_of(layer))
                bounds = self._bounds[layer]
        return x, bounds

    def by_rows(self, compute: Callable[[Tensor], Tensor], features: Tensor) -> Tensor:
        """Return ``compute(features)``, which gets rows (M, D) of features (N, *, D), as nn.Linear takes them.

        Where an nn.Flatten within the head makes the rows, ``compute`` gets the features as they are.
        """
        if features.dim() < 3 or self.flattens:
            return compute(features)
        return compute(features.flatten(0, -2)).unflatten(0, features.shape[:-1])

    def forwarding_to(self, function: Callable[[Tensor], Tensor]) -> AbstractContextManager[None]:
        """Let ``head(x)`` call ``function(x)`` within the context. Hooks of the head run as usual. May be nested.

        ``function`` names its argument ``input``, as nn.Linear and nn.Sequential do: modules call ``head(input=x)``.
        """
        return replaced(self.head, "forward", function)

    def _require_rows(self, x: Tensor) -> None:
        if x.dim() != 2:
            raise ValueError(
                f"features of shape {tuple(x.shape)} reach {self.name}'s first nn.Linear; flatten them to (N, features)"
                " before it, by nn.Flatten() in the head or in the trunk"
            )


def _elementwise(layer: nn.Module, x: Tensor) -> Tensor:
    """Return ``layer(x)``. On a CPU dropout draws its mask here, in a quarter of the time.

    Each rank draws the mask of all ranks' features, and `torch.nn.functional.dropout` takes 10 ns a number for that
    (torch 2.13): 12 ms for AlexNet's 128 x 9216, as long as a tenth of the head's products.
    """
    if not (isinstance(layer, nn.Dropout) and layer.training and 0 < layer.p < 1) or x.device.type != "cpu":
        return layer(x)
    kept = torch.rand(x.shape).ge_(layer.p).to(x.dtype)  # 0 or 1, so x keeps its type
    return (x.mul_(kept) if layer.inplace else x * kept).mul_(1 / (1 - layer.p))


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Within the context, give the instance ``owner`` another value of an attribute. May be nested."""
    was_set = name in vars(owner)
    before = vars(owner).get(name)
    vars(owner)[name] = value  # past __setattr__, with which a module would register it as a submodule or parameter
    try:
        yield
    finally:
        if was_set:
            vars(owner)[name] = before
        else:
            vars(owner).pop(name, None)


def generators(device: torch.device) -> list[torch.Generator]:
    """Return the generators of code that computes on ``device``: the CPU's, and that of another device.

    `torch.manual_seed` would do, but it formats three stack traces in each call on a machine without GPUs.
    """
    of_device = [] if device.type == "cpu" else [torch.get_device_module(device).default_generators[device.index]]
    return [torch.default_generator, *of_device]


_reading_state = threading.Lock()


def _state_of(generator: torch.Generator) -> Tensor:
    """Return the generator's state, whatever other threads do.

    torch makes the tensor while it holds the generator's lock. Should that start Python's garbage collection, another
    thread may run, ask for the same lock and wait for it with the interpreter in its hands: forever.
    """
    with _reading_state:
        collects = gc.isenabled()
        gc.disable()
        try:
            return generator.get_state()
        finally:
            if collects:
                gc.enable()


@contextmanager
def seeded(seed: int | None, device: torch.device) -> Iterator[None]:
    """Draw random numbers from ``seed`` within the context, and restore the generators. None: change nothing."""
    if seed is None:
        yield
        return
    before = [(generator, _state_of(generator)) for generator in generators(device)]
    try:
        for generator, _ in before:
            generator.manual_seed(seed)
        yield
    finally:
        for generator, state in before:
            generator.set_state(state)


# --- Messages that autograd differentiates.
#
# Tensors come in two kinds. A *replicated* one is the same on all ranks, and a *local* one is this rank's columns. Each
# function below is linear, and backward applies its adjoint (Megatron's conjugate operators f and g). Gradients then
# keep to one rule: that of a local tensor is the whole gradient of its columns, and that of a replicated one is whole
# on every rank as soon as it leaves what the ranks compute with their local shards.


def gathered(own: Tensor, bounds: Bounds, channel: Channel, what: str) -> Tensor:
    """Return the columns of all ranks, (N, all columns), for computations that are the same on all ranks.

    All ranks then have the same gradient, and each takes its columns of it (Megatron's g).
    """
    begin, end = bounds[channel.rank]
    gather = partial(gather_columns, bounds=bounds, channel=channel, what=what)
    return _LinearMap.apply(own, gather, lambda gradient: gradient[:, begin:end].contiguous())


def summed(part: Tensor, channel: Channel) -> Tensor:
    """Return the sum of all ranks' parts, the same on all ranks."""
    return _LinearMap.apply(part, partial(sum_over_ranks, channel=channel), _identity)


def summed_in_backward(x: Tensor, channel: Channel) -> Tensor:
    """Return ``x``, which is replicated, for computations of each rank with its local shard (Megatron's f).

    Each of them contributes a part to the gradient. Backward sums the parts, so that all ranks have the whole.
    """
    return _LinearMap.apply(x, _identity, partial(sum_over_ranks, channel=channel))


def gathered_for_local_shards(
    own: Tensor, bounds: Bounds, channel: Channel, gradients: ParameterGradients | None = None
) -> Tensor:
    """Return the columns of all ranks, (N, all columns), for computations of each rank with its local shard.

    It is `summed_in_backward` of `gathered`, but backward sends each rank its columns of the sum only. Meanwhile a part
    of the postponed ``gradients`` is computed.
    """
    gather = partial(gather_columns, bounds=bounds, channel=channel, what="hidden activations")
    return _LinearMap.apply(own, gather, partial(scatter_sum, bounds=bounds, channel=channel, gradients=gradients))


class _LinearMap(torch.autograd.Function):
    """A linear function ``run``, whose adjoint is ``run_back``: of any order, because each is the other's backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Callable[[Tensor], Tensor], run_back: Callable[[Tensor], Tensor]) -> Tensor:
        declare_no_unseen_changes()
        ctx.run, ctx.run_back = run, run_back
        return run(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _LinearMap.apply(gradients[0], ctx.run_back, ctx.run), None, None


def _identity(x: Tensor) -> Tensor:
    return x.view_as(x)  # a Function must not return its argument


def scatter_sum(
    gradient: Tensor, bounds: Bounds, channel: Channel, gradients: ParameterGradients | None = None
) -> Tensor:
    """Return this rank's columns of the sum over ranks of (N, all columns). All ranks must call it."""
    finish = begin_sum("hidden gradients", [gradient[:, begin:end] for begin, end in bounds], channel)
    if gradients is not None:
        gradients.compute_next()
    return finish()


def sum_over_ranks(part: Tensor, channel: Channel) -> Tensor:
    """Return the sum of all ranks' parts, (N, *), bitwise the same on all ranks. All ranks must call it."""
    what = "input gradients"
    bounds = chunk_bounds(len(part), channel.world_size)
    own = begin_sum(what, [part[begin:end] for begin, end in bounds], channel)()
    whole = part.new_empty(part.shape)
    blocks = [whole[begin:end] for begin, end in bounds]
    blocks[channel.rank].copy_(own)
    channel.all_to_all(what, [own] * channel.world_size, blocks).wait()
    return whole


def gather_columns(own: Tensor, bounds: Bounds, channel: Channel, what: str) -> Tensor:
    """Return the columns of all ranks, (N, all columns), without a graph. All ranks must call it."""
    # Received tensors must be contiguous, and a block of columns is not. So blocks are received first, then joined.
    blocks = [own.new_empty(len(own), end - begin) for begin, end in bounds]
    blocks[channel.rank] = own.detach()
    channel.all_to_all(what, [own] * channel.world_size, blocks).wait()
    return torch.cat(blocks, dim=1)


def begin_sum(what: str, blocks: Sequence[Tensor], channel: Channel) -> Finish:
    """Start a reduce-scatter, which leaves the sum of all ranks' r-th blocks on rank r. All ranks must call it."""
    own = blocks[channel.rank].contiguous()
    parts = [torch.empty_like(own) for _ in blocks]
    parts[channel.rank] = own
    return channel.begin(what, blocks, parts, lambda: sum_in_order(parts))


def sum_in_order(parts: list[Tensor]) -> Tensor:
    """Return the sum from first to last, in at least 32 bits. One order on all ranks gives bitwise identical sums."""
    if len(parts) == 1:
        return parts[0]
    wide = torch.promote_types(parts[0].dtype, torch.float32)
    total = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        total += part
    return total.to(parts[0].dtype)


# --- Which layers a head that is sharded over ranks may consist of.

ELEMENTWISE = (
    *(nn.Identity, nn.Dropout, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish),
    *(nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Softsign, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Threshold),
)
"""Layers that may stand between linear ones. Each output depends on one input, so slices can be computed alone."""

_ALLOWED = (
    "a head may be an nn.Linear, or an nn.Sequential of nn.Linear, elementwise activations, nn.Dropout and, before the "
    "first nn.Linear, nn.Flatten()"
)


def divisible_layers(module: nn.Module, name: str) -> list[tuple[str, nn.Module]]:
    """Return path and module of each layer of the head, in order.

    Raises:
        ValueError: a layer cannot be sharded over ranks, or is not what its class says, or there is no nn.Linear.
    """
    layers = list(layers_of(module, name))
    before_linear = True
    for path, layer in layers:
        if type(layer) is nn.Linear:
            before_linear = False
            _require_plain(layer, path)
        elif not (type(layer) in ELEMENTWISE or (before_linear and type(layer) is nn.Flatten and layer.start_dim == 1)):
            raise ValueError(
                f"{path} is a {type(layer).__name__}, which cannot be sharded over ranks: {_ALLOWED}. "
                f"{_remedy(module, name, layer)}"
            )
    if before_linear:
        raise ValueError(f"{name} has no nn.Linear to shard over ranks; name the submodule that holds them")
    # Last, because a copy with one rank's shard also has such a forward, and the shard has a better message.
    _require_no_own_forward(module, name)
    return layers


def _remedy(module: nn.Module, name: str, layer: nn.Module) -> str:
    """Return what to do about a layer that cannot be sharded: almost always to name an inner layer as the head."""
    if isinstance(layer, nn.Linear):
        return "Use nn.Linear itself; a subclass may do anything with its weight"
    linears = [(path, part) for path, part in module.named_modules(prefix=name) if type(part) is nn.Linear]
    if not linears:
        return "Name the submodule that holds the large nn.Linear"
    largest, _ = max(linears, key=lambda pair: pair[1].weight.numel())
    also = ", or leave it out and use F.cross_entropy" if isinstance(layer, (nn.Softmax, nn.LogSoftmax)) else ""
    return (
        f"Name an nn.Linear inside instead, the largest is head={largest!r}; all else is then part of the trunk{also}"
    )


def layers_of(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield path and module of each part of ``module`` that is no nn.Sequential, in order."""
    if type(module) is nn.Sequential:
        for child_name, child in child_entries(module):
            assert child is not None
            yield from layers_of(child, f"{name}.{child_name}")
    else:
        yield name, module


def _require_no_own_forward(module: nn.Module, name: str) -> None:
    for path, part in module.named_modules(prefix=name):
        if "forward" in vars(part):
            raise ValueError(
                f"{path} has a forward that was set on the instance, which a sharded head would not call; remove it "
                f"(del module.{path}.forward), and do what it adds where the module calls the head"
            )


def require_whole_layer(layer: nn.Linear, path: str) -> None:
    """Raise ValueError if the layer holds one rank's local shard, which an earlier `fit` can leave."""
    if layer.weight.shape != (layer.out_features, layer.in_features):
        raise ValueError(
            f"{path}.weight is {tuple(layer.weight.shape)}, and not {(layer.out_features, layer.in_features)}. A run "
            "that ends with an exception, or has state_dict_type='sharded', leaves one rank's local shard there. "
            "Build the module again, and load a checkpoint"
        )


def _require_plain(layer: nn.Linear, path: str) -> None:
    require_whole_layer(layer, path)
    for kind in ("weight", "bias"):
        value = getattr(layer, kind)
        if value is not None and not isinstance(value, nn.Parameter):
            raise ValueError(
                f"{path} computes its {kind} (pruning, weight_norm, spectral_norm, ...), which mixes the shards of "
                "different ranks; remove the parametrization (torch.nn.utils.prune.remove, remove_weight_norm, ...)"
            )
    for name, _ in layer.named_parameters(remove_duplicate=False):
        if name not in ("weight", "bias"):
            raise ValueError(
                f"{path} has a parameter {name!r}, and each rank holds a shard of weight and bias only; keep "
                "the parameter outside of the head, and use it where the module calls the head"
            )
    if layer.bias is not None and layer.bias.shape != (layer.out_features,):
        raise ValueError(
            f"{path}.bias is {tuple(layer.bias.shape)}, and not {(layer.out_features,)}: each rank holds the same "
            "outputs of it and of the weight; give it a value for each output"
        )


# --- Calls of a layer within the head: an error, because the layer holds one rank's local shard during ``fit``.


@contextmanager
def refused_inner_calls(head: ShardedHead) -> Iterator[None]:
    """Within the context, let a call of an nn.Linear within the head raise RuntimeError.

    `ShardedHead` computes these layers without calling them. So a call while they are sharded comes from the user, who
    would get this rank's columns, and a gradient of this rank's samples alone.
    """
    with ExitStack() as stack:
        if head.channel.world_size > 1:  # otherwise the shard is the whole layer
            for path, layer in head.head.named_modules(prefix=head.name):
                # A head that is an nn.Linear itself has its ``forward`` replaced as any head.
                if layer is not head.head and type(layer) is nn.Linear:
                    refuse = partial(_refuse_local_shard, head, layer, path)
                    stack.enter_context(replaced(layer, "forward", refuse))
        yield


def _refuse_local_shard(head: ShardedHead, layer: nn.Linear, path: str, input: Tensor) -> Tensor:
    """Stand for the forward of ``layer`` within ``head``: raise, unless ``layer`` has another weight, a whole one.

    The gathered head puts one there while it computes. A copy of the layer alone has a local shard.
    """
    is_whole = layer.weight.shape == (layer.out_features, layer.in_features)
    if is_whole and not head.owns(layer.weight):
        return F.linear(input, layer.weight, layer.bias)
    raise RuntimeError(
        f"{path!r} was called by itself on rank {head.channel.rank}, which during fit holds only its local shard of "
        f"it. Call the whole head {head.name!r}, or shard this layer alone (head={path!r}), so that the other layers "
        "belong to the trunk"
    )


# --- Gradients of the head's parameters, summed over the passes.


def saved(tensor: Tensor) -> tuple[Tensor, int]:
    """Return a tensor that is needed later, and its version, for `as_saved`."""
    return tensor, version_of(tensor)


def as_saved(
    pair: tuple[Tensor, int], what: str = "one of the variables needed for gradient computation has been"
) -> Tensor:
    """Return a saved tensor. Raise RuntimeError, as torch does for those that it saves, if it was changed since."""
    tensor, version = pair
    if version_of(tensor) != version:
        raise RuntimeError(
            f"{what} modified by an inplace operation: a tensor of shape {tuple(tensor.shape)} is at version "
            f"{version_of(tensor)}; expected version {version} instead. Change a copy"
        )
    return tensor


_BLOCK_NUMEL = 2**22
"""Elements of a weight's gradient that are computed at once while messages travel."""


@dataclass
class _Product:
    """The gradient of a weight, which is still to be computed: ``output_grads``, (N, out), transposed, times ``x``.

    Attributes:
        output_grads: see `saved`.
        x: see `saved`.
        total: where the gradient goes, and the factor of its content. None: no row has been computed.
        begin: the first row that has not been computed.
    """

    weight: Tensor
    output_grads: tuple[Tensor, int]
    x: tuple[Tensor, int]
    total: tuple[Tensor, float] | None = None
    begin: int = 0


class ParameterGradients:
    """The sum of the gradients of ``parameters`` over several passes, multiplied by ``factor``.

    A weight's gradient is the product of two matrices with few rows each, and is as large as the weight. Autograd would
    write the product to new memory in each pass and then add it to the total. With AlexNet's head and 32 samples, that
    takes three times as long as the product itself. Here the product is added to the total as it is computed.

    In backward the gradient of a layer's input comes first, because the other ranks wait for it. The weights' products
    are postponed until messages are on their way (`compute_next`), or the sum is taken.

    Args:
        parameters: this rank's local shard of the head's parameters.
        factor: multiplies every gradient that is added.
        memory: of earlier gradients. It is written again once nobody holds the gradient: the system clears the pages of
            new memory, which takes as long as the product. None: nothing is written again.
    """

    def __init__(
        self, parameters: Sequence[Tensor], factor: float = 1.0, memory: dict[Tensor, Tensor] | None = None
    ) -> None:
        self._parameters = dict.fromkeys(parameters)  # found by object; a list would compare values
        self._factor = factor
        self._totals: dict[Tensor, Tensor] = {}
        self._memory = {} if memory is None else memory
        self._lent: dict[Tensor, Tensor] = {}
        self._postponed: deque[_Product] = deque()
        self._collecting: int | None = None  # the number of the backward that `collect` runs

    @property
    def is_collecting(self) -> bool:
        """Whether this code runs in the backward of `collect`.

        In any other backward, such as one that the user calls within ``head_step`` or in a hook, autograd receives the
        parameters' gradients and the totals stay as they are.
        """
        return self._collecting is not None and self._collecting == backward_number()

    def _begin_collecting(self, _: Tensor) -> None:
        self._collecting = backward_number()

    def collect(
        self, output: Tensor, x: Tensor, gradient: Tensor | None = None, retain_graph: bool = False
    ) -> Tensor | None:
        """Run backward from ``output``, add the parameters' gradients, and return that of ``x``, None if it has none.

        Args:
            output: computed with `linear` and others from ``x`` and the parameters.
            x: the features of the pass.
            gradient: of ``output``. None: 1.
            retain_graph: whether backward may run again.
        """
        hook = output.register_hook(self._begin_collecting) if output.requires_grad else None  # runs before all nodes
        try:
            found = gradients_of(output, [x, *self._parameters], gradient, retain_graph)
        finally:
            self._collecting = None
            if hook is not None:
                hook.remove()
        feature_grads, *parameter_grads = found
        self.add(parameter_grads)
        return feature_grads

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Apply a layer to x, (N, in) to (N, out). In `collect`, this object receives the weight's gradient.

        Autograd receives the bias's, which is small.
        """
        # Autocast chooses dtypes within F.linear and keeps 16-bit copies of the weights, so autograd must see it.
        if not torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type):
            return F.linear(x, weight, bias)
        return _Linear.apply(x, weight, bias, self)

    def receives(self, weight: Tensor) -> bool:
        """Return whether the gradient of ``weight`` is to be added to its total now.

        A tensor that stands in a parameter's place (`torch.func.functional_call`) has none: autograd takes its gradient
        on to the parameter.
        """
        return self.is_collecting and weight in self._parameters

    def lend(self, weight: Tensor) -> Tensor | None:
        """Return the memory of a weight's total, for other use until `total_of` or `take`. None: it is in use."""
        if weight not in self._parameters or weight in self._totals or weight in self._lent:
            return None
        self._lent[weight] = self._unused_memory(weight)
        return self._lent[weight]

    def lends(self, weight: Tensor, memory: Tensor) -> bool:
        """Return whether ``memory`` of `lend` still has the content that the borrower has written."""
        return self._lent.get(weight) is memory

    def total_of(self, weight: Tensor) -> tuple[Tensor, float]:
        """Return the memory of a weight's total, and by what to multiply its content when something is added: 1 or 0.

        With 0 the content is not to be read. It may be anything, even NaN. A loan of the memory ends.
        """
        # A product of which some rows are computed would overwrite the others, and what was added to them.
        while self._postponed and self._postponed[0].weight is weight and self._postponed[0].total is not None:
            self.compute_next()
        total = self._totals.get(weight)
        if total is not None:
            return total, 1.0
        lent = self._lent.pop(weight, None)
        self._totals[weight] = self._unused_memory(weight) if lent is None else lent
        return self._totals[weight], 0.0

    def _unused_memory(self, weight: Tensor) -> Tensor:
        if weight.device.type != "cpu":  # its allocator keeps what is freed
            return torch.empty_like(weight)
        memory = self._memory.get(weight)
        if memory is None or memory.shape != weight.shape or memory.dtype != weight.dtype or is_memory_shared(memory):
            memory = self._memory[weight] = torch.empty_like(weight)
        return memory.detach()  # another tensor of this memory: while it is there, the memory is shared

    def postpone(self, weight: Tensor, output_grads: Tensor, x: Tensor) -> None:
        """Add a weight's gradient later. Its factors, (N, out) and (N, in), must not change until then."""
        self._postponed.append(_Product(weight, saved(output_grads), saved(x)))

    @torch.no_grad()
    def compute_next(self) -> None:
        """Compute a part of what is postponed, if anything is. Call it while messages travel."""
        if not self._postponed:
            return
        product = self._postponed[0]
        output_grads = as_saved(product.output_grads, "the gradient of the output of a linear layer in the head was")
        x = as_saved(product.x, "the input of a linear layer in the head was")
        product.total = product.total or self.total_of(product.weight)
        total, beta = product.total
        rows = slice(product.begin, product.begin + max(1, _BLOCK_NUMEL // max(1, total.shape[1])))
        add_product(total[rows], beta, output_grads[:, rows], x, self._factor)
        product.begin = rows.stop
        if product.begin >= len(total):
            self._postponed.popleft()

    def compute_postponed(self) -> None:
        """Compute all that is postponed."""
        while self._postponed:
            self.compute_next()

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        """Add gradients, in the order of the parameters. The given tensors may be changed in place, or kept."""
        given = {p: gradient for p, gradient in zip(self._parameters, gradients, strict=True) if gradient is not None}
        if any(product.weight in given for product in self._postponed):
            self.compute_postponed()  # a total of which only some rows are computed cannot be added to
        times_given = Counter(map(id, given.values()))
        for parameter, gradient in given.items():
            total = self._totals.get(parameter)
            if total is not None:
                total.add_(gradient, alpha=self._factor)
                continue
            # The total will be changed in place. Autograd may give several parameters one tensor, as that of a sum of
            # theirs, or one number for all places.
            if times_given[id(gradient)] > 1 or 0 in gradient.stride() or is_memory_shared(gradient):
                gradient = gradient.clone(memory_format=torch.contiguous_format)
            self._totals[parameter] = gradient if self._factor == 1.0 else gradient.mul_(self._factor)

    def take(self) -> list[Tensor | None]:
        """Return the totals in the order of the parameters, None where nothing was added, and start again from zero."""
        self.compute_postponed()
        taken = [self._totals.get(parameter) for parameter in self._parameters]
        self.forget()
        return taken

    def forget(self) -> None:
        """Start again from zero."""
        self._totals = {}
        self._lent = {}
        self._postponed.clear()


def gradients_of(
    output: Tensor, inputs: Sequence[Tensor], gradient: Tensor | None = None, retain_graph: bool = False
) -> list[Tensor | None]:
    """Return the gradient of each input, or None if the input needs none or does not contribute to the output."""
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    if not wanted or not output.requires_grad:
        return [None] * len(inputs)
    found = iter(torch.autograd.grad(output, wanted, gradient, retain_graph, allow_unused=True))
    return [next(found) if tensor.requires_grad else None for tensor in inputs]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, sums: ParameterGradients) -> Tensor:
        declare_no_unseen_changes()
        ctx.sums = sums
        ctx.weight = weight  # hooks on saved tensors may return another object, and the totals are kept by object
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        (output_grads,) = gradients
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        x_grads = output_grads @ weight.conj() if needs_x else None  # conj() returns real tensors themselves
        weight_grads = None
        if needs_weight and ctx.sums.receives(ctx.weight):
            ctx.sums.postpone(ctx.weight, output_grads, x)
        elif needs_weight:
            weight_grads = output_grads.T @ x.conj()
        return x_grads, weight_grads, output_grads.sum(0) if needs_bias else None, None
