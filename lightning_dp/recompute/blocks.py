"""The blocks of a model: the modules that run one after the other, found by its structure."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import nn

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of ``model`` in the order of its attributes, which is taken to be that of its forward.

    Containers, and modules that hold one somewhere inside, are taken apart. An element of a container stays whole if
    another element is of the same class: the layers of a stage, for example, whatever is inside of them.
    """
    return list(_blocks_of(model))


def segment_ends(model: nn.Module) -> frozenset[nn.Module]:
    """Return the blocks at whose end a segment ends: about sqrt(n) segments of equal length for n blocks."""
    blocks = find_blocks(model)
    length = max(1, round(math.sqrt(len(blocks))))
    return frozenset(blocks[length - 1 :: length])


def _blocks_of(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        is_repeated = isinstance(module, _CONTAINERS) and any(
            type(other) is type(child) for other in module.children() if other is not child
        )
        if isinstance(child, _CONTAINERS) or (not is_repeated and _holds_container(child)):
            yield from _blocks_of(child)
        else:
            yield child


def _holds_container(module: nn.Module) -> bool:
    return any(isinstance(part, _CONTAINERS) for part in module.modules())
