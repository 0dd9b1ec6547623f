"""What the optimizers of this package have in common.

Functions instead of a base class: layered SGD asks for an optimizer's exact class before it postpones its step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


def check_options(options: Mapping[str, Any], *not_negative: str) -> None:
    """Check a parameter group's momentum, and those of its options that must not be negative.

    Raises:
        ValueError: one of ``not_negative`` is negative, or ``momentum`` is not in [0, 1).
    """
    for name in not_negative:
        if options[name] < 0:
            raise ValueError(f"{name}={options[name]} must not be negative")
    if not 0 <= options["momentum"] < 1:
        raise ValueError(f"momentum={options['momentum']} must be at least 0 and less than 1")


def call_closure(closure: Callable[[], Any] | None) -> Any:
    """Compute the loss anew, with gradients, as `torch.optim.Optimizer.step` does. Without a closure return None."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def with_velocity(optimizer: Optimizer, group: Mapping[str, Any]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield each parameter of a group that has a gradient, the gradient, and its velocity, which is zero at first."""
    for parameter in group["params"]:
        if parameter.grad is None:
            continue
        state = optimizer.state[parameter]
        if not state:
            state["velocity"] = torch.zeros_like(parameter)
        yield parameter, parameter.grad, state["velocity"]
