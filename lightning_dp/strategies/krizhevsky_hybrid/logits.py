"""Loss functions for logits whose classes are sharded over ranks (arXiv 1404.5997, section 5)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_dp._private.torch_names import (
    assert_async,
    make_wrapper_tensor,
    tree_leaves,
    tree_map_only,
    version_of,
    without_torch_function,
)
from lightning_dp.collectives.all_to_all import Channel
from lightning_dp.strategies.krizhevsky_hybrid.head import Bounds, gather_columns, require_first_derivative


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


# --- Logits whose classes are sharded over ranks, and which can be used like any tensor (arXiv 1404.5997, section 5).


class ShardedLogits(Tensor):
    """(N, C) logits of which this rank holds the columns ``bounds[rank]``. They can be used like any tensor.

    `torch.nn.functional.cross_entropy` and `binary_cross_entropy_with_logits`, and with them the criteria of torch.nn,
    work on the slices: ranks send a few numbers per sample, not the logits. Casts, arithmetic with numbers, ``detach``
    and a ``view`` of the same shape keep the slices. Any other function gathers the logits first, once, so all ranks
    must call it. Every rank computes the same loss from them. The gradient is that of this one loss, and not of the sum
    over ranks.
    """

    own: Tensor
    bounds: Bounds
    channel: Channel
    source: ShardedLogits | None = None
    gathered: Tensor | None = None

    @staticmethod
    def __new__(
        cls, own: Tensor, bounds: Bounds, channel: Channel, source: ShardedLogits | None = None
    ) -> ShardedLogits:
        """Wrap ``own``, (N, own columns), with its autograd graph. ``source``: the logits that it was detached from."""
        shape = (len(own), bounds[-1][1])
        logits = make_wrapper_tensor(cls, shape, own.dtype, own.device)
        logits.own = own
        logits.bounds = bounds
        logits.channel = channel
        logits.source = source
        return logits

    def whole(self) -> Tensor:
        """Return all columns, (N, C), on every rank. The first call is a collective."""
        if self.gathered is None and self.source is not None:
            self.gathered = self.source.whole().detach()
        elif self.gathered is None:
            # A metric may be first to gather, without gradients, and the loss comes afterwards and needs the graph.
            with torch.inference_mode(False), torch.enable_grad():
                self.gathered = _GatherLogits.apply(self.own, self.bounds, self.channel)
        assert self.gathered is not None
        return self.gathered

    @property
    def is_changed(self) -> bool:
        """Whether the gathered logits were changed in place, so that the slices are out of date."""
        gathered = self.gathered if self.source is None else self.source.gathered
        return gathered is not None and version_of(gathered) > 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func`` on the slices if possible, otherwise on the gathered logits. torch calls it for every use."""
        kwargs = kwargs or {}
        if func in _METADATA:
            with without_torch_function():
                return func(*args, **kwargs)
        logits = args[0] if args else kwargs.get("input")
        if isinstance(logits, ShardedLogits):
            if func in _OF_OWN:
                return func(logits.own, *args[1:], **kwargs)
            if not logits.is_changed:
                result = _on_slices(func, logits, args, kwargs)
                if result is not None:
                    return result
        args, kwargs = tree_map_only(ShardedLogits, ShardedLogits.whole, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Raise RuntimeError. torch calls it for what bypasses ``__torch_function__``: too late for autograd."""
        raise RuntimeError(
            f"{func} was called on logits that are sharded over ranks, and torch does not show such calls; call "
            "logits.clone() first, which gathers them"
        )


_METADATA = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "is_cuda", "layout")),
    *(getattr(Tensor, name).__get__ for name in ("is_sparse", "is_meta", "is_quantized", "is_cpu", "itemsize")),
    *(Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.__len__, Tensor.numel, Tensor.nelement, Tensor.stride),
    *(Tensor.is_contiguous, Tensor.element_size, Tensor.is_floating_point, Tensor.is_complex, Tensor.get_device),
}
"""Answered from the shape alone."""

_OF_OWN = {getattr(Tensor, name).__get__ for name in ("requires_grad", "is_leaf", "grad_fn")}
"""Answered by this rank's slice, which has the same place in the graph as the logits."""

_OF_EACH_NUMBER = {
    *("float", "double", "half", "bfloat16", "to", "neg", "negative", "__neg__", "tanh"),
    *("div", "divide", "true_divide", "__truediv__", "__div__", "__rdiv__", "__rtruediv__"),
    *("mul", "multiply", "__mul__", "__rmul__", "add", "__add__", "__radd__"),
    *("sub", "subtract", "__sub__", "__rsub__"),
}
"""Names of functions that are elementwise, if all other arguments are single numbers."""

_RESHAPES = {Tensor.view, Tensor.reshape, torch.reshape, Tensor.contiguous, Tensor.view_as, Tensor.reshape_as}


def _on_slices(func: Any, logits: ShardedLogits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Return the result of ``func``, computed from this rank's slice, or None if it needs all columns."""
    if func in _SHARDED:
        return _SHARDED[func](*args, **kwargs)
    others = tree_leaves((args[1:], {name: value for name, value in kwargs.items() if name != "input"}))
    if func in (Tensor.detach, torch.detach):
        return ShardedLogits(logits.own.detach(), logits.bounds, logits.channel, source=logits)
    if func in _RESHAPES and not any(isinstance(other, Tensor) for other in others):
        shape = func(torch.empty(logits.shape, device="meta"), *args[1:], **kwargs).shape
        return logits if shape == logits.shape else None
    if getattr(func, "__name__", None) in _OF_EACH_NUMBER and all(_is_number(other) for other in others):
        own = func(logits.own, *args[1:], **kwargs) if args else func(**{**kwargs, "input": logits.own})
        return ShardedLogits(own, logits.bounds, logits.channel)
    return None


def _is_number(value: Any) -> bool:
    """Return whether ``value`` is the same for all columns, and needs no gradient, to which all columns contribute."""
    if isinstance(value, Tensor):
        return not isinstance(value, ShardedLogits) and value.dim() == 0 and not value.requires_grad
    # Devices are not among them: on another device the slices could not be gathered any more.
    return isinstance(value, (bool, int, float, torch.dtype, torch.memory_format, type(None)))


class _GatherLogits(torch.autograd.Function):
    """(N, own columns) to (N, all columns). All ranks have the same gradient, and each takes that of its columns."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, bounds: Bounds, channel: Channel) -> Tensor:
        ctx.own_bounds = bounds[channel.rank]
        return gather_columns(own, bounds, channel, "logits")

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        begin, end = ctx.own_bounds
        return gradients[0][:, begin:end], None, None


_SHARDED: dict[Any, Callable[..., Tensor | None]] = {
    F.cross_entropy: cross_entropy,
    F.binary_cross_entropy_with_logits: binary_cross_entropy,
}
