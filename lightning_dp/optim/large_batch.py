"""Training with large batches: LARS, warm-up schedules, and groups of parameters with and without weight decay."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lightning_dp._private.torch_names import is_flattened
from lightning_dp.optim.krizhevsky import call_closure, check_options, scale_learning_rate, with_velocity


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
        ValueError: ``lr``, ``weight_decay`` or ``trust_coefficient`` is negative, or ``momentum`` is not in [0, 1), or
            FSDP1 has flattened the parameters.
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
        _require_shapes(parameter for group in self.param_groups for parameter in group["params"])

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


# --- Schedules that begin with a linear warm-up, in fractions of the whole training.


def multistep_with_warmup(
    optimizer: Optimizer,
    total_steps: int,
    warmup: float = 5 / 90,
    start_lr: float = 0.1,
    milestones: Sequence[float] = (30 / 90, 60 / 90, 80 / 90),
    factor: float = 0.1,
) -> LambdaLR:
    """Return a schedule with a linear warm-up and then a constant rate, multiplied by ``factor`` at each milestone.

    The defaults are those of Goyal et al. 2017 (arXiv 1706.02677, sections 2.2 and 5.1) for 90 epochs. Call its
    ``step()`` after every optimizer step.

    Args:
        optimizer: the optimizer.
        total_steps: number of optimizer steps of the whole training, not of batches: with gradient accumulation over N
            batches, a step is one of N of them.
        warmup: length of the warm-up, as a fraction of ``total_steps``.
        start_lr: learning rate of the first step. Groups with a smaller rate keep it during the warm-up.
        milestones: fractions of ``total_steps``, ascending, between 0 and 1.
        factor: factor of each milestone.

    Raises:
        ValueError: an argument makes no sense.
    """
    milestones = tuple(milestones)
    if list(milestones) != sorted(set(milestones)) or not all(0 < milestone < 1 for milestone in milestones):
        raise ValueError(f"milestones={milestones} must ascend, between 0 and 1, for example (0.25, 0.5, 0.75)")
    return _with_warmup(
        optimizer, total_steps, warmup, start_lr, lambda done: factor ** bisect_right(milestones, done + 1e-9)
    )


def polynomial_with_warmup(
    optimizer: Optimizer,
    total_steps: int,
    warmup: float = 5 / 90,
    start_lr: float = 0.0,
    power: float = 2.0,
) -> LambdaLR:
    """Return a schedule with a linear warm-up and then a polynomial fall to zero: (1 - share of the rest) ** power.

    MLPerf's reference for LARS has power 2. With power 1 both parts are linear, as in FFCV's recipes. Call its
    ``step()`` after every optimizer step.

    Args:
        optimizer: the optimizer.
        total_steps: number of optimizer steps of the whole training, not of batches: with gradient accumulation over N
            batches, a step is one of N of them.
        warmup: length of the warm-up, as a fraction of ``total_steps``.
        start_lr: learning rate at the beginning of the warm-up.
        power: exponent of the fall.

    Raises:
        ValueError: an argument makes no sense.
    """
    if power <= 0:
        raise ValueError(f"power={power} must be positive")
    return _with_warmup(
        optimizer, total_steps, warmup, start_lr, lambda done: max(0.0, (1 - done) / (1 - warmup)) ** power
    )


def _with_warmup(
    optimizer: Optimizer, total_steps: int, warmup: float, start_lr: float, after: Callable[[float], float]
) -> LambdaLR:
    """Return a schedule. ``after`` maps the share of the steps that are done, 0 to 1, to the factor of the rate."""
    if total_steps < 1:
        raise ValueError(f"total_steps={total_steps} must be a positive number")
    if not 0 <= warmup < 1:
        raise ValueError(f"warmup={warmup} must be a fraction of all steps, at least 0 and less than 1")
    if start_lr < 0:
        raise ValueError(f"start_lr={start_lr} must not be negative")

    def factor_of(rate: float) -> Callable[[int], float]:
        start = min(1.0, start_lr / rate) if rate > 0 else 1.0

        def factor(step: int) -> float:
            done = step / total_steps
            return start + (1 - start) * done / warmup if done < warmup else after(done)

        return factor

    # The state of an optimizer that had a schedule has the rate of that step as "lr", and this one beside it.
    rates = [group.get("initial_lr", group["lr"]) for group in optimizer.param_groups]
    return LambdaLR(optimizer, [factor_of(rate) for rate in rates])


# --- Parameter groups with and without weight decay.


def weight_decay_groups(
    model: nn.Module, *, lr: float, weight_decay: float, batch_size: int = 256, reference_batch_size: int = 256
) -> list[dict[str, Any]]:
    """Return parameter groups "decayed" and "not_decayed", with the learning rate for a batch size.

    Biases and the parameters of batch norm, which have one dimension, are not decayed (Goyal et al. 2017, arXiv
    1706.02677, section 5.1). The learning rate grows linearly with the batch, and the weight decay does not change
    (section 2.1).

    Args:
        model: the network.
        lr: learning rate for ``reference_batch_size``.
        weight_decay: weight decay of weights.
        batch_size: number of images in a global batch, over all ranks.
        reference_batch_size: the batch size that ``lr`` is for.

    Raises:
        ValueError: ``lr`` or a batch size is not positive, or ``weight_decay`` is negative, or FSDP1 has flattened the
            parameters.
    """
    if weight_decay < 0:  # torch's optimizers check their own argument, and not what a group has
        raise ValueError(f"weight_decay={weight_decay} must not be negative")
    rate = scale_learning_rate(lr, batch_size / reference_batch_size)
    parameters = list(model.parameters())
    _require_shapes(parameters)
    decayed = [parameter for parameter in parameters if parameter.ndim > 1]
    rest = [parameter for parameter in parameters if parameter.ndim <= 1]
    groups = [
        {"params": decayed, "name": "decayed", "lr": rate, "weight_decay": weight_decay},
        {"params": rest, "name": "not_decayed", "lr": rate, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _require_shapes(parameters: Iterable[torch.Tensor]) -> None:
    """Raise ValueError if weights look like biases, because they are shards of FSDP1."""
    flattened = [parameter for parameter in parameters if is_flattened(parameter)]
    if flattened and all(parameter.ndim <= 1 for parameter in flattened):
        raise ValueError(
            "FSDP1 (FSDPStrategy) has flattened the parameters, so that weights look like biases; use FSDP2 "
            "(ModelParallelStrategy or LayeredFSDPStrategy), which keeps their shapes"
        )
