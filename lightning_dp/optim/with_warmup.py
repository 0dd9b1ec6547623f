"""Schedules that begin with a linear warm-up, in fractions of the whole training."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


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
        total_steps: number of optimizer steps of the whole training.
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
        total_steps: number of optimizer steps of the whole training.
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

    return LambdaLR(optimizer, [factor_of(group["lr"]) for group in optimizer.param_groups])
