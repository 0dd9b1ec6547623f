"""Gradients of the passes through a sharded head: computed, scaled, and sent back to the features' ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_dp.strategies.krizhevsky_hybrid.feature_exchange import FeatureExchange, Finish
from lightning_dp.strategies.krizhevsky_hybrid.schemes import SubPass


def gradients_of(
    output: Tensor, inputs: Sequence[Tensor], gradient: Tensor | None = None, retain_graph: bool = False
) -> list[Tensor | None]:
    """Return the gradient of each input, or None if the input needs none or does not contribute to the output."""
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    if not wanted:
        return [None] * len(inputs)
    found = iter(torch.autograd.grad(output, wanted, gradient, retain_graph, allow_unused=True))
    return [next(found) if tensor.requires_grad else None for tensor in inputs]


class FeatureGradients:
    """The gradients of the features, summed over ranks, pass by pass.

    Each rank computes the part that comes through its own slices of the head. The rank that a sample came from
    receives the sum of the parts.
    """

    def __init__(self, exchange: FeatureExchange) -> None:
        self._exchange = exchange
        self._arrived: list[Tensor] = []  # one block of rows for each finished pass
        self._in_flight: Finish | None = None

    def send_back(self, gradient: Tensor | None, part: SubPass) -> None:
        """Start to sum one pass's gradient, (N, *), over ranks, and finish the sum of the previous pass.

        The previous sum has travelled while this pass was computed. It is finished here, and not at the end of the
        step, so that the buffers of at most one pass are in memory.
        """
        self._finish()
        if gradient is not None:
            self._in_flight = self._exchange.sum_back(gradient, part)

    def finish(self) -> Tensor | None:
        """Return the gradient of this rank's own features, (n, *), or None if they need none."""
        self._finish()
        return torch.cat(self._arrived) if self._arrived else None

    def _finish(self) -> None:
        if self._in_flight is not None:
            self._arrived.append(self._in_flight())
            self._in_flight = None


def scale_gradient(x: Tensor, factor: float) -> Tensor:
    """Return ``x``; its gradient is multiplied by ``factor`` in backward."""
    return _ScaleGradient.apply(x, factor)


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.factor, None


def require_no_part(loss: Tensor, others: Mapping[str, Tensor]) -> None:
    """Raise ValueError if one of the ``others``, which are parameters by name, contributes to ``loss``."""
    gradients = gradients_of(loss, list(others.values()), retain_graph=True) if loss.requires_grad else []
    for name, gradient in zip(others, gradients, strict=False):
        if gradient is not None:
            raise ValueError(
                f"head_step uses the parameter {name}, which is not in the head and would not be trained; use it in "
                "training_step, before head_step is called. If it belongs to a layer behind the head, do without "
                "head_step: call the head and that layer in training_step, and compute the loss there"
            )


def reaches_any(output: Tensor, nodes: Collection[Any]) -> bool:
    """Return whether backward from ``output`` runs through one of these nodes of the autograd graph."""
    # Level by level: the head is near the loss, so the search seldom comes to the trunk.
    to_visit = deque([output.grad_fn])
    seen = set(to_visit)
    while to_visit:
        node = to_visit.popleft()
        if node in nodes:
            return True
        for following, _ in () if node is None else node.next_functions:
            if following not in seen:
                seen.add(following)
                to_visit.append(following)
    return False


def take_once(ctx: Any, name: str) -> Any:
    """Return ``ctx.name`` and drop it, so that its memory is freed as early as possible.

    Raises:
        RuntimeError: it was taken before, so backward runs a second time.
    """
    value = getattr(ctx, name)
    if value is None:
        raise RuntimeError("backward went through the sharded head a second time; compute the loss anew before each")
    setattr(ctx, name, None)
    return value
