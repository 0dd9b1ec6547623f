"""The functions of the CUDA kernels of SyncBatchNorm, written in a few lines that run on any device."""

from __future__ import annotations

import torch
from torch import Tensor

C = (1, -1, 1, 1)


def batch_norm_stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    var, mean = torch.var_mean(x, (0, 2, 3), correction=0)
    return mean, (var + eps).rsqrt()


def batch_norm_gather_stats_with_counts(
    input, mean, invstd, running_mean, running_var, momentum, eps, counts
) -> tuple[Tensor, Tensor]:
    """The arithmetic of torch's kernel, in its order, with its types: `n` is an integer there."""
    dtype = input.dtype if running_mean is None else running_mean.dtype
    assert counts.dtype == dtype, "the kernel reads the counts as numbers of this dtype"
    assert mean.dtype == invstd.dtype == torch.promote_types(dtype, torch.float32)
    avg, var_n, n = torch.zeros_like(mean[0]), torch.zeros_like(mean[0]), 0
    for m, inverse, count in zip(mean, invstd, counts, strict=True):
        v = 1 / inverse
        v = (v * v - eps) * count
        factor = 1 / (n + count)
        var_n = var_n + (v + (avg - m) * (avg - m) * n * count * factor)
        avg = n * factor * avg + count * factor * m
        n = int(n + count)
    divide = lambda number: var_n / torch.tensor(float(number), dtype=avg.dtype)  # noqa: E731  # 0 / 0 is NaN
    if running_mean is not None:
        running_mean.copy_((1 - momentum) * running_mean + momentum * avg)
        running_var.copy_((1 - momentum) * running_var + momentum * divide(n - 1))
    return avg, (divide(n) + eps).rsqrt()


def batch_norm_elemt(x, weight, bias, mean, invstd, eps) -> Tensor:
    y = (x - mean.view(C)) * invstd.view(C)
    y = y if weight is None else y * weight.view(C)
    return y if bias is None else y + bias.view(C)


def batch_norm_backward_reduce(dy, x, mean, invstd, weight, input_g, weight_g, bias_g) -> tuple:
    sum_dy, sum_dy_xmu = dy.sum((0, 2, 3)), (dy * (x - mean.view(C))).sum((0, 2, 3))
    dweight, dbias = (None, None) if weight is None else (sum_dy_xmu * invstd, sum_dy.clone())
    return (
        *((sum_dy, sum_dy_xmu) if input_g else (None, None)),
        dweight if weight_g else None,
        dbias if bias_g else None,
    )


def batch_norm_backward_elemt(dy, x, mean, invstd, weight, sum_dy, sum_dy_xmu, counts) -> Tensor:
    assert counts.dtype == torch.int32
    assert counts.is_contiguous()
    n = counts.sum()
    slope = (invstd.square() * sum_dy_xmu / n).view(C)
    scale = invstd if weight is None else invstd * weight
    return (dy - (sum_dy / n).view(C) - (x - mean.view(C)) * slope) * scale.view(C)


KERNELS = (
    batch_norm_stats,
    batch_norm_gather_stats_with_counts,
    batch_norm_elemt,
    batch_norm_backward_reduce,
    batch_norm_backward_elemt,
)
