"""Batch normalization layers that share their statistics between ranks, and can be switched to local statistics."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from lightning_dp._private.torch_names import BatchNorm, check_input_dim
from lightning_dp.collectives.groups import group_size
from lightning_dp.layers.batch_statistics import GlobalBatchNormFunction
from lightning_dp.layers.fused_batch_norm import FusedGlobalBatchNormFunction, uses_fused_kernels


class _Reference:
    """A layer's reference to a process group: a deep copy of the layer shares it, and a pickle loses it."""

    def __init__(self, target: Any = None) -> None:
        self.target = target

    def __deepcopy__(self, memo: dict[int, Any]) -> _Reference:
        return self

    def __reduce__(self) -> tuple[type[_Reference], tuple[()]]:
        return _Reference, ()


class GlobalBatchNorm(BatchNorm):
    """Base class of the three layers. It adds ``is_global`` and ``group`` to PyTorch's layers.

    In training, if ``is_global`` is true and ``group`` has more than one rank, the layer normalizes over the batches of
    all ranks: output, running statistics and gradients are those of PyTorch's layer on the concatenated batch. Every
    rank of the group must then call the layer equally often, with an empty batch if it has no data. A forward is one
    all-gather, a backward another. In all other cases the layer calls PyTorch's forward and does not communicate.

    A batch that is empty on all ranks leaves the running statistics as they are, as in PyTorch. Input that PyTorch's
    layer refuses is refused, too, with two exceptions: a rank may have a single value per channel, and the input may
    have another dtype than the layer.

    Parameters, buffers and state_dict keys are those of PyTorch's layer. The gradients of weight and bias are those of
    this rank's part of the loss. Data-parallel training averages them over the ranks.

    Args:
        *args, **kwargs: as for ``torch.nn.BatchNorm1d/2d/3d``.
        group: the ranks that share statistics. None is the default group.

    Attributes:
        is_global: whether statistics are global. Change it on all ranks of the group between the same two forwards.
        group: as the argument. A deep copy shares the group, a pickled layer does not hold it.
        had_single_value: whether a global forward on this rank had a single value per channel, which local statistics
            do not accept.

    Raises:
        ValueError: in a global forward: the number of channels of the input does not fit the layer.
        RuntimeError: in a global forward inside ``torch.func.grad``, ``torch.vmap`` or another transform, by PyTorch.
    """

    def __init__(self, *args: Any, group: dist.ProcessGroup | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.is_global = True
        self.had_single_value = False
        self.group = group

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks that share statistics. None is the default group."""
        return self._group.target

    @group.setter
    def group(self, group: dist.ProcessGroup | None) -> None:
        self._group = _Reference(group)

    @override
    def forward(self, input: Tensor) -> Tensor:
        if not (self.is_global and self.training and group_size(self.group) > 1):
            return super().forward(input)
        self._check_input(input)
        if input.numel() == input.shape[1]:
            self.had_single_value = True
        if uses_fused_kernels(input):
            momentum = self._count_batch() if self.track_running_stats else 0.0
            running = (self.running_mean, self.running_var) if self.track_running_stats else (None, None)
            return FusedGlobalBatchNormFunction.apply(
                input, self.weight, self.bias, *running, self.eps, momentum, self.group
            )
        output, mean, var, counts = GlobalBatchNormFunction.apply(input, self.weight, self.bias, self.eps, self.group)
        if self.track_running_stats:
            self._update_running_statistics(mean, var, counts, self._count_batch(), is_empty=input.numel() == 0)
        return output

    def _count_batch(self) -> float:
        """Count a batch as PyTorch's forward does, and return the weight of its statistics in the running ones."""
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                return 1.0 / float(self.num_batches_tracked)
        return 0.0 if self.momentum is None else self.momentum

    def _update_running_statistics(
        self, mean: Tensor, var: Tensor, counts: Tensor, momentum: float, is_empty: bool
    ) -> None:
        """Update the buffers as PyTorch's forward does.

        Args:
            mean: (C,) of all ranks' batches.
            var: (C,), unbiased.
            counts: (ranks,) number of values per channel of each rank.
            momentum: weight of the new statistics.
            is_empty: whether the batch of this rank is empty.
        """
        for running, new in ((self.running_mean, mean), (self.running_var, var)):
            if running is None:
                continue
            # Under torch.compile not every call respects `mark_non_differentiable`. The buffer would then require a
            # gradient, keep the graphs of all steps, and be refused by PyTorch's forward.
            new = new.detach()
            if is_empty:
                # All batches may be empty. Reading the counts on the host would wait for the GPU, and a rank that has
                # data itself need not ask.
                new = torch.where(counts.sum() > 0, new, running)
            if running.dtype == new.dtype:
                running.lerp_(new, momentum)
            else:  # as PyTorch does: float16 may hold the sum, but not a variance above 65504
                running.copy_(running.to(new.dtype).lerp_(new, momentum))

    def _check_input(self, input: Tensor) -> None:
        """Raise for input that PyTorch's layer would refuse, or that cannot have global statistics."""
        check_input_dim(self, input)
        if torch.compiler.is_compiling() and input.shape[0] == 0:
            _refuse_empty_batch()
        for name, values in (("weight", self.weight), ("running_mean", self.running_mean)):
            # Without this check a single channel would be broadcast to all channels of the layer.
            if values is not None and input.shape[1] != values.shape[0]:
                raise ValueError(
                    f"{type(self).__name__}: the input of shape {list(input.shape)} has {input.shape[1]} channels, but "
                    f"{name} has {values.shape[0]}"
                )


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


# --- Averaging of running statistics, which differ between ranks after steps with local statistics.


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
        copies: copies of ``model`` or of parts of it, for example moving averages, whose global layers are averaged
            too, and layers with the names of the model's. They may lie on another device. Every rank must pass the same
            number of copies.

    Raises:
        ValueError: there are no global layers, whose statistics could be averaged.
    """
    names = {name for name, module in model.named_modules() if isinstance(module, GlobalBatchNorm)}
    if not names:
        raise ValueError(f"{type(model).__name__} has no global batch norm; call apply_global_batch_norm(model) before")
    layers = [
        module
        for each in (model, *copies)
        for name, module in each.named_modules()
        if isinstance(module, GlobalBatchNorm) or (name in names and isinstance(module, BatchNorm))
    ]
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
