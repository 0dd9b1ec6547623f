"""Each pass forward and backward at once: what a sharded head does where the loss of a pass is known (`head_step`).

This is the schedule of arXiv 1404.5997, section 4: forward and backward alternate, and the features of the next pass
travel while the head computes the current one. Only one pass's activations are in memory.
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
Check = Callable[[Tensor, Tensor], None]


@dataclass
class StepResult:
    """What the passes of one step have computed: the loss, and the gradients that backward hands out."""

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
    num_samples = sum(part.num_samples for part in plan)
    loss = features.new_full((), 0.0 if num_samples else torch.nan)
    of_features = FeatureGradients(passes.exchange)
    sums = ParameterGradients(passes.head.parameters)
    detached = features.detach()
    for number, (part, x) in enumerate(prefetch_one(lambda part: passes.exchange.assemble(detached, part), plan)):
        share = part.num_samples / num_samples
        with torch.enable_grad(), passes.one_pass(passes.seed_of_pass(seed, number), x.device, sums):
            x.requires_grad_(features.requires_grad)
            loss_of_part = loss_of(part, x)
            loss = loss + share * loss_of_part.detach()
            # With one update per step, the loss is the mean over the whole step, so a pass counts by its share of the
            # samples. With an update of the head after each pass (variable batch size), the head's loss is the mean
            # over that pass alone. The trunk still has one update per step, so only the features' gradients are
            # multiplied by the share.
            share_of_loss, share_of_x = (share, 1.0) if update is None else (1.0, share)
            with torch.autocast(x.device.type, enabled=False):
                of_x, *of_parameters = gradients_of(scale(loss_of_part) * share_of_loss, [x, *passes.head.parameters])
        of_features.send_back(of_x if of_x is None or share_of_x == 1.0 else of_x * share_of_x, part)
        sums.add(of_parameters)
        if update is not None:
            update(sums.take(reuse_memory=True))
            # Autocast caches 16-bit copies of the parameters. The update has made those of the head stale.
            torch.clear_autocast_cache()
        # Free this pass's graph before the next one's is built, or two of them would be in memory at once.
        del x, loss_of_part, of_x, of_parameters
    return StepResult(loss, of_features.finish(), sums.take(), scale(torch.ones_like(loss)))


def hand_out(result: StepResult, features: Tensor, parameters: Sequence[Tensor], check: Check) -> Tensor:
    """Return the loss as a function of ``features`` and ``parameters``. Its gradients are those of `run_passes`.

    Args:
        result: what `run_passes` has returned.
        features: the features that `run_passes` was given.
        parameters: the head's.
        check: called in backward with the loss and the factor by which it was multiplied. May raise.
    """
    return _HandOut.apply(result, check, features, *parameters)


class _HandOut(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        result: StepResult,
        check: Check,
        features: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        ctx.result = result
        ctx.check = check
        return result.loss

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        require_first_derivative()
        result: StepResult = take_once(ctx, "result")
        found = [result.features_gradient, *result.parameter_gradients]
        factor = gradients[0] / result.loss_scale
        ctx.check(result.loss.detach(), factor)
        # On a GPU, to read the factor takes longer than to multiply: the read waits for the device.
        if factor.is_cuda or factor != 1:
            found = [None if gradient is None else gradient.mul_(factor) for gradient in found]
        return None, None, *found


def require_factor(factor: float, expected: float) -> None:
    """Raise ValueError if the loss was multiplied by another factor: the head was updated without it."""
    if not math.isclose(factor, expected, rel_tol=1e-3):
        raise ValueError(
            f"the loss of head_step was multiplied by {factor / expected:g} before backward. With variable_batch=True "
            "the head is updated within head_step, so the factor would reach the trunk alone; multiply inside of "
            "head_step"
        )
