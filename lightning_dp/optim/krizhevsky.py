"""Scaling rules for larger batches, per-part batch sizes, and the update rule and schedule of the paper.

Everything follows Krizhevsky 2014, "One weird trick for parallelizing convolutional neural networks" (arXiv 1404.5997),
section 5, and uses its symbols: epsilon is the learning rate, omega the weight decay, mu the momentum, and k the factor
by which the batch grows.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import MultiStepLR

log = logging.getLogger(__name__)

Rule = Literal["linear", "sqrt"]


def scale_learning_rate(lr: float, k: float, rule: Rule = "linear") -> float:
    """Return the learning rate for a batch ``k`` times larger.

    Args:
        lr: learning rate of the old batch size.
        k: new batch size / old batch size.
        rule: ``"linear"`` returns k lr, which the paper found to work best. ``"sqrt"`` returns sqrt(k) lr, which keeps
            the variance of the expected gradient constant.

    Raises:
        ValueError: ``lr`` or ``k`` is not positive, or the rule is unknown.
    """
    _require_positive(lr=lr, k=k)
    if rule not in ("linear", "sqrt"):
        raise ValueError(f"rule={rule!r} must be 'linear' or 'sqrt'")
    return lr * (k if rule == "linear" else math.sqrt(k))


def scale_weight_decay(weight_decay: float, lr: float, k: float, rule: Rule | None = None) -> float:
    """Return the weight decay for a batch ``k`` times larger, so that one step decays as much as k steps did before.

    omega' = (1 - (1 - epsilon omega)^k) / epsilon', where epsilon' = sqrt(k) epsilon. It is nearly sqrt(k) omega. With
    the linear rule, epsilon' = k epsilon, it is nearly omega itself, which is what the paper used then.

    Args:
        weight_decay: weight decay of the old batch size.
        lr: learning rate of the *old* batch size.
        k: new batch size / old batch size.
        rule: the rule by which the learning rate grows. Pass the same one to `scale_learning_rate`. None means
            ``"sqrt"``, for which the paper's formula is, with a warning: `scale_learning_rate` has another default.
            `scale_for_batch_size` scales both by one rule.

    Raises:
        ValueError: ``lr`` or ``k`` is not positive, ``weight_decay`` is negative, ``lr * weight_decay`` is 1 or more,
            so that a single old step would remove the weights entirely, or the rule is unknown.
    """
    if rule is None:
        log.warning(
            "scale_weight_decay() without a rule assumes that the learning rate grows with sqrt(k); pass rule='linear' "
            "or rule='sqrt', the same as to scale_learning_rate(), whose default is 'linear'"
        )
        rule = "sqrt"
    new_lr = scale_learning_rate(lr, k, rule)
    if not 0 <= lr * weight_decay < 1:
        raise ValueError(
            f"weight_decay={weight_decay} with lr={lr} removes {lr * weight_decay:g} of the weights in each step; "
            "their product must be at least 0 and less than 1"
        )
    return -math.expm1(k * math.log1p(-lr * weight_decay)) / new_lr


def scale_for_batch_size(lr: float, weight_decay: float, k: float, rule: Rule) -> tuple[float, float]:
    """Return learning rate and weight decay for a batch ``k`` times larger, by one rule.

    Args:
        lr: learning rate of the old batch size.
        weight_decay: weight decay of the old batch size.
        k: new batch size / old batch size.
        rule: see `scale_learning_rate`.

    Raises:
        ValueError: see `scale_learning_rate` and `scale_weight_decay`.
    """
    return scale_learning_rate(lr, k, rule), scale_weight_decay(weight_decay, lr, k, rule)


class KrizhevskySGD(Optimizer):
    """Momentum SGD with the learning rate inside the velocity, which is the paper's update rule.

        velocity := mu velocity - epsilon (gradient + omega w)
        w := w + velocity

    `torch.optim.SGD` multiplies the velocity by the learning rate afterwards. The two agree while the learning rate is
    constant. When it changes, this optimizer keeps the accumulated velocity, while SGD scales it by the same factor.

    Args:
        params: parameters or parameter groups, as for any optimizer.
        lr: learning rate, epsilon.
        momentum: mu. The paper uses 0.9 for all batch sizes.
        weight_decay: omega. The paper uses 0.0005.

    Raises:
        ValueError: ``lr`` or ``weight_decay`` is negative, or ``momentum`` is not in [0, 1).
    """

    def __init__(self, params: Any, lr: float, momentum: float = 0.9, weight_decay: float = 0.0005) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group. Options that it does not set are those of the constructor."""
        check_options({**self.defaults, **param_group}, "lr", "weight_decay")
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have a gradient. The others and their velocities do not change."""
        loss = call_closure(closure)
        for group in self.param_groups:
            lr, momentum, weight_decay = group["lr"], group["momentum"], group["weight_decay"]
            for w, gradient, velocity in with_velocity(self, group):
                velocity.mul_(momentum).add_(gradient, alpha=-lr).add_(w, alpha=-lr * weight_decay)
                w.add_(velocity)
        return loss


def krizhevsky_schedule(
    optimizer: Optimizer,
    total_steps: int,
    factor: float = 250 ** (-1 / 3),
    milestones: Sequence[float] = (0.25, 0.5, 0.75),
) -> MultiStepLR:
    """Return a schedule that multiplies the learning rate by ``factor`` at each milestone: by 1/250 in all, by default.

    Call its ``step()`` after every optimizer step.

    Args:
        optimizer: the optimizer.
        total_steps: number of optimizer steps of the whole training.
        factor: factor of each change.
        milestones: fractions of ``total_steps``, ascending, between 0 and 1. A milestone that falls inside a step takes
            effect with the next step.

    Raises:
        ValueError: ``total_steps`` or ``factor`` is not positive, or the milestones are not ascending fractions.
    """
    _require_positive(total_steps=total_steps, factor=factor)
    milestones = tuple(milestones)
    if list(milestones) != sorted(set(milestones)) or not all(0 < milestone < 1 for milestone in milestones):
        raise ValueError(f"milestones={milestones} must ascend, between 0 and 1, for example (0.25, 0.5, 0.75)")
    # A little less, because 0.07 * 100 is slightly more than 7 in floating point, and would be rounded up to 8.
    steps = [math.ceil(total_steps * milestone - 1e-9 * total_steps) for milestone in milestones]
    schedule = MultiStepLR(optimizer, steps, gamma=factor)
    # Into its state, which has the milestones: a longer run that continues from it would keep those of the shorter one.
    schedule.total_steps = total_steps  # type: ignore[attr-defined]
    return schedule


def trunk_and_head_groups(
    model: nn.Module,
    head: str = "head",
    *,
    lr: float,
    weight_decay: float,
    trunk_batch_scale: float = 1,
    head_batch_scale: float = 1,
    rule: Rule = "linear",
) -> list[dict[str, Any]]:
    """Return parameter groups "trunk" and "head", each with the learning rate and weight decay for its own batch size.

    With a variable batch size (section 4.2), K ranks with n images each use a batch of n in the head and of nK in the
    trunk. If ``lr`` and ``weight_decay`` are for batches of n, pass ``trunk_batch_scale=K``.

    Args:
        model: the network.
        head: dotted name of the head's submodule in ``model``. All other parameters belong to the trunk.
        lr: learning rate at scale 1.
        weight_decay: weight decay at scale 1.
        trunk_batch_scale: batch size of the trunk / batch size that ``lr`` is for.
        head_batch_scale: batch size of the head / batch size that ``lr`` is for.
        rule: see `scale_learning_rate` and `scale_weight_decay`.

    Raises:
        ValueError: the submodule does not exist, or one of the two parts has no parameters. Also what the scaling rules
            raise.
    """
    modules = dict(model.named_modules())
    if not head or head not in modules:
        children = ", ".join(name for name, _ in model.named_children())
        raise ValueError(f"head={head!r} names no submodule of {type(model).__name__}, which has {children}")
    in_head = set(modules[head].parameters())
    parts = {
        "trunk": ([p for p in model.parameters() if p not in in_head], trunk_batch_scale),
        "head": (list(modules[head].parameters()), head_batch_scale),
    }
    groups = []
    for name, (parameters, scale) in parts.items():
        if not parameters:
            raise ValueError(f"with head={head!r}, the {name} of {type(model).__name__} has no parameters")
        new_lr, new_weight_decay = scale_for_batch_size(lr, weight_decay, scale, rule)
        groups.append({"params": parameters, "name": name, "lr": new_lr, "weight_decay": new_weight_decay})
    return groups


def _require_positive(**values: float) -> None:
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name}={value} must be a positive number")


# --- What the optimizers of this package have in common.
#
# Functions instead of a base class: layered SGD asks for an optimizer's exact class before it postpones its step.


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
    """Compute the loss again, with gradients, as `torch.optim.Optimizer.step` does. Without a closure return None."""
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
