"""What each operator of PyTorch costs to run again, and how to run it again without side effects."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.backends import cudnn, mkldnn

from lightning_dp._private.torch_names import Nnpack, flag_reader, mutated_arguments


class Kind(enum.StrEnum):
    """What recomputation may do with the outputs of an operator."""

    VIEW = "view"
    """A view of its input: it costs nothing, and holds the memory of its input."""
    CHEAP = "cheap"
    """Bound by memory: normalization, activation, pooling, addition, casts."""
    EXPENSIVE = "expensive"
    """Bound by arithmetic: convolutions and matrix products."""
    FIXED = "fixed"
    """Must not run again: random numbers, collectives, and operators that this package does not know."""


# Names in the namespace "aten", without overloads.
_EXPENSIVE = {"convolution", "mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "linear"}
_BATCH_NORMS = {"native_batch_norm", "cudnn_batch_norm"}
_GATHERED_STATISTICS = {"batch_norm_gather_stats", "batch_norm_gather_stats_with_counts"}
_CHEAP = {
    *_BATCH_NORMS,
    *("native_layer_norm", "native_group_norm", "mean", "sum", "var"),
    "batch_norm_elemt",  # of global batch norm on CUDA: it normalizes with given statistics
    *("max_pool2d_with_indices", "max_pool3d_with_indices", "avg_pool2d", "avg_pool3d"),
    *("_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "upsample_nearest2d", "upsample_bilinear2d"),
    *("relu", "relu_", "prelu", "glu", "_softmax", "_log_softmax"),
    *("cat", "stack", "constant_pad_nd", "clone", "_to_copy", "copy_", "_unsafe_view"),
    *("fill_", "zero_"),
}
# Not cheap: zeros, full and others like them. NumPy, or a kernel that PyTorch does not know, may fill what they return.


def name_of(func: Any) -> str:
    """Return the name of an operator in its namespace, without the overload: ``"convolution"``."""
    name: str = func.name()
    return name.partition("::")[2].partition(".")[0]


@cache
def kind_of(func: Any) -> Kind:
    """Return what recomputation may do with ``func``, an operator as a dispatch mode sees it."""
    if getattr(func, "namespace", None) != "aten":
        return Kind.FIXED
    name = name_of(func)
    # Also dropout's mask: a second run would draw other numbers, and move the state of the generator.
    if torch.Tag.nondeterministic_seeded in func.tags or len(mutated_arguments(func)) > 1:
        return Kind.FIXED
    if name in _EXPENSIVE:
        return Kind.EXPENSIVE
    if name == "as_strided":  # it reads at an offset in memory, where a copy of its input has something else
        return Kind.FIXED
    if func.is_view:
        return Kind.VIEW
    if name in _CHEAP or torch.Tag.pointwise in func.tags:
        return Kind.CHEAP
    return Kind.FIXED


@cache
def is_batch_norm(func: Any) -> bool:
    """Return whether ``func`` normalizes a batch, and in training updates running statistics."""
    return getattr(func, "namespace", None) == "aten" and name_of(func) in _BATCH_NORMS


@cache
def arguments_moved_unseen(func: Any) -> tuple[int, ...]:
    """Return the places of arguments that an operator may change without a new version: running statistics."""
    moves = getattr(func, "namespace", None) == "aten" and name_of(func) in {*_BATCH_NORMS, *_GATHERED_STATISTICS}
    return (3, 4) if moves else ()


def arguments_to_keep(func: Any, args: Sequence[Any]) -> Sequence[Any]:
    """Return the arguments that running ``func`` again needs.

    A batch norm needs copies of its running statistics: in training it moves them, and leaves their version as it is.
    Its output in training does not depend on them. Without them there are none to move a second time (torch issue
    #96136). But if it has no weight, their type is that in which it computes.
    """
    if not is_batch_norm(func):
        return args
    has_no_use = args[5] and args[1] is not None
    copies = [None if statistic is None or has_no_use else statistic.clone() for statistic in args[3:5]]
    return [*args[:3], *copies, *args[5:]]


def rerun(func: Any, args: Sequence[Any], kwargs: dict[str, Any], statistics: Sequence[Tensor | None]) -> Any:
    """Run ``func`` a second time with the same arguments. The result is bitwise the same, and nothing else changes.

    Args:
        func: the operator.
        args: of the first run, as `arguments_to_keep` returns them, in the order of the operator's schema.
        kwargs: of the first run.
        statistics: mean and 1 / standard deviation that the first run of a batch norm returned, if they are there.
    """
    if not is_batch_norm(func):
        return func(*args, **kwargs)
    x, weight, bias, _, _, is_training, *_ = args
    mean, invstd = statistics if len(statistics) == 2 else (None, None)
    if is_training and mean is not None and invstd is not None and _has_affine_kernel(x, weight, bias):
        # The statistics of the first run need not be computed again, which is most of the work. In evaluation, with
        # variance 1 and eps 0, the kernel computes (x - mean) * slope + offset with the same roundings.
        slope = invstd if weight is None else invstd * weight
        out, _, _ = torch.native_batch_norm(x, slope, bias, mean, torch.ones_like(mean), False, 0.0, 0.0)
        return out, mean, invstd
    return func(*args, **kwargs)


def _has_affine_kernel(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Return whether PyTorch's evaluation kernel rounds as its training kernel does. Tests compare the bits."""
    is_single = all(values is None or values.dtype in (torch.float32, torch.float64) for values in (weight, bias))
    # Inputs with gaps, and transposed ones, have a kernel that multiplies in another order.
    formats = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)
    is_dense = any(x.is_contiguous(memory_format=memory_format) for memory_format in formats) and all(
        values is None or values.is_contiguous() for values in (weight, bias)
    )
    return x.device.type == "cpu" and is_single and is_dense and x.numel() > 0


# --- The flags of PyTorch's backends. Each may choose another kernel, with other roundings.

BackendFlags = tuple[Any, ...]
"""The values of the flags, in the order of `_FLAGS`; after them those of `_PRECISIONS`, if an operator reads them."""

_FLAGS: tuple[tuple[Any, str], ...] = (
    (mkldnn, "enabled"),
    (mkldnn, "deterministic"),
    (cudnn, "enabled"),
    (cudnn, "benchmark"),
    (cudnn, "deterministic"),
    (Nnpack(), "enabled"),
)
# Of convolutions and matrix products. torch 2.8 has the switches of before 2.9.
_PRECISIONS: tuple[tuple[Any, str], ...] = (
    (
        (torch.backends.cuda.matmul, "fp32_precision"),
        (cudnn.conv, "fp32_precision"),
        (mkldnn.matmul, "fp32_precision"),  # type: ignore[attr-defined]
        (mkldnn.conv, "fp32_precision"),  # type: ignore[attr-defined]
    )
    if hasattr(cudnn, "conv")  # a module that replaces itself
    else ((torch.backends.cuda.matmul, "allow_tf32"), (cudnn, "allow_tf32"))
)


# A look at the attribute itself takes four times as long, for each operator that is recorded.
_READERS = (
    torch.get_default_dtype,
    torch.are_deterministic_algorithms_enabled,
    *(flag_reader(owner, name) for owner, name in _FLAGS),
)
_PRECISION_READERS = tuple(flag_reader(owner, name) for owner, name in _PRECISIONS)


def backend_flags(kind: Kind) -> BackendFlags:
    """Return the flags under which an operator of ``kind`` would run now, and the default dtype; none for a view.

    Factories and operators on integers compute in that. Lightning's precision "64-true" sets it for the forward alone.
    """
    if kind is Kind.VIEW:
        return ()
    readers = (*_READERS, *_PRECISION_READERS) if kind is Kind.EXPENSIVE else _READERS
    return tuple([read() for read in readers])


@contextmanager
def under_flags(flags: BackendFlags, kind: Kind) -> Iterator[None]:
    """Run an operator of ``kind`` under the flags that `backend_flags` returned."""
    before = backend_flags(kind)
    if flags == before:
        yield
        return
    _set_flags(before, flags)
    try:
        yield
    finally:
        _set_flags(flags, before)


def _set_flags(before: BackendFlags, flags: BackendFlags) -> None:
    dtype, is_deterministic, *others = flags
    if dtype is not before[0]:
        torch.set_default_dtype(dtype)
    if is_deterministic != before[1]:
        warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
        torch.use_deterministic_algorithms(is_deterministic, warn_only=warn_only)
    for (owner, name), value, old in zip((*_FLAGS, *_PRECISIONS), others, before[2:], strict=False):
        if value != old:
            setattr(owner, name, value)
