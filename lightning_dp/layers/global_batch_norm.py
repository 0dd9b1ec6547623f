"""Batch normalization layers that share their statistics between ranks, and can be switched to local statistics."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from lightning_dp._private.torch_names import BatchNorm, check_input_dim
from lightning_dp.collectives.groups import group_size
from lightning_dp.layers.batch_statistics import GlobalBatchNormFunction


class _Group:
    """Reference to a process group inside a module.

    A process group can neither be deep-copied nor pickled. A deep copy of the module shares the group. A pickled module
    loses it.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group

    def __deepcopy__(self, memo: dict[int, Any]) -> _Group:
        return self

    def __reduce__(self) -> tuple[type[_Group], tuple[()]]:
        return _Group, ()


class GlobalBatchNorm(BatchNorm):
    """Base class of the three layers. It adds ``is_global`` and ``group`` to PyTorch's layers.

    In training, if ``is_global`` is true and ``group`` has more than one rank, the layer normalizes over the batches of
    all ranks: output, running statistics and gradients are those of PyTorch's layer on the concatenated batch. Every
    rank of the group must then call the layer equally often, with an empty batch if it has no data. A forward is one
    all-gather, a backward another. In all other cases the layer calls PyTorch's forward and does not communicate.

    Parameters, buffers and state_dict keys are those of PyTorch's layer. The gradients of weight and bias are those of
    this rank's part of the loss. Data-parallel training averages them over the ranks.

    Args:
        *args, **kwargs: as for ``torch.nn.BatchNorm1d/2d/3d``.
        group: the ranks that share statistics. None is the default group.

    Attributes:
        is_global: whether statistics are global. Change it on all ranks of the group between the same two forwards.
        group: as the argument. A deep copy shares the group, a pickled layer does not hold it.
    """

    def __init__(self, *args: Any, group: dist.ProcessGroup | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.is_global = True
        self.group = group

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks that share statistics. None is the default group."""
        return self._group.group

    @group.setter
    def group(self, group: dist.ProcessGroup | None) -> None:
        self._group = _Group(group)

    @override
    def forward(self, input: Tensor) -> Tensor:
        if not (self.is_global and self.training and group_size(self.group) > 1):
            return super().forward(input)
        check_input_dim(self, input)
        if input.shape[0] == 0 and torch.compiler.is_compiling():
            _refuse_empty_batch()
        output, mean, var = GlobalBatchNormFunction.apply(input, self.weight, self.bias, self.eps, self.group)
        if self.track_running_stats and self.running_mean is not None and self.running_var is not None:
            momentum = self._count_batch()
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
            self.running_var.lerp_(var.to(self.running_var.dtype), momentum)
        return output

    def _count_batch(self) -> float:
        """Count this batch and return its weight in the running statistics, as PyTorch's forward does."""
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        return 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum


@torch.compiler.disable  # an exception inside a traced function would not be raised
def _refuse_empty_batch() -> None:
    raise ValueError(
        "an empty batch in a compiled model with global batch norm: the compiler would drop collectives that the other "
        "ranks wait for; give each rank at least one sample, or do not compile"
    )


class GlobalBatchNorm1d(GlobalBatchNorm, nn.BatchNorm1d):
    """``torch.nn.BatchNorm1d`` with the statistics of all ranks' batches. Input: (N, C) or (N, C, L)."""


class GlobalBatchNorm2d(GlobalBatchNorm, nn.BatchNorm2d):
    """``torch.nn.BatchNorm2d`` with the statistics of all ranks' batches. Input: (N, C, H, W)."""


class GlobalBatchNorm3d(GlobalBatchNorm, nn.BatchNorm3d):
    """``torch.nn.BatchNorm3d`` with the statistics of all ranks' batches. Input: (N, C, D, H, W)."""
