"""Batch normalization with the statistics of all ranks' batches: the arithmetic and the two collectives.

Liu et al., "Training Deep Nets with larger batch size on multi-GPUs" (2018), Algorithms 1 to 5, with one departure: the
paper's variance, sigma^2 = v - u^2 (equation 5), cancels in float32 where the mean is large beside the standard
deviation. Here each rank sends (mean, sum of squared deviations, count), and these are combined by

    Chan, Golub & LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances" (1979).

The passes over the activations are torch's fused kernels; what is left to Python has the size of the channels.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import override

from lightning_dp.collectives.small_all_gather import small_all_gather

# Elements centred at a time on CPU: they stay in the cache, where the copy of a whole activation would not.
_CHUNK = 2**17


def statistics_dtype(x: Tensor) -> torch.dtype:
    """float64 for float64 activations, float32 for all others, half precision among them."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def local_moments(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Mean and sum of squared deviations of each channel (Algorithm 1), zeros for an empty batch.

    Args:
        x: (N, C, *).
        eps: what the CUDA kernel adds to the variance; it is taken off again.

    Returns:
        Two tensors (C,) of `statistics_dtype`.
    """
    dtype = statistics_dtype(x)
    if x.numel() == 0:
        zeros = torch.zeros(2, x.shape[1], dtype=dtype, device=x.device)
        return zeros[0], zeros[1]
    if _has_split_kernels(x):
        mean, invstd = torch.batch_norm_stats(x, eps)
        return mean, (invstd.square().reciprocal() - eps).clamp_(min=0) * (x.numel() // x.shape[1])
    count = x.numel() // x.shape[1]
    if x.dim() == 2 or _format(x) != torch.contiguous_format or x.dtype not in (torch.float32, torch.float64):
        # With running statistics in float32, which it leaves alone at momentum 0, the results are float32 too.
        running = torch.ones(2, x.shape[1], dtype=dtype, device=x.device)
        mean, var = torch.batch_norm_update_stats(x, running[0], running[1], 0.0)
        return mean, var * count
    # Here that kernel adds up number by number, in double; this takes a quarter of its time and is as exact. The first
    # part's mean is a safe shift: if it is far from the whole's, then so is that part, and the variance is as large.
    dims = [dim for dim in range(x.dim()) if dim != 1]
    parts = x.split(max(1, _CHUNK // x[0].numel()))
    shift = parts[0].mean(dims)
    center, sums, squares = _per_channel(shift, x), torch.zeros_like(shift), torch.zeros_like(shift)
    for part in parts:
        centered = part - center
        sums += centered.sum(dims)
        squares += centered.square_().sum(dims)
    distance = sums / count
    return shift + distance, squares - sums * distance


def combine_moments(moments: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Moments of the union of batches (Algorithm 2, in Chan et al.'s form).

    Args:
        moments: (ranks, 2 C + 1), a rank's row being mean (C), sum of squared deviations (C) and count (1).

    Returns:
        Mean, variance and unbiased variance, each (C,), in float64; zeros where all batches are empty.
    """
    num_channels = moments.shape[1] // 2
    mean, deviations, count = moments.double().split([num_channels, num_channels, 1], dim=1)
    total = count.sum().clamp_(min=1)
    global_mean = (count * mean).sum(0).div_(total)
    deviations = torch.addcmul(deviations, count, (mean - global_mean).square_()).sum(0)
    return global_mean, deviations / total, deviations / (total - 1).clamp_(min=1)


class GlobalBatchNormFunction(torch.autograd.Function):
    """``(x, weight, bias, eps, group) -> y, mean, var``: the forward and backward of Algorithms 1 to 5.

    ``x`` and ``y`` are (N, C, *), ``weight`` and ``bias`` (C,) or None. ``mean`` and ``var`` (unbiased) are those of
    all ranks' batches together, (C,), for the running statistics; no gradient flows through them.

    Every rank of ``group`` must call the forward, and the backward if ``x`` needs a gradient: each is one collective,
    of 2 C + 1 and of 2 C numbers. A rank with an empty batch (N = 0) takes part like the others. The gradients of
    weight and bias are those of this rank's part of the loss, as data-parallel training expects: it averages them.
    """

    @staticmethod
    @override
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: dist.ProcessGroup | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        x = x.contiguous(memory_format=_format(x))
        dtype = statistics_dtype(x)
        mean, deviations = local_moments(x, eps)
        packed = torch.cat([mean, deviations, mean.new_full((1,), x.numel() // x.shape[1])])
        gathered = small_all_gather(packed, group)
        mean, var, unbiased = (moment.to(dtype) for moment in combine_moments(gathered))
        invstd = (var + eps).rsqrt_()
        ctx.save_for_backward(x, weight, mean, invstd, gathered[:, -1])
        ctx.group = group
        ctx.mark_non_differentiable(mean, unbiased)
        return _normalize(x, _to(weight, dtype), _to(bias, dtype), mean, invstd), mean, unbiased

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, weight, mean, invstd, counts = ctx.saved_tensors
        needs_dx, needs_dweight, needs_dbias = ctx.needs_input_grad[:3]
        dy = dy.contiguous(memory_format=_format(x))
        sums = _gradient_sums(dy, x, mean, invstd)
        dbias = sums[0].to(weight.dtype) if needs_dbias else None
        dweight = sums[1].to(weight.dtype) if needs_dweight else None
        dx = None
        if needs_dx:
            # Not an all-reduce: that has twice the steps, and the bytes are few.
            sums = small_all_gather(sums, ctx.group).sum(0)
            dx = _input_gradient(dy, x, _to(weight, mean.dtype), mean, invstd, sums, counts)
        return dx, dweight, dbias, None, None


def _normalize(x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor) -> Tensor:
    """Algorithm 3, equations 6 and 7."""
    if x.numel() == 0:
        return torch.empty_like(x)
    if _has_split_kernels(x):
        return torch.batch_norm_elemt(x, weight, bias, mean, invstd, 0.0)
    return _affine(x, mean, invstd if weight is None else invstd * weight, bias)


def _gradient_sums(dy: Tensor, x: Tensor, mean: Tensor, invstd: Tensor) -> Tensor:
    """Algorithm 4, with x normalised: this rank's sums of dy and of dy (x - mean) invstd, together (2, C)."""
    if x.numel() == 0:
        return mean.new_zeros(2, mean.numel())
    if _has_split_kernels(x):
        sum_dy, sum_dy_xmu, _, _ = torch.batch_norm_backward_reduce(dy, x, mean, invstd, None, True, False, False)
        return torch.stack([sum_dy, sum_dy_xmu * invstd])
    _, dweight, dbias = torch.ops.aten.native_batch_norm_backward(
        dy, x, torch.ones_like(mean), None, None, mean, invstd, True, 0.0, [False, True, True]
    )
    return torch.stack([dbias, dweight])


def _input_gradient(
    dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, invstd: Tensor, sums: Tensor, counts: Tensor
) -> Tensor:
    """``weight invstd (dy - sums[0] / n - x_hat sums[1] / n)``, with the sums of all ranks (Algorithm 5)."""
    if x.numel() == 0:
        return torch.empty_like(x)
    if _has_split_kernels(x):
        sum_dy_xmu = sums[1] / invstd
        return torch.batch_norm_backward_elemt(dy, x, mean, invstd, weight, sums[0], sum_dy_xmu, counts.int())
    scale = invstd if weight is None else invstd * weight
    offset, slope = sums * (scale / -counts.sum())
    return _affine(x, mean, slope * invstd, offset).addcmul_(dy, _per_channel(scale, dy))


def _affine(x: Tensor, mean: Tensor, slope: Tensor, offset: Tensor | None) -> Tensor:
    """``(x - mean) slope + offset`` in one pass: torch's CPU kernel of an evaluation with variance 1 and eps 0."""
    return torch.native_batch_norm(x, slope, offset, mean, torch.ones_like(mean), False, 0.0, 0.0)[0]


def _has_split_kernels(x: Tensor) -> bool:
    """Whether torch has the four kernels of its SyncBatchNorm for ``x``: statistics, output, sums, input gradient."""
    return x.is_cuda


def _format(x: Tensor) -> torch.memory_format:
    """The memory format that the fused kernels see in ``x``."""
    for dim, memory_format in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if x.dim() == dim and x.is_contiguous(memory_format=memory_format) and not x.is_contiguous():
            return memory_format
    return torch.contiguous_format


def _per_channel(values: Tensor, x: Tensor) -> Tensor:
    """View (C,) so that it broadcasts against (N, C, *)."""
    return values.view(1, -1, *[1] * (x.dim() - 2))


def _to(values: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if values is None else values.to(dtype)
