"""Batch normalization with the statistics of all ranks' batches: the arithmetic and its two collectives.

Liu et al., "Training Deep Nets with larger batch size on multi-GPUs" (2018), Algorithms 1 to 5, with one departure. The
paper's variance, sigma^2 = v - u^2 (equation 5), suffers cancellation in float32 if the mean is much larger than the
standard deviation. Here each rank sends (mean, sum of squared deviations, count), and these are combined by

    Chan, Golub & LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances" (1979).

PyTorch's fused kernels process the activations. Python code works on tensors of one number per channel. On CUDA that
Python code launches more kernels than the activations need, so eager code there uses `fused_batch_norm`. Compiled code
is this one on all devices: the compiler fuses it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import override

from lightning_dp._private.torch_names import declare_no_unseen_changes
from lightning_dp.collectives.small_all_gather import small_all_gather

# Elements that are centered at a time on CPU. A part of this size stays in the cache; a centered copy of a whole
# activation would not.
_PART_ELEMENTS = 2**17


def statistics_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of the statistics: float64 for float64 activations, float32 for all others, including half."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def local_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and sum of squared deviations of each channel (Algorithm 1). An empty batch gives zeros.

    Args:
        x: (N, C, *).

    Returns:
        Two tensors (C,) of `statistics_dtype`.
    """
    dtype = statistics_dtype(x)
    if x.numel() == 0:
        zeros = torch.zeros(2, x.shape[1], dtype=dtype, device=x.device)
        return zeros[0], zeros[1]
    # Sums of deviations from a shift close to the mean. torch.batch_norm_update_stats adds the values themselves, one
    # after the other within a thread: in channels-last float32 and with a mean of 10,000 standard deviations, its
    # variance is several times too large. For contiguous activations it takes ten times as long as the sums below. The
    # mean of the first part is such a shift: if it is far from the mean of the whole batch, then the first part itself
    # is far from it, and the variance is as large as the squared distance.
    dims = [dim for dim in range(x.dim()) if dim != 1]
    # The compiler would unroll the loop over parts, once for each number of them, and it makes loops of its own.
    parts = (x,) if torch.compiler.is_compiling() else x.split(max(1, _PART_ELEMENTS // x[0].numel()))
    shift = parts[0].mean(dims, dtype=dtype)
    center = _per_channel(shift, x)
    sums = torch.zeros_like(shift)
    squares = torch.zeros_like(shift)
    for part in parts:
        centered = part - center  # of half-precision activations in float32, the dtype of the shift
        sums += centered.sum(dims)
        squares += centered.square_().sum(dims)
    distance = sums / (x.numel() // x.shape[1])
    return shift + distance, squares - sums * distance


def combine_moments(moments: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the moments of the union of all ranks' batches (Algorithm 2, in the form of Chan et al.).

    Args:
        moments: (ranks, 2 C + 1). The row of a rank holds mean (C), sum of squared deviations (C) and count (1).

    Returns:
        Mean, variance and unbiased variance, each (C,), in float64. Zeros if all batches are empty.
    """
    num_channels = moments.shape[1] // 2
    mean, deviations, count = moments.double().split([num_channels, num_channels, 1], dim=1)
    total = count.sum().clamp_(min=1)  # not 0 if all batches are empty, which would give NaN
    global_mean = (count * mean).sum(0).div_(total)
    deviations = torch.addcmul(deviations, count, (mean - global_mean).square_()).sum(0)
    return global_mean, deviations / total, deviations / (total - 1).clamp_(min=1)


class GlobalBatchNormFunction(torch.autograd.Function):
    """Forward and backward of Algorithms 1 to 5: ``(x, weight, bias, eps, group) -> y, mean, var, counts``.

    ``x`` and ``y`` are (N, C, *), ``weight`` and ``bias`` are (C,) or None. ``mean`` and the unbiased ``var``, (C,),
    are those of the union of all ranks' batches, and ``counts``, (ranks,), the number of values per channel of each
    rank. They are meant for the running statistics. No gradient flows through them.

    Every rank of ``group`` must call the forward, and the backward if ``x`` needs a gradient. Each is one all-gather,
    of 2 C + 1 and of 2 C numbers. A rank with an empty batch (N = 0) takes part as well. The gradients of weight and
    bias are those of this rank's part of the loss, because data-parallel training averages gradients over the ranks.
    """

    @staticmethod
    @override
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: dist.ProcessGroup | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        declare_no_unseen_changes()
        x = x.contiguous(memory_format=memory_format_of(x))
        dtype = statistics_dtype(x)
        mean, deviations = local_moments(x)
        packed = torch.cat([mean, deviations, mean.new_full((1,), x.numel() // x.shape[1])])
        gathered = small_all_gather(packed, group)
        mean, var, unbiased = (moment.to(dtype) for moment in combine_moments(gathered))
        invstd = (var + eps).rsqrt_()
        counts = gathered[:, -1]
        ctx.save_for_backward(x, weight, mean, invstd, counts)
        ctx.group = group
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.mark_non_differentiable(mean, unbiased, counts)
        # Algorithm 3, equations 6 and 7: the normalized, scaled and shifted activations.
        scale = invstd if weight is None else invstd * weight.to(dtype)
        return _affine(x, mean, scale, to_dtype(bias, dtype)), mean, unbiased, counts

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, weight, mean, invstd, counts = ctx.saved_tensors
        needs_dx, needs_dweight, needs_dbias = ctx.needs_input_grad[:3]
        dy = dy.contiguous(memory_format=memory_format_of(x))
        sums = _gradient_sums(dy, x, mean, invstd)
        dbias = sums[0].to(ctx.bias_dtype) if needs_dbias else None
        dweight = sums[1].to(weight.dtype) if needs_dweight else None
        dx = None
        if needs_dx:
            # An all-gather, not an all-reduce: it takes half the steps, and for so few bytes latency dominates.
            sums = small_all_gather(sums, ctx.group).sum(0)
            dx = _input_gradient(dy, x, to_dtype(weight, mean.dtype), mean, invstd, sums, counts)
        return dx, dweight, dbias, None, None


def _gradient_sums(dy: Tensor, x: Tensor, mean: Tensor, invstd: Tensor) -> Tensor:
    """Return this rank's sums of dy and of dy (x - mean) invstd, (2, C) (Algorithm 4, with normalized x)."""
    if x.numel() == 0:
        return mean.new_zeros(2, mean.numel())
    # With weight 1 the gradients of weight and bias are the two sums.
    _, dweight, dbias = torch.ops.aten.native_batch_norm_backward(
        dy, x, torch.ones_like(mean), None, None, mean, invstd, True, 0.0, [False, True, True]
    )
    return torch.stack([dbias, dweight])


def _input_gradient(
    dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, invstd: Tensor, sums: Tensor, counts: Tensor
) -> Tensor:
    """Return ``weight invstd (dy - sums[0] / n - x_hat sums[1] / n)`` with the sums over all ranks (Algorithm 5)."""
    scale = invstd if weight is None else invstd * weight
    # The terms without dy are affine in x - mean, so one fused pass computes them and a second one adds dy's.
    offset, slope = sums * (scale / -counts.sum())
    return _affine(x, mean, slope * invstd, offset).addcmul_(dy, _per_channel(scale, dy))


def _affine(x: Tensor, mean: Tensor, slope: Tensor, offset: Tensor | None) -> Tensor:
    """Return ``(x - mean) slope + offset`` in one pass: PyTorch's evaluation kernel with variance 1 and eps 0."""
    if x.numel() == 0:
        return torch.empty_like(x)
    return torch.native_batch_norm(x, slope, offset, mean, torch.ones_like(mean), False, 0.0, 0.0)[0]


def memory_format_of(x: Tensor) -> torch.memory_format:
    """Return the memory format of ``x`` as the fused kernels see it."""
    for dim, memory_format in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if x.dim() == dim and x.is_contiguous(memory_format=memory_format) and not x.is_contiguous():
            return memory_format
    return torch.contiguous_format


def _per_channel(values: Tensor, x: Tensor) -> Tensor:
    """Return a view of ``values``, (C,), that broadcasts against ``x``, (N, C, *)."""
    return values.view(1, -1, *[1] * (x.dim() - 2))


def to_dtype(values: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return ``values`` in ``dtype``, or None if there are none."""
    return None if values is None else values.to(dtype)
