"""What is kept for backward: one decision for each operator."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping

from torch import nn
from typing_extensions import override

from lightning_dp.recompute.operators import Kind
from lightning_dp.recompute.values import Saved

# In a segment that was computed again, what is farther than this from values that stay, stays as well. A chain of
# residual blocks would otherwise start from its first block for each of its blocks.
MAX_CHAIN = 6
# Of values that backward does not ask for itself, each that is farther than this from values that stay, stays as well:
# a loop that backward reads at each step would otherwise start from its beginning for each of them. They go with the
# part of the graph that needs them.
MAX_UNASKED_CHAIN = 64


class Policy(ABC):
    """Says which outputs are kept.

    Attributes:
        max_calls: keep an output if more operators than that would have to run again to compute it. In a chain of
            residual blocks each output can be computed from the one before, so that without a limit the first request
            of backward would bring all of them into memory. None: no limit.
        has_segments: keep what is used in another segment of the model than the one in which it was computed.
        is_for_one_model: the policy knows the operators of one model, see `check`.
    """

    max_calls: int | None = None
    has_segments = False
    is_for_one_model = False

    def check(self, sizes: Mapping[str, int], method: str) -> None:  # noqa: B027  most policies fit each model
        """Compare the policy with the first forward pass that it was used for.

        Args:
            sizes: bytes of the outputs of each call that are not small, by its key.
            method: that ran, with its class.

        Raises:
            ValueError: the policy was made for another model.
        """

    @abstractmethod
    def keeps(self, kind: Kind, key: str) -> bool:
        """Return whether to keep the outputs of an operator; those of the kind "fixed" are kept in any case.

        Args:
            kind: of the operator.
            key: of the call: module, operator, and how often that module has called that operator before.
        """

    def plans_to_keep(self, key: str) -> bool:
        """Return whether to keep the output of this call of an operator, whether or not autograd will ask for it."""
        return False

    def holds(self, num_bytes: int, kept_bytes: int, spare_bytes: int) -> bool:
        """Return whether to hold what an output can be computed again from, in place of the output.

        Args:
            num_bytes: what would be held for that alone.
            kept_bytes: the memory of the output.
            spare_bytes: how much less is held so far than without recomputation.
        """
        return num_bytes < kept_bytes

    def retain(self, saved: Saved, length: int) -> bool:
        """Return whether to keep a recomputed intermediate until backward needs it; see `values.Retain`."""
        return saved.num_uses > 0 or length >= MAX_UNASKED_CHAIN


class Cheap(Policy):
    """Keep outputs of convolutions, matrix products and random masks; recompute what is bound by memory."""

    max_calls = 12  # about four residual blocks

    @override
    def keeps(self, kind: Kind, key: str) -> bool:
        return kind is Kind.EXPENSIVE


class Sublinear(Policy):
    """Keep what enters a segment (Chen et al. 2016, arXiv 1604.06174), and in a segment computed again as `Cheap`."""

    has_segments = True

    @override
    def keeps(self, kind: Kind, key: str) -> bool:
        return False

    @override
    def holds(self, num_bytes: int, kept_bytes: int, spare_bytes: int) -> bool:
        # What enters a segment may be larger than the first output that is computed from it: others follow.
        return num_bytes <= kept_bytes + spare_bytes

    @override
    def retain(self, saved: Saved, length: int) -> bool:
        call = saved.value.call if saved.value is not None else None
        is_expensive = call is not None and call.kind is Kind.EXPENSIVE
        return super().retain(saved, length) and (is_expensive or length >= MAX_CHAIN)


# --- The blocks of a model: the modules that run one after the other, found by its structure.

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of ``model`` in the order of its attributes, which is taken to be that of its forward.

    Containers, and modules that hold one somewhere inside, are taken apart. An element of a container stays whole if
    another element is of the same class: the layers of a stage, for example, whatever is inside of them.
    """
    blocks: list[nn.Module] = []
    for child in model.children():
        is_repeated = isinstance(model, _CONTAINERS) and any(
            type(other) is type(child) for other in model.children() if other is not child
        )
        if isinstance(child, _CONTAINERS) or (
            not is_repeated and any(isinstance(part, _CONTAINERS) for part in child.modules())
        ):
            blocks.extend(find_blocks(child))
        else:
            blocks.append(child)
    return blocks


def segment_ends(model: nn.Module) -> frozenset[nn.Module]:
    """Return the blocks at whose end a segment ends: about sqrt(n) segments of equal length for n blocks."""
    blocks = find_blocks(model)
    length = max(1, round(math.sqrt(len(blocks))))
    return frozenset(blocks[length - 1 :: length])
