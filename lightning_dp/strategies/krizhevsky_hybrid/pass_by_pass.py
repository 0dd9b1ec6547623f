"""Forward and backward of each pass at once: what a sharded head does where the loss of a pass is known (`head_step`).

This is the schedule of arXiv 1404.5997, section 4: K forward and backward passes alternate, and the features of the
next pass travel while the head works on this one. Only one pass's activations are in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_dp.strategies.krizhevsky_hybrid.feature_exchange import prefetch_one
from lightning_dp.strategies.krizhevsky_hybrid.gradients import FeatureGradients, gradients_of, take_once
from lightning_dp.strategies.krizhevsky_hybrid.parameter_gradients import ParameterGradients, require_first_derivative
from lightning_dp.strategies.krizhevsky_hybrid.schemes import SubPass

if TYPE_CHECKING:
    from lightning_dp.strategies.krizhevsky_hybrid.head_passes import HeadPasses

LossOfPass = Callable[[SubPass, Tensor], Tensor]
Update = Callable[[Sequence[Tensor | None]], None]
Scale = Callable[[Tensor], Tensor]


@dataclass
class StepResult:
    """What the passes of one step have computed: the loss, and gradients that backward only hands out."""

    loss: Tensor
    features_gradient: Tensor | None
    parameter_gradients: list[Tensor | None]
    loss_scale: Tensor  # the gradients are those of loss * loss_scale


def run_passes(
    passes: HeadPasses,
    features: Tensor,
    plan: list[SubPass],
    seed: int | None,
    loss_of: LossOfPass,
    update: Update | None,
    scale: Scale,
) -> StepResult:
    """Run forward and backward of each pass. All ranks must call it; arguments are those of `HeadPasses.step`."""
    num_examples = sum(part.num_examples for part in plan)
    loss = features.new_full((), 0.0 if num_examples else torch.nan)
    of_features = FeatureGradients(passes.exchange)
    sums = ParameterGradients(passes.head.parameters)
    detached = features.detach()
    for number, (part, x) in enumerate(prefetch_one(lambda part: passes.exchange.assemble(detached, part), plan)):
        share = part.num_examples / num_examples
        with torch.enable_grad(), passes.one_pass(passes.seed_of_pass(seed, number), x.device, sums):
            x.requires_grad_(features.requires_grad)
            loss_of_part = loss_of(part, x)
            loss = loss + share * loss_of_part.detach()
            # One update of everything follows the mean over the whole step, so a pass counts by its share of examples.
            # An update of the head after each pass follows the mean over that pass alone; there the share is left to
            # the features, whose gradients still belong to one update of the trunk.
            share_of_loss, share_of_x = (share, 1.0) if update is None else (1.0, share)
            with torch.autocast(x.device.type, enabled=False):
                of_x, *of_parameters = gradients_of(scale(loss_of_part) * share_of_loss, [x, *passes.head.parameters])
        of_features.send_back(of_x if of_x is None or share_of_x == 1.0 else of_x * share_of_x, part)
        sums.add(of_parameters)
        if update is not None:
            update(sums.take(reuse_memory=True))
            # Autocast caches 16-bit copies of parameters; those of the head are stale now.
            torch.clear_autocast_cache()
        # Free this pass's graph before the next one's is built, or two of them would be in memory at once.
        del x, loss_of_part, of_x, of_parameters
    return StepResult(loss, of_features.finish(), sums.take(), scale(torch.ones_like(loss)))


def hand_out(
    result: StepResult, features: Tensor, parameters: Sequence[Tensor], only_factor: float | None = None
) -> Tensor:
    """Return the loss. Its backward gives ``features`` and ``parameters`` the gradients that are computed already.

    Args:
        result: of `run_passes`.
        features: those that it was given.
        parameters: the head's.
        only_factor: what backward may multiply the loss's gradient by; None: anything.
    """
    return _HandOut.apply(result, only_factor, features, *parameters)


class _HandOut(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, result: StepResult, only_factor: float | None, features: Tensor, *parameters: Tensor
    ) -> Tensor:
        ctx.result = result
        ctx.only_factor = only_factor
        return result.loss

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        require_first_derivative()
        result: StepResult = take_once(ctx, "result")
        found = [result.features_gradient, *result.parameter_gradients]
        factor = gradients[0] / result.loss_scale
        if ctx.only_factor is not None:
            _require_factor(factor.item(), ctx.only_factor)
        # On a GPU reading the factor would wait for the device, which costs more than the multiplication.
        if factor.is_cuda or factor != 1:
            found = [None if gradient is None else gradient.mul_(factor) for gradient in found]
        return None, None, *found


def _require_factor(factor: float, expected: float) -> None:
    """Raise ValueError if the loss was multiplied by something: the head's updates have been made without it."""
    if not math.isclose(factor, expected, rel_tol=1e-3):
        raise ValueError(
            f"the loss of head_step was multiplied by {factor / expected:g} before backward. With variable_batch=True "
            "the head is updated within head_step, so the factor would reach the trunk alone; multiply inside of "
            "head_step"
        )
