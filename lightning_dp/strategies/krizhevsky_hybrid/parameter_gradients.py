"""Gradients of the head's parameters, summed over the passes as they are computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ParameterGradients:
    """The sum of the gradients of ``parameters`` over several passes, multiplied by ``factor``.

    A weight's gradient is the product of two matrices with few rows each, and is as large as the weight. Autograd would
    write the product to new memory in each pass and then add it to the total. With AlexNet's head and 32 samples, that
    takes three times as long as the product itself. Here the product is added to the total as it is computed.

    Args:
        parameters: this rank's rows of the head's parameters.
        factor: multiplies every gradient that is added.
    """

    def __init__(self, parameters: Sequence[Tensor], factor: float = 1.0) -> None:
        self._parameters = list(parameters)
        self._factor = factor
        self._totals: dict[Tensor, Tensor] = {}
        self._spare: dict[Tensor, Tensor] = {}  # memory of totals that were taken, to be written again

    def linear(self, x: Tensor, layer: nn.Linear) -> Tensor:
        """Apply ``layer`` to x, (N, in) to (N, out). In backward, this object receives the weight's gradient.

        Autograd receives the bias's, which is small.
        """
        # Autocast chooses dtypes within F.linear and keeps 16-bit copies of the weights, so autograd must see it.
        if not torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type):
            return F.linear(x, layer.weight, layer.bias)
        return _Linear.apply(x, layer.weight, layer.bias, self)

    def add_product(self, weight: Tensor, of_output: Tensor, x: Tensor) -> None:
        """Add a weight's gradient: that of the layer's output (N, out), transposed, times the input x (N, in)."""
        total = self._totals.get(weight)
        if total is not None:
            total.addmm_(of_output.T, x, alpha=self._factor)
            return
        total = self._spare.pop(weight, None)
        total = torch.empty_like(weight) if total is None else total
        # With beta=0 torch ignores what is in the memory, even NaN.
        self._totals[weight] = torch.addmm(total, of_output.T, x, beta=0, alpha=self._factor, out=total)

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        """Add gradients, in the order of the parameters. The given tensors may be changed in place, or kept."""
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            total = self._totals.get(parameter)
            if gradient is not None and total is not None:
                total.add_(gradient, alpha=self._factor)
            elif gradient is not None:
                self._totals[parameter] = gradient if self._factor == 1.0 else gradient.mul_(self._factor)

    def take(self, reuse_memory: bool = False) -> list[Tensor | None]:
        """Return the totals in the order of the parameters, None where nothing was added, and start again from zero.

        Args:
            reuse_memory: whether the next pass may write to the returned tensors. The caller needs them until then.
        """
        taken = [self._totals.get(parameter) for parameter in self._parameters]
        self._spare = self._totals if reuse_memory else {}
        self._totals = {}
        return taken


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, sums: ParameterGradients) -> Tensor:
        ctx.sums = sums
        ctx.weight = weight  # hooks on saved tensors may return another object, and the totals are kept by object
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:
        require_first_derivative()
        x, weight = ctx.saved_tensors
        (of_output,) = gradients
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        if needs_weight:
            ctx.sums.add_product(ctx.weight, of_output, x)
        return of_output @ weight if needs_x else None, None, of_output.sum(0) if needs_bias else None, None


def require_first_derivative() -> None:
    """Raise RuntimeError in a backward with ``create_graph=True``: messages have no second derivative here."""
    if torch.is_grad_enabled():
        raise RuntimeError("a head that is sharded over ranks cannot be differentiated twice (create_graph=True)")
