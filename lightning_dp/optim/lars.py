"""LARS: momentum SGD with a learning rate for each layer (You, Gitman and Ginsburg 2017, arXiv 1708.03888)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_dp.optim.common import call_closure, check_options, with_velocity


class LARS(Optimizer):
    """Momentum SGD that scales each weight's update by the ratio of the norms of weight and gradient.

        rate     := lr * trust_coefficient * |w| / (|gradient| + weight_decay * |w|)
        velocity := momentum * velocity + rate * (gradient + weight_decay * w)
        w        := w - velocity

    Biases and the parameters of batch norm, which have one dimension, are updated by momentum SGD with the rate ``lr``
    and without weight decay, as in MLPerf's reference (github.com/mlcommons/training). The learning rate is inside the
    velocity, as in algorithm 1 of the paper; at a constant learning rate the order does not matter.

    An update depends on one parameter and its gradient only, so layered SGD may postpone it. A strategy that shards
    parameters, as `KrizhevskyHybridStrategy` does with the head's, changes the norms; it refuses this optimizer there.

    Args:
        params: parameters or parameter groups, as for any optimizer.
        lr: learning rate.
        momentum: momentum, at least 0 and less than 1.
        weight_decay: weight decay.
        trust_coefficient: eta of the paper.

    Raises:
        ValueError: ``lr``, ``weight_decay`` or ``trust_coefficient`` is negative, or ``momentum`` is not in [0, 1).
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 1e-4,
        trust_coefficient: float = 1e-3,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group. Options that it does not set are those of the constructor."""
        check_options({**self.defaults, **param_group}, "lr", "weight_decay", "trust_coefficient")
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have a gradient. Gradients do not change."""
        loss = call_closure(closure)
        for group in self.param_groups:
            for w, gradient, velocity in with_velocity(self, group):
                update = gradient
                if w.ndim > 1:
                    weight_decay = group["weight_decay"]
                    scale = _trust_ratio(w, gradient, weight_decay, group["trust_coefficient"])
                    update = gradient.add(w, alpha=weight_decay).mul_(scale)
                velocity.mul_(group["momentum"]).add_(update, alpha=group["lr"])
                w.sub_(velocity)
        return loss


def _trust_ratio(
    w: torch.Tensor, gradient: torch.Tensor, weight_decay: float, trust_coefficient: float
) -> torch.Tensor:
    """Return the factor of the learning rate: 1 where a norm is zero, so that a layer of zeros can leave that state.

    A tensor and not a number, because reading a number from a GPU would make the step wait for it.
    """
    norm = torch.linalg.vector_norm(w)
    denominator = torch.linalg.vector_norm(gradient) + weight_decay * norm
    defined = (norm > 0) & (denominator > 0)
    return torch.where(defined, trust_coefficient * norm / denominator, torch.ones_like(norm))
