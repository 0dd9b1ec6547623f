"""Global batch norm on CUDA: the kernels of torch's SyncBatchNorm, with fewer launches and no wait of the host.

On a GPU the tensors of one number per channel are so small that each operator on them costs its launch and nothing
else. A layer has 12 launches in forward and backward with this function, and 18 as torch's SyncBatchNorm. Three of
those 18 make the host wait, because they ask the GPU for the ranks with an empty batch.
`tests/layers/test_kernel_count.py` counts them.

The ranks' statistics are combined by torch's kernel, in the form of Chan et al., one rank after the other in float32.
Like the combination in `batch_statistics`, which is in float64, it does not cancel where the mean is much larger than
the standard deviation. Its rounding error is larger, but only as large as that of each rank's own statistics, which
torch's kernel computes in float32 (`tests/layers/test_fused_stability.py`).
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
from lightning_dp.layers.batch_statistics import memory_format_of, statistics_dtype, to_dtype

# The count of a rank with an empty batch. With 0, the kernel would divide 0 by 0 if that rank comes first. This one is
# too small to change a mean or a variance, and it is 0 as an integer.
_EMPTY_COUNT = 1e-30


def uses_fused_kernels(x: Tensor) -> bool:
    """Return whether `FusedGlobalBatchNormFunction` can normalize ``x``."""
    # In compiled code the compiler fuses the small operators itself, and torch has no rules to trace these kernels.
    return x.is_cuda and not torch.compiler.is_compiling()


class FusedGlobalBatchNormFunction(torch.autograd.Function):
    """``(x, weight, bias, running_mean, running_var, eps, momentum, group) -> y``, for CUDA tensors.

    It computes what `GlobalBatchNormFunction` does, and updates the running statistics, (C,) or both None, in place.

    Every rank of ``group`` must call the forward, and the backward if ``x`` needs a gradient. The forward is one
    all-gather of 2 C + 1 numbers, the backward one all-reduce of 2 C. A rank with an empty batch takes part as well.
    """

    @staticmethod
    @override
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        eps: float,
        momentum: float,
        group: dist.ProcessGroup | None,
    ) -> Tensor:
        declare_no_unseen_changes()
        x = x.contiguous(memory_format=memory_format_of(x))
        dtype = statistics_dtype(x)
        gathered = small_all_gather(_own_statistics(x, eps), group)
        running = None if running_mean is None or running_var is None else (running_mean, running_var)
        mean, invstd = _combine(gathered, running, eps, momentum, num_own=x.numel() // x.shape[1])
        ctx.save_for_backward(x, weight, mean, invstd, gathered[:, -1].int())
        ctx.group = group
        ctx.bias_dtype = None if bias is None else bias.dtype
        if x.numel() == 0:
            return torch.empty_like(x)
        return torch.batch_norm_elemt(x, to_dtype(weight, dtype), to_dtype(bias, dtype), mean, invstd, eps)

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, invstd, counts = ctx.saved_tensors
        needs = ctx.needs_input_grad[:3]
        needs_dx, needs_dweight, needs_dbias = needs
        dy = dy.contiguous(memory_format=memory_format_of(x))
        scale = to_dtype(weight, mean.dtype)
        if x.numel() == 0:
            sum_dy, sum_dy_xmu, dweight, dbias = mean.new_zeros(4, mean.numel())
        else:
            sum_dy, sum_dy_xmu, dweight, dbias = torch.batch_norm_backward_reduce(dy, x, mean, invstd, scale, *needs)
        dx = None
        if needs_dx:
            sums = torch.cat([sum_dy, sum_dy_xmu])
            dist.all_reduce(sums, group=ctx.group)
            sum_dy, sum_dy_xmu = sums.chunk(2)
            if x.numel() == 0:
                dx = torch.empty_like(x)
            else:
                dx = torch.batch_norm_backward_elemt(dy, x, mean, invstd, scale, sum_dy, sum_dy_xmu, counts)
        dweight = dweight.to(weight.dtype) if needs_dweight else None
        dbias = dbias.to(ctx.bias_dtype) if needs_dbias else None
        return dx, dweight, dbias, None, None, None, None, None


def _own_statistics(x: Tensor, eps: float) -> Tensor:
    """Return this rank's mean (C), 1 / standard deviation (C) and number of values per channel (1), one behind another.

    They are of `statistics_dtype`. In float32 a number of values above 2^24 is rounded.
    """
    num_channels = x.shape[1]
    if x.numel() == 0:
        statistics = torch.ones(2 * num_channels + 1, dtype=statistics_dtype(x), device=x.device)
        statistics[:num_channels] = 0.0
        statistics[-1] = _EMPTY_COUNT
        return statistics
    mean, invstd = torch.batch_norm_stats(x, eps)
    return torch.cat([mean, invstd, mean.new_full((1,), x.numel() // num_channels)])


def _combine(
    gathered: Tensor, running: tuple[Tensor, Tensor] | None, eps: float, momentum: float, num_own: int
) -> tuple[Tensor, Tensor]:
    """Return mean and 1 / standard deviation of the union of all ranks' batches, and update ``running`` in place.

    Args:
        gathered: (ranks, 2 C + 1), a row of `_own_statistics` for each rank.
        running: running mean and variance, (C,) each, of any floating-point dtype.
        eps: added to the variance.
        momentum: weight of the new values in ``running``.
        num_own: number of values per channel on this rank.
    """
    num_channels = gathered.shape[1] // 2
    means, invstds = gathered[:, :num_channels], gathered[:, num_channels:-1]
    counts = gathered[:, -1]
    # The kernel writes into tensors of the dtype of the counts, and divides by the total count less 1. A rank with two
    # values knows that the total is large enough. Another rank may not ask the GPU, which would wait for it.
    is_direct = running is None or (num_own > 1 and running[0].dtype == gathered.dtype)
    new = running if running is None or is_direct else tuple(r.to(gathered.dtype, copy=True) for r in running)
    new_mean, new_var = (None, None) if new is None else new
    mean, invstd = torch.batch_norm_gather_stats_with_counts(
        gathered, means, invstds, new_mean, new_var, momentum, eps, counts
    )
    if running is not None and new_mean is not None and new_var is not None and not is_direct:
        total = counts.round().sum()
        running_mean, running_var = running
        # As `GlobalBatchNormFunction` has it: the variance of one value is 0, and no value leaves both as they are.
        var_of_one = torch.where(total > 0, running_var * (1 - momentum), running_var)
        running_mean.copy_(torch.where(total > 0, new_mean, running_mean))
        running_var.copy_(torch.where(total > 1, new_var, var_of_one))
    return mean, invstd
