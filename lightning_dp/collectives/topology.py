"""Division of the ranks of a job into groups. Integers only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RankTopology:
    """Divide ``world_size`` ranks into groups of ``group_size`` consecutive ranks.

    The first rank of each group is its leader. In layered SGD (arXiv 1906.05936, figure 3) a group is a node, and its
    leader does the work of the node's communicator.

    Raises:
        ValueError: the groups would differ in size. The message lists the sizes that work.
    """

    world_size: int
    group_size: int

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ValueError(f"world_size={self.world_size} must be at least 1")
        if self.group_size < 1 or self.world_size % self.group_size:
            possible = [size for size in range(1, self.world_size + 1) if self.world_size % size == 0]
            raise ValueError(
                f"world_size={self.world_size} is not a multiple of group_size={self.group_size}; "
                f"use {', '.join(map(str, possible[:-1]))}{' or ' if possible[:-1] else ''}{possible[-1]}"
            )

    @property
    def num_groups(self) -> int:
        """Number of groups."""
        return self.world_size // self.group_size

    def group_of(self, rank: int) -> int:
        """Return the index of the group of ``rank``."""
        return rank // self.group_size

    def group_rank(self, rank: int) -> int:
        """Return the rank of ``rank`` within its group. The leader has group rank 0."""
        return rank % self.group_size

    def members(self, rank: int) -> list[int]:
        """Return the ranks of the group of ``rank``, in ascending order."""
        first = self.group_of(rank) * self.group_size
        return list(range(first, first + self.group_size))

    def peers(self, rank: int) -> list[int]:
        """Return the ranks with the group rank of ``rank``, one per group. For a leader these are all leaders."""
        return list(range(self.group_rank(rank), self.world_size, self.group_size))
