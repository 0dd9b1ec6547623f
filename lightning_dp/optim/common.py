"""What the optimizers of this package have in common.

Functions instead of a base class: layered SGD asks for an optimizer's exact class before it postpones its step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch


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
