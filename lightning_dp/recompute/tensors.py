"""Which tensors can be recorded, and where they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

# Statistics, scales and losses: not worth an operator. Batch norm's statistics must stay, see `operators.rerun`.
_SMALL_VECTOR_BYTES = 65536
_SMALL_BYTES = 256


def is_plain(tensor: Tensor) -> bool:
    """Return whether the memory of ``tensor`` is its value, and its version tells of each change.

    It is strided, real, no wrapper of another tensor, and was not made in inference mode.
    """
    if is_lazy(tensor):
        return False
    is_wrapper = type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__
    is_real = tensor.layout is torch.strided and not tensor.dtype.is_complex
    return not is_wrapper and is_real and not tensor.is_inference()


def copy_of(tensor: Tensor) -> Tensor:
    """Return a detached copy with the same strides. With others, kernels may add in another order."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(mode=False):  # a copy made in inference mode would have no version
            return copy_of(tensor)
    tensor = tensor.detach()
    copy = tensor.clone()
    if copy.stride() == tensor.stride() or copy.numel() == 0 or tensor.is_neg():
        return copy
    length = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = tensor.as_strided((length,), (1,)).clone()
    return memory.as_strided(tensor.shape, tensor.stride())


def tensors_in(arguments: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested lists, tuples and dictionaries."""
    if isinstance(arguments, Tensor):
        yield arguments
    elif isinstance(arguments, (list, tuple)):
        for argument in arguments:
            yield from tensors_in(argument)
    elif isinstance(arguments, dict):
        yield from tensors_in(list(arguments.values()))


def is_small(tensor: Tensor) -> bool:
    """Return whether the tensor is kept in any case."""
    num_bytes = tensor.numel() * tensor.element_size()
    return num_bytes <= (_SMALL_VECTOR_BYTES if tensor.dim() <= 1 else _SMALL_BYTES)
