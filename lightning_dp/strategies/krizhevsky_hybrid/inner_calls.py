"""Calls of a layer within the head: refused, because the layer holds one rank's rows during ``fit``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:  # which imports this module
    from lightning_dp.strategies.krizhevsky_hybrid.sharded_head import ShardedHead


@contextmanager
def refused_inner_calls(head: ShardedHead) -> Iterator[None]:
    """Within the context, let a call of an nn.Linear within the head raise RuntimeError.

    `ShardedHead` computes these layers without calling them. So whoever calls one while it has rows is the user, who
    would get this rank's columns, and a gradient of this rank's samples alone.
    """
    refused: list[nn.Module] = []
    if head.channel.world_size > 1:  # otherwise the rows are the whole layer
        for path, layer in head.head.named_modules(prefix=head.name):
            # A head that is an nn.Linear itself has its ``forward`` replaced as any head.
            if layer is not head.head and type(layer) is nn.Linear:
                vars(layer)["forward"] = Refusal(head, layer, path)
                refused.append(layer)
    try:
        yield
    finally:
        for layer in refused:
            vars(layer).pop("forward", None)


class Refusal:
    """Stands for the forward of a layer within the head.

    Args:
        head: the sharded head.
        layer: an nn.Linear within it.
        path: of the layer in the module.
    """

    def __init__(self, head: ShardedHead, layer: nn.Linear, path: str) -> None:
        self._head, self._layer, self._path = head, layer, path

    def __deepcopy__(self, memo: dict[int, Any]) -> Refusal:
        return self  # a copy of a layer alone also holds rows, and so raises, too

    def __call__(self, x: Tensor) -> Tensor:
        """Compute the layer if it is whole, else raise."""
        # While the gathered head computes, it has put whole tensors in the place of the parameters.
        if not self._head.owns(self._layer.weight):
            return F.linear(x, self._layer.weight, self._layer.bias)
        raise RuntimeError(
            f"{self._path!r} was called by itself on rank {self._head.channel.rank}, which during fit holds only its "
            f"own rows of it. Call the whole head {self._head.name!r}, or shard this layer alone "
            f"(head={self._path!r}), so that the other layers belong to the trunk"
        )
