"""A fully-connected head whose linear layers are divided over ranks by output features (arXiv 1404.5997, section 4)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_dp.collectives.all_to_all import Channel
from lightning_dp.collectives.ring_schedule import chunk_bounds
from lightning_dp.strategies.krizhevsky_hybrid.head_layers import divisible_layers

Bounds = list[tuple[int, int]]
"""Begin and end of each rank's part of the features."""


class ShardedHead:
    """``head`` on the ranks of ``channel``: each holds, and computes, a slice of every layer's features.

    ``shard`` leaves a rank with rows of each weight and bias, in place: parameters keep their identity and names, and
    `torch.nn.Linear` itself maps all inputs to a slice of the outputs. ``unshard`` puts the whole values back. Sizes
    that the number of ranks does not divide differ by one.

    Args:
        head: an nn.Linear, or an nn.Sequential (of Sequentials) of nn.Linear, `ELEMENTWISE` layers and, before the
            first nn.Linear, nn.Flatten.
        channel: for the activations between layers.
        name: of the head in its module, for messages.

    Raises:
        ValueError: the head has a layer that cannot be divided, by name, or no nn.Linear.
    """

    def __init__(self, head: nn.Module, channel: Channel, name: str = "head") -> None:
        self.head, self.channel, self.name = head, channel, name
        self.layers = [layer for _, layer in divisible_layers(head, name)]
        self.linears = list(dict.fromkeys(layer for layer in self.layers if isinstance(layer, nn.Linear)))
        self._bounds = {layer: chunk_bounds(layer.out_features, channel.world_size) for layer in self.linears}
        self._bounds_of_parameter: dict[Tensor, Bounds] = {
            p: self._bounds[layer] for layer in self.linears for p in layer.parameters()
        }
        self.is_sharded = False

    @property
    def parameters(self) -> list[Tensor]:
        """All of them; this rank's rows while sharded."""
        return list(self._bounds_of_parameter)

    @property
    def output_bounds(self) -> Bounds:
        """Begin and end of each rank's columns of the head's output."""
        last = next(layer for layer in reversed(self.layers) if isinstance(layer, nn.Linear))
        return self._bounds[last]

    def whole_shape(self, parameter: Tensor) -> torch.Size:
        """The shape of ``parameter`` when it is not sharded."""
        return torch.Size([self._bounds_of_parameter[parameter][-1][1], *parameter.shape[1:]])

    def owns(self, parameter: Tensor) -> bool:
        """Whether ``parameter`` is one of the head's."""
        return parameter in self._bounds_of_parameter

    def names_in(self, module: nn.Module) -> dict[str, Tensor]:
        """Return the head's parameters by their names in ``module``; one that is shared appears under each name."""
        named = module.named_parameters(remove_duplicate=False)
        return {name: parameter for name, parameter in named if self.owns(parameter)}

    def shard(self) -> None:
        """Keep this rank's rows of rank 0's parameters, as DDP starts from rank 0's. All ranks must call it."""
        for parameter in self.parameters:
            dist.broadcast(parameter.data, group=self.channel.group, group_src=0)
            parameter.data = self.own_rows(parameter.data, parameter)
            parameter.grad = None
        self.is_sharded = True

    def unshard(self) -> None:
        """Put the whole parameters back. All ranks must call it."""
        for parameter in self.parameters:
            parameter.data = self.whole(parameter.data, parameter)
            parameter.grad = None
        self.is_sharded = False

    def own_rows(self, whole: Tensor, parameter: Tensor) -> Tensor:
        """Copy this rank's rows of ``whole``, which has the shape of the whole ``parameter``."""
        begin, end = self._bounds_of_parameter[parameter][self.channel.rank]
        return whole[begin:end].clone()

    def whole(self, rows: Tensor, parameter: Tensor) -> Tensor:
        """Gather a tensor of the shape of the sharded ``parameter`` from all ranks. All ranks must call it."""
        bounds = self._bounds_of_parameter[parameter]
        gathered = rows.new_empty(self.whole_shape(parameter))
        parts = [gathered[begin:end] for begin, end in bounds]
        parts[self.channel.rank].copy_(rows.detach())
        self.channel.all_to_all("parameters", [rows] * self.channel.world_size, parts).wait()
        return gathered

    @property
    def draws_random_numbers(self) -> bool:
        """Whether the next call needs a seed."""
        return any(isinstance(layer, nn.Dropout) and layer.training for layer in self.layers)

    def __call__(self, x: Tensor, seed: int | None = None) -> Tensor:
        """Features to this rank's slice of the output, (N, own columns). All ranks must call it.

        Args:
            x: (N, *), the same on all ranks. Its gradient is this rank's part of a sum over ranks.
            seed: for dropout, the same on all ranks: what is dropped of ``x`` is the same for all, what is dropped of a
                slice is each rank's own. The global generator goes on as if there were no dropout. None: use that.
        """
        bounds = None  # of x; None while every rank has all of it
        if getattr(self.layers[0], "inplace", False):
            x = x.clone()
        with seeded(seed, x.device):
            for layer in self.layers:
                if isinstance(layer, nn.Linear):
                    if bounds is not None:
                        x = _GatherColumns.apply(x, bounds, self.channel)
                    else:
                        self._require_rows(x)
                        if seed is not None:
                            torch.manual_seed(seed + 1 + self.channel.rank)
                    bounds = self._bounds[layer]
                # A head that is one layer has its own forward replaced by who uses this class.
                x = type(layer).forward(layer, x) if layer is self.head else layer(x)
        return x

    @contextmanager
    def forwarding_to(self, function: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """Let ``head(x)`` call ``function(x)`` within; hooks of the head run as usual. May be nested."""
        before = vars(self.head).get("forward")  # on the instance, not that of the class
        vars(self.head)["forward"] = function
        try:
            yield
        finally:
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
    """Draw random numbers of ``seed`` within, and go on as if nothing had been drawn. None: change nothing."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


class _GatherColumns(torch.autograd.Function):
    """(N, own columns) to (N, all columns); the gradient is summed over ranks, and each gets that of its own."""

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
    """(N, own columns) of each rank, side by side: (N, all columns), apart from autograd. All ranks must call it."""
    # Blocks of columns arrive one after the other in memory, and are put side by side then.
    blocks = [own.new_empty(len(own), end - begin) for begin, end in bounds]
    blocks[channel.rank] = own.detach()
    channel.all_to_all(what, [own] * channel.world_size, blocks).wait()
    return torch.cat(blocks, dim=1)


def require_first_derivative() -> None:
    """Refuse, in a backward, to be differentiated itself: messages have no second derivative here."""
    if torch.is_grad_enabled():
        raise RuntimeError("a head that is divided over ranks cannot be differentiated twice (create_graph=True)")


def sum_in_order(parts: list[Tensor]) -> Tensor:
    """The sum, from first to last, of 16-bit numbers in 32 bits."""
    if len(parts) == 1:
        return parts[0]
    wide = torch.promote_types(parts[0].dtype, torch.float32)
    total = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        total += part
    return total.to(parts[0].dtype)
