"""The whole head on every rank, for uses outside of training steps: evaluation, sample images, a logger's graph.

Under DDP any rank may call the model at any time: rank 0 logs sample images, traces the model for a graph, or validates
more batches than the others. The forward of a sharded head needs all ranks, so such a call would wait for ranks that
never come. Therefore all ranks gather the head's rows at points that all of them reach (`GatherHead`), and keep them
until the next training step changes them. In between, each rank computes the head alone and sends nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from lightning_dp._private.torch_names import version_of
from lightning_dp.strategies.krizhevsky_hybrid.parameter_rows import whole_on_all_ranks
from lightning_dp.strategies.krizhevsky_hybrid.sharded_head import ShardedHead, SharedByCopies


class GatheredHead(SharedByCopies):
    """The whole values of the head's parameters, as they are at construction.

    The constructor is a collective: all ranks must call it. The methods need no other rank.

    Raises:
        torch.OutOfMemoryError: the whole head does not fit on the device. The message names the option that avoids it.
    """

    def __init__(self, head: ShardedHead) -> None:
        self._head = head
        self._caller = _Caller(head.head)
        # torch counts the changes of a tensor in place. They show whether an optimizer or a user has changed the rows.
        self._versions = {p: version_of(p) for p in head.parameters}
        # They do not show a change of ``p.data``, as some callbacks of averaged weights make it. It changes all values.
        self._samples = {p: sample_of(p) for p in head.parameters}
        try:
            self._whole = {p: whole_on_all_ranks(head, p.data, p, p.device) for p in head.parameters}
        except torch.OutOfMemoryError as error:
            raise torch.OutOfMemoryError(
                f"evaluation gathers the whole head {head.name!r}, which does not fit on the device beside this rank's "
                f"rows; use KrizhevskyHybridStrategy(evaluation='sharded'). torch says: {error}"
            ) from error

    @property
    def is_current(self) -> bool:
        """Whether this rank's rows are still those that were gathered."""
        if any(version_of(p) != version for p, version in self._versions.items()):
            return False
        # `torch.jit.trace` would record the comparison, and warn of it.
        return torch.jit.is_tracing() or all(
            torch.allclose(sample_of(p), sample, rtol=0, atol=0, equal_nan=True) for p, sample in self._samples.items()
        )

    @property
    def has_same_rows(self) -> bool:
        """Whether this rank's rows are bitwise those that were gathered. This reads all values, `is_current` a few."""
        rank = self._head.channel.rank
        bounds = {p: self._head.bounds_of(p)[rank] for p in self._head.parameters}
        return all(torch.equal(self._whole[p][begin:end], p.data) for p, (begin, end) in bounds.items())

    def value_of(self, parameter: Tensor) -> Tensor:
        """Return the whole value of one of the head's parameters."""
        return self._whole[parameter]

    def forward(self, x: Tensor) -> Tensor:
        """Return the head's output for x, (N, *) to (N, C), computed on this rank alone as before `fit`."""
        if torch.jit.is_tracing():
            return self._trace(x)
        with_gradient = torch.is_grad_enabled()
        named = self._caller.named_parameters(remove_duplicate=False)
        values = {name: self._in_graph(p) if with_gradient else self._whole[p] for name, p in named}
        # This calls the head's own forward with other values for its parameters. The parameters themselves keep their
        # rows, and hooks within the head see whole activations.
        return functional_call(self._caller, values, (x,))

    def _trace(self, x: Tensor) -> Tensor:
        """Return the head's output layer by layer, because `torch.jit.trace` cannot record a functional_call."""
        for layer in self._head.layers:
            if isinstance(layer, nn.Linear):
                x = F.linear(x, self._whole[layer.weight], None if layer.bias is None else self._whole[layer.bias])
            else:
                x = layer(x)
        return x

    def _in_graph(self, parameter: Tensor) -> Tensor:
        """Return the whole value as a function of the rows, so that ``backward()`` leaves gradients in ``.grad``."""
        begin, end = self._head.bounds_of(parameter)[self._head.channel.rank]
        return _WholeValue.apply(parameter, self._whole[parameter], begin, end)


def sample_of(parameter: Tensor, size: int = 1024) -> Tensor:
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
    """Rows to the whole value, which is known already. Backward returns the rows' part of this rank's own gradient."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, whole: Tensor, begin: int, end: int) -> Tensor:
        ctx.bounds = begin, end
        return whole.view_as(whole)  # a view, because autograd would mark ``whole`` itself as part of the graph

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        begin, end = ctx.bounds
        return gradients[0][begin:end].clone(), None, None, None
