"""Which samples are in which pass through the head: schemes a, b and c of arXiv 1404.5997, section 4."""

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
    """One pass through the head. ``rows[r]`` is (begin, end) of the rows that it takes from the batch of rank r."""

    rows: tuple[tuple[int, int], ...]

    @property
    def counts(self) -> list[int]:
        """How many samples each rank contributes."""
        return [end - begin for begin, end in self.rows]

    @property
    def num_samples(self) -> int:
        """How many samples there are in this pass."""
        return sum(self.counts)

    def rows_of(self, batches: Sequence[Tensor]) -> Tensor:
        """Return this pass's rows of ``batches``, which are those of all ranks, concatenated in rank order."""
        return torch.cat([batch[begin:end] for batch, (begin, end) in zip(batches, self.rows, strict=True)])


def sub_passes(scheme: Scheme, batch_sizes: Sequence[int]) -> list[SubPass]:
    """Divide the ranks' batches into passes through the head. Every sample is in exactly one, in its batch's order.

    - (a): one pass with everything.
    - (b): the batch of rank 0, then that of rank 1, and so on.
    - (c): K passes for K ranks; each rank contributes a K-th of its batch to each. If K does not divide a batch, its
      parts differ by one. Each rank has its larger parts in other passes, so that the passes are as equal as possible.

    Args:
        scheme: "a", "b" or "c".
        batch_sizes: batch size of each rank. They may differ, and may be 0. An empty pass is left out.
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
    return [one for one in passes if one.num_samples]


def _rotated_parts(size: int, num_parts: int, shift: int) -> list[tuple[int, int]]:
    """Consecutive parts of ``size`` rows, the larger ones from place ``-shift`` on."""
    sizes = [end - begin for begin, end in chunk_bounds(size, num_parts)]
    return list(pairwise(accumulate(sizes[shift:] + sizes[:shift], initial=0)))
