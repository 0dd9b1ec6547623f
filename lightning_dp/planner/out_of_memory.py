"""Trials that may use up the memory."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")
# What torch's allocators on host memory say, in a RuntimeError of no class of its own.
_MESSAGES = ("out of memory", "can't allocate memory", "not enough memory")


def unless_out_of_memory(trial: Callable[[], T]) -> T | None:
    """Return the result of ``trial``, or None if it runs out of memory; what it had allocated is then free again."""
    try:
        return trial()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    # Outside of the handler: the error's frames hold the tensors of the step that failed.
    gc.collect()
    torch.cuda.empty_cache()  # does nothing without a GPU
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory is used up, on a device or on the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _MESSAGES)
