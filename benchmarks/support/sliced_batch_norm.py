"""The batch norm of several devices, each with statistics of its own, computed exactly by one device."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override


class SlicedBatchNorm2d(nn.BatchNorm2d):
    """Batch norm that normalizes each of ``num_slices`` equal parts of the batch with the part's own statistics.

    One device that trains with this layer computes what ``num_slices`` data-parallel devices with local batch norm
    compute, if slice k of the batch is the batch of device k. ``running_mean`` and ``running_var`` are the averages
    over those devices, as `lightning_dp.layers.average_running_statistics` gives them. A device's running statistics
    are linear in the statistics of its batches, so the layer averages over the devices in every step.

    In evaluation the layer is torch's own.

    Attributes:
        num_slices: devices with local statistics; 1: global statistics. It may change between two forwards.
        whole_var: (C,) running variance of the whole batches, which devices with local statistics do not see: it has
            the variance between the means of the slices, too.
    """

    whole_var: Tensor

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_slices = 1
        self.register_buffer("whole_var", torch.ones(self.num_features), persistent=False)

    @override
    def forward(self, input: Tensor) -> Tensor:
        """input: (N, C, H, W), N a multiple of ``num_slices``; slices of one image need more than one pixel."""
        if not self.training:
            return super().forward(input)
        if len(input) % self.num_slices:
            raise ValueError(f"a batch of {len(input)} images cannot be cut into {self.num_slices} equal slices")
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        assert self.momentum is not None
        # With momentum 1 the kernel leaves each slice's own statistics in these.
        means, variances = self.running_mean.new_zeros(2, self.num_slices, self.num_features)
        slices = zip(input.chunk(self.num_slices), means, variances, strict=True)
        outputs = [F.batch_norm(x, mean, var, self.weight, self.bias, True, 1.0, self.eps) for x, mean, var in slices]
        self.num_batches_tracked.add_(1)
        self.running_mean.lerp_(means.mean(0), self.momentum)
        self.running_var.lerp_(variances.mean(0), self.momentum)
        self.whole_var.lerp_(_variance_of_union(means, variances, input.numel() // means.numel()), self.momentum)
        return torch.cat(outputs)


def _variance_of_union(means: Tensor, variances: Tensor, count: int) -> Tensor:
    """Unbiased variance (C,) of slices together, from each one's mean and unbiased variance (n, C) of ``count``."""
    deviations = (count - 1) * variances.sum(0) + count * (means - means.mean(0)).square().sum(0)
    return deviations / (count * len(means) - 1)


def slice_batch_norm(model: nn.Module) -> list[SlicedBatchNorm2d]:
    """Replace each ``BatchNorm2d`` inside ``model``, in place, by a sliced one of the same state; return these."""
    layers = []
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.BatchNorm2d:
                layer = SlicedBatchNorm2d(child.num_features, child.eps, child.momentum).to(child.weight)
                layer.load_state_dict(child.state_dict())
                setattr(parent, name, layer)
                layers.append(layer)
    return layers
