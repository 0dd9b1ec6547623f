"""Which examples are in which pass through the head: schemes a, b and c of arXiv 1404.5997, section 4."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

import torch
from torch import Tensor

from lightning_dp.collectives.ring_schedule import chunk_bounds

Scheme = Literal["a", "b", "c"]
SCHEMES: tuple[Scheme, ...] = ("a", "b", "c")


@dataclass(frozen=True)
class SubPass:
    """One pass through the head: rows ``rows[r]`` (begin, end) of the batch of each rank r, one after the other."""

    rows: tuple[tuple[int, int], ...]

    @property
    def counts(self) -> list[int]:
        """How many examples each rank contributes."""
        return [end - begin for begin, end in self.rows]

    @property
    def num_examples(self) -> int:
        """How many examples there are in this pass."""
        return sum(self.counts)

    def rows_of(self, batches: Sequence[Tensor]) -> Tensor:
        """Concatenate this pass's rows of the batches of all ranks, rank by rank."""
        return torch.cat([batch[begin:end] for batch, (begin, end) in zip(batches, self.rows, strict=True)])


def sub_passes(scheme: Scheme, batch_sizes: Sequence[int]) -> list[SubPass]:
    """Divide the ranks' batches into passes through the head; every example is in exactly one, in its batch's order.

    - (a): one pass with everything.
    - (b): rank 0's batch, then rank 1's, and so on.
    - (c): as many passes as ranks; each rank contributes its K-th part to each. Where K does not divide a batch, parts
      differ by one, and each rank has its larger ones in other passes, so that passes remain as equal as they can be.

    Args:
        scheme: "a", "b" or "c".
        batch_sizes: of each rank; they may differ, and may be 0. A pass that would be empty is left out.
    """
    num_ranks = len(batch_sizes)
    if scheme == "a":
        passes = [SubPass(tuple((0, size) for size in batch_sizes))]
    elif scheme == "b":
        passes = [
            SubPass(tuple((0, size) if rank == turn else (0, 0) for rank, size in enumerate(batch_sizes)))
            for turn in range(num_ranks)
        ]
    else:
        parts = [_rotated_parts(size, num_ranks, rank) for rank, size in enumerate(batch_sizes)]
        passes = [SubPass(tuple(part[turn] for part in parts)) for turn in range(num_ranks)]
    return [one for one in passes if one.num_examples]


def _rotated_parts(size: int, num_parts: int, shift: int) -> list[tuple[int, int]]:
    """Consecutive parts of ``size`` rows, the larger ones from place ``-shift`` on."""
    sizes = [end - begin for begin, end in chunk_bounds(size, num_parts)]
    return list(pairwise(accumulate(sizes[shift:] + sizes[:shift], initial=0)))
