"""Which tensors can be recorded, and where they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

# Statistics, scales and losses: not worth an operator. Batch norm's statistics must stay, see `operators.rerun`.
_SMALL_VECTOR_BYTES = 65536
_SMALL_BYTES = 256


def is_plain(tensor: Tensor) -> bool:
    """Return whether the memory of ``tensor`` is its value: it is strided, real, and no wrapper of another tensor."""
    is_wrapper = type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__
    return not is_wrapper and tensor.layout is torch.strided and not tensor.dtype.is_complex


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
