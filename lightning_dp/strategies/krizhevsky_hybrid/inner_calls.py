"""Calls of a layer within the head: refused, because the layer holds one rank's rows during ``fit``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.nn.functional as F
from torch import Tensor, nn

from lightning_dp.strategies.krizhevsky_hybrid.sharded_head import ShardedHead


@contextmanager
def refused_inner_calls(head: ShardedHead) -> Iterator[None]:
    """Within the context, let a call of an nn.Linear within the head raise RuntimeError.

    `ShardedHead` computes these layers without calling them. So whoever calls one while it has rows is the user, who
    would get this rank's columns, and a gradient of this rank's samples alone.
    """
    refused: list[nn.Module] = []
    if head.channel.world_size > 1:  # otherwise the rows are the whole layer
        # A head that is an nn.Linear itself has its ``forward`` replaced as any head.
        layers = head.head.named_modules(prefix=head.name)
        for path, layer in layers:
            if layer is not head.head and type(layer) is nn.Linear:
                vars(layer)["forward"] = _refusal(head, layer, path)
                refused.append(layer)
    try:
        yield
    finally:
        for layer in refused:
            vars(layer).pop("forward", None)


def _refusal(head: ShardedHead, layer: nn.Linear, path: str) -> Callable[[Tensor], Tensor]:
    # A function, because deepcopy does not copy it. A copy of a layer alone also holds rows, and so raises, too.
    def forward(x: Tensor) -> Tensor:
        # While the gathered head computes, it has put whole tensors in the place of the parameters.
        if not head.owns(layer.weight):
            return F.linear(x, layer.weight, layer.bias)
        raise RuntimeError(
            f"{path!r} was called by itself on rank {head.channel.rank}, which during fit holds only its own rows of "
            f"it. Call the whole head {head.name!r}, or shard this layer alone (head={path!r}), so that the other "
            "layers belong to the trunk"
        )

    return forward
