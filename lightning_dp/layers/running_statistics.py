"""Averaging of running statistics, which differ between ranks after steps with local statistics."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_dp.collectives.groups import group_size
from lightning_dp.layers.global_batch_norm import GlobalBatchNorm


@torch.no_grad()
def average_running_statistics(
    model: nn.Module, group: dist.ProcessGroup | None = None, copies: Iterable[nn.Module] = ()
) -> None:
    """Replace the running means and variances of the global layers by their means over the ranks, in place.

    Every rank of ``group`` must call it. It is one all-reduce.

    The mean of the variances is what local statistics normalize with. It leaves out the variance between the means of
    the ranks. That is sampling noise if the ranks draw from one distribution (shuffled data, batches of equal size) and
    have more than a few images each. With one image per rank it is not, because the pixels of an image are correlated.
    Running statistics are linear in the statistics of the batches, so averaging more often does not change the result.

    Args:
        model: contains the global layers.
        group: None is the default group.
        copies: copies of ``model``, for example moving averages of it, whose layers of the same names are averaged too.
            They may lie on another device. Every rank must pass the same number of copies.
    """
    names = [name for name, module in model.named_modules() if isinstance(module, GlobalBatchNorm)]
    layers = [module.get_submodule(name) for module in (model, *copies) for name in names]
    statistics = [getattr(layer, name) for layer in layers for name in ("running_mean", "running_var")]
    buffers: list[Tensor] = [buffer for buffer in statistics if buffer is not None]
    size = group_size(group)
    if size == 1 or not buffers:
        return
    packed = torch.cat([buffer.to(buffers[0].device, torch.float64) for buffer in buffers])
    dist.all_reduce(packed, group=group)
    means = torch.split(packed / size, [buffer.numel() for buffer in buffers])
    for buffer, mean in zip(buffers, means, strict=True):
        buffer.copy_(mean)
