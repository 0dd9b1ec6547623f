"""A fully-connected head whose linear layers are sharded over ranks by output features (arXiv 1404.5997, section 4)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from itertools import takewhile
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_dp.collectives.all_to_all import Channel
from lightning_dp.collectives.ring_schedule import chunk_bounds
from lightning_dp.strategies.krizhevsky_hybrid.head_layers import divisible_layers, parts_by_path
from lightning_dp.strategies.krizhevsky_hybrid.parameter_gradients import ParameterGradients, require_first_derivative

Bounds = list[tuple[int, int]]
"""Begin and end of each rank's part of the features."""


class SharedByCopies:
    """Base of the objects of one run of ``fit``. A deep copy of what refers to them, such as the Trainer, shares them.

    They hold process groups, which cannot be copied.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a module whose head is sharded cannot be pickled during fit; use trainer.save_checkpoint(...), or pickle "
            "copy.deepcopy(module)"
        )


class ShardedHead(SharedByCopies):
    """``head`` on the ranks of ``channel``: each holds, and computes, a slice of every layer's features.

    `ShardedParameters.shard` leaves each rank with its rows of each weight and bias, in the same parameters with the
    same names. Sizes that the number of ranks does not divide differ by one.

    Args:
        head: an nn.Linear, or an nn.Sequential (of Sequentials) of nn.Linear, `ELEMENTWISE` layers and, before the
            first nn.Linear, nn.Flatten.
        channel: for the activations between layers.
        name: of the head in its module, for messages.
        control: for parameters and checks. None: a channel of the same group as ``channel``.

    Raises:
        ValueError: the head has a layer that cannot be sharded, by name, or no nn.Linear.
    """

    def __init__(self, head: nn.Module, channel: Channel, name: str = "head", control: Channel | None = None) -> None:
        self.head = head
        self.channel = channel
        self._control = control
        self.name = name
        self.layers = [layer for _, layer in divisible_layers(head, name)]
        self.linears = list(dict.fromkeys(layer for layer in self.layers if isinstance(layer, nn.Linear)))
        self._bounds = {layer: chunk_bounds(layer.out_features, channel.world_size) for layer in self.linears}
        self._bounds_of_parameter: dict[Tensor, Bounds] = {
            p: self._bounds[layer] for layer in self.linears for p in layer.parameters()
        }
        self._parts = parts_by_path(head, name)
        self._forward: Callable[[Tensor], Tensor] | None = None  # what `forwarding_to` has put into the head
        self.is_sharded = False  # set by `ShardedParameters`

    @cached_property
    def control(self) -> Channel:
        """A channel for parameters and checks, whose bytes are not counted as those of training steps."""
        return Channel(self.channel.group) if self._control is None else self._control

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters of all linear layers. They hold this rank's rows while sharded."""
        return list(self._bounds_of_parameter)

    @property
    def output_bounds(self) -> Bounds:
        """Begin and end of each rank's columns of the head's output."""
        last = next(layer for layer in reversed(self.layers) if isinstance(layer, nn.Linear))
        return self._bounds[last]

    def owns(self, parameter: Tensor) -> bool:
        """Return whether ``parameter`` is one of the head's."""
        return parameter in self._bounds_of_parameter

    def bounds_of(self, parameter: Tensor) -> Bounds:
        """Return begin and end of each rank's rows of ``parameter``."""
        return self._bounds_of_parameter[parameter]

    def whole_shape(self, parameter: Tensor) -> torch.Size:
        """Return the shape of ``parameter`` when it is not sharded."""
        return torch.Size([self._bounds_of_parameter[parameter][-1][1], *parameter.shape[1:]])

    def own_rows(self, whole: Tensor, parameter: Tensor) -> Tensor:
        """Return a copy of this rank's rows of ``whole``, a tensor with the shape of the whole ``parameter``."""
        begin, end = self._bounds_of_parameter[parameter][self.channel.rank]
        return whole[begin:end].clone()

    def names_in(self, module: nn.Module) -> dict[str, Tensor]:
        """Return the head's parameters by their names in ``module``. A shared one appears under each of its names."""
        named = module.named_parameters(remove_duplicate=False)
        return {name: parameter for name, parameter in named if self.owns(parameter)}

    @cached_property
    def _changes_features(self) -> bool:
        """Whether a layer before the first nn.Linear works in place, perhaps on a view, as nn.Flatten makes it."""
        before_linear = takewhile(lambda layer: not isinstance(layer, nn.Linear), self.layers)
        return any(getattr(layer, "inplace", False) for layer in before_linear)

    @property
    def draws_random_numbers(self) -> bool:
        """Whether the next call needs a seed."""
        return any(isinstance(layer, nn.Dropout) and layer.training for layer in self.layers)

    def __call__(self, x: Tensor, seed: int | None = None, gradients: ParameterGradients | None = None) -> Tensor:
        """Compute this rank's slice of the output, (N, own columns). All ranks must call it.

        Args:
            x: features (N, *), the same on all ranks. Its gradient is this rank's part of a sum over ranks.
            seed: seed for dropout, the same on all ranks. All ranks then drop the same elements of ``x``, and each rank
                draws for its own slices. The state of the global generator is kept. None: use the global generator.
            gradients: sums the parameters' gradients in backward, in the place of autograd.
        """
        bounds = None  # of the slices of x; None while every rank has all of it
        if self._changes_features:
            x = x.clone()  # the caller still needs the features
        with seeded(seed, x.device):
            for layer in self.layers:
                if not isinstance(layer, nn.Linear):
                    x = layer(x)
                    continue
                if bounds is not None:
                    x = _GatherColumns.apply(x, bounds, self.channel)
                else:
                    self._require_rows(x)
                    # From here on x is a slice, and equal masks on all ranks would drop the same columns of each.
                    if seed is not None:
                        torch.manual_seed(seed + 1 + self.channel.rank)
                x = gradients.linear(x, layer) if gradients else F.linear(x, layer.weight, layer.bias)
                bounds = self._bounds[layer]
        return x

    def changed_part(self) -> str | None:
        """Return the path of a layer, parameter or forward that is not the one of construction, or None."""
        if vars(self.head).get("forward") is not self._forward:
            return f"{self.name}.forward"
        now = parts_by_path(self.head, self.name)
        paths = [*self._parts, *(path for path in now if path not in self._parts)]
        return next((path for path in paths if self._parts.get(path) is not now.get(path)), None)

    @contextmanager
    def forwarding_to(self, function: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """Let ``head(x)`` call ``function(x)`` within the context. Hooks of the head run as usual. May be nested."""
        before = vars(self.head).get("forward")  # that of the instance, which hides the one of the class
        own_before, self._forward = self._forward, function
        vars(self.head)["forward"] = function
        try:
            yield
        finally:
            self._forward = own_before
            if before is None:
                del vars(self.head)["forward"]
            else:
                vars(self.head)["forward"] = before

    def _require_rows(self, x: Tensor) -> None:
        if x.dim() != 2:
            raise ValueError(
                f"features of shape {tuple(x.shape)} reach {self.name}'s first nn.Linear; flatten them to (N, features)"
                " before it, by nn.Flatten() in the head or in the trunk"
            )


@contextmanager
def seeded(seed: int | None, device: torch.device) -> Iterator[None]:
    """Draw random numbers from ``seed`` within the context, and restore the generator. None: change nothing."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


class _GatherColumns(torch.autograd.Function):
    """(N, own columns) to (N, all columns). Backward sums over ranks, and returns the gradient of the own columns."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, bounds: Bounds, channel: Channel) -> Tensor:
        ctx.bounds, ctx.channel = bounds, channel
        return gather_columns(own, bounds, channel, "hidden activations")

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        require_first_derivative()
        (gradient,) = gradients
        channel: Channel = ctx.channel
        blocks = [gradient[:, begin:end] for begin, end in ctx.bounds]
        own = blocks[channel.rank].contiguous()
        parts = [torch.empty_like(own) for _ in blocks]
        parts[channel.rank] = own
        channel.all_to_all("hidden gradients", blocks, parts).wait()
        return sum_in_order(parts), None, None


def gather_columns(own: Tensor, bounds: Bounds, channel: Channel, what: str) -> Tensor:
    """Return the columns of all ranks, (N, all columns), without a graph. All ranks must call it."""
    # Received tensors must be contiguous, and a block of columns is not. So blocks are received first, then joined.
    blocks = [own.new_empty(len(own), end - begin) for begin, end in bounds]
    blocks[channel.rank] = own.detach()
    channel.all_to_all(what, [own] * channel.world_size, blocks).wait()
    return torch.cat(blocks, dim=1)


def sum_in_order(parts: list[Tensor]) -> Tensor:
    """Return the sum from first to last, in at least 32 bits. One order on all ranks gives bitwise identical sums."""
    if len(parts) == 1:
        return parts[0]
    wide = torch.promote_types(parts[0].dtype, torch.float32)
    total = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        total += part
    return total.to(parts[0].dtype)
