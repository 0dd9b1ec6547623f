"""Reduce-scatter and all-gather of one tensor, under the names that the installed PyTorch prefers.

PyTorch 2.13 has deprecated ``reduce_scatter_tensor`` and ``all_gather_into_tensor`` in favor of ``*_single``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def reduce_scatter(output: Tensor, input: Tensor, group: dist.ProcessGroup) -> None:
    """Sum chunk k of ``input`` into ``output`` on group rank k.

    Args:
        output: (n,). It may be this rank's chunk of ``input``.
        input: (ranks * n,).
        group: all its ranks must call this function.
    """
    _reduce_scatter(output, input, group=group)


def all_gather(output: Tensor, input: Tensor, group: dist.ProcessGroup) -> None:
    """Put ``input`` of group rank k into chunk k of ``output``, on all ranks.

    Args:
        output: (ranks * n,).
        input: (n,). It may be this rank's chunk of ``output``.
        group: all its ranks must call this function.
    """
    _all_gather(output, input, group=group)
