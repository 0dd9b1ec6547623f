"""Loss functions for logits whose classes are sharded over ranks (arXiv 1404.5997, section 5)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_dp._private.torch_names import assert_async
from lightning_dp.collectives.all_to_all import Channel
from lightning_dp.strategies.krizhevsky_hybrid.parameter_gradients import require_first_derivative
from lightning_dp.strategies.krizhevsky_hybrid.sharded_head import Bounds

if TYPE_CHECKING:
    from lightning_dp.strategies.krizhevsky_hybrid.sharded_logits import ShardedLogits


class _SumOverRanks(torch.autograd.Function):
    """The sum of all ranks' shares of one loss. Its gradient is the gradient of each share."""

    @staticmethod
    def forward(ctx: Any, share: Tensor, channel: Channel) -> Tensor:
        return channel.all_gather("loss", share).sum(dim=0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _CrossEntropy(torch.autograd.Function):
    """Per sample: (1 - e) (lse - z_target) + e (lse - mean z), with lse = log sum exp z and label smoothing e."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, target: Tensor, bounds: Bounds, channel: Channel, smoothing: float) -> Tensor:
        begin, end = bounds[channel.rank]
        largest = own.max(dim=1).values if end > begin else own.new_full((len(own),), -torch.inf)
        largest = channel.all_gather("loss", largest).max(dim=0).values
        is_own = (target >= begin) & (target < end)
        column = torch.where(is_own, target - begin, 0)[:, None]
        at_target = own.gather(1, column)[:, 0] if end > begin else torch.zeros_like(largest)
        sums = torch.stack([(own - largest[:, None]).exp().sum(1), torch.where(is_own, at_target, 0.0), own.sum(1)])
        exp_sum, at_target, total = channel.all_gather("loss", sums).sum(dim=0)
        lse = largest + exp_sum.log()
        ctx.save_for_backward(own, lse, is_own, column)
        ctx.num_classes, ctx.smoothing = bounds[-1][1], smoothing
        return lse - (1 - smoothing) * at_target - smoothing * total / ctx.num_classes

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        require_first_derivative()
        own, lse, is_own, column = ctx.saved_tensors
        gradient = (own - lse[:, None]).exp() - ctx.smoothing / ctx.num_classes
        if own.shape[1]:
            gradient.scatter_add_(1, column, (ctx.smoothing - 1) * is_own[:, None].to(own.dtype))
        return gradients[0][:, None] * gradient, None, None, None, None


def cross_entropy(
    logits: ShardedLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: None = None,
    ignore_index: int = -100,
    reduce: None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """Return F.cross_entropy, or None for options that need whole logits: weights, and targets that are probabilities.

    The mean over no target is 0 here and NaN in torch. A pass may contain only ignored targets, and then contributes
    nothing to the mean of the step.
    """
    plain = weight is None and size_average is reduce is None and reduction in ("mean", "sum", "none")
    if not plain or target.dim() != 1 or target.is_floating_point():
        return None
    own = _at_least_32_bits(logits.own)
    counts = target != ignore_index
    _require_classes(target, counts, logits.bounds[-1][1])
    losses = _CrossEntropy.apply(own, torch.where(counts, target, 0), logits.bounds, logits.channel, label_smoothing)
    losses = torch.where(counts, losses, 0.0)
    if reduction == "none":
        return losses
    return losses.sum() / counts.sum().clamp(min=1) if reduction == "mean" else losses.sum()


def binary_cross_entropy(
    logits: ShardedLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: None = None,
    reduce: None = None,
    reduction: str = "mean",
    pos_weight: Tensor | None = None,
) -> Tensor | None:
    """Return F.binary_cross_entropy_with_logits, or None for options that need whole logits: weights, no reduction."""
    plain = weight is None and pos_weight is None and size_average is reduce is None and reduction in ("mean", "sum")
    if not plain or isinstance(target, type(logits)) or target.requires_grad or target.shape != logits.shape:
        return None
    begin, end = logits.bounds[logits.channel.rank]
    own = _at_least_32_bits(logits.own)
    share = F.binary_cross_entropy_with_logits(own, target[:, begin:end].to(own.dtype), reduction="sum")
    total: Tensor = _SumOverRanks.apply(share, logits.channel)
    return total / logits.numel() if reduction == "mean" else total


def _require_classes(target: Tensor, counts: Tensor, num_classes: int) -> None:
    """Raise IndexError, as torch does, for a target that is no class. On a GPU the check runs asynchronously."""
    wrong = counts & ((target < 0) | (target >= num_classes))
    if target.is_cuda:
        assert_async(~wrong.any())
    elif wrong.any():
        raise IndexError(f"Target {int(target[wrong][0])} is out of bounds; classes are 0 to {num_classes - 1}")


def _at_least_32_bits(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
