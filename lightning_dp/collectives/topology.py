"""How the ranks of a job are divided into groups: integers only, checked once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RankTopology:
    """``world_size`` ranks in groups of ``group_size`` consecutive ranks; the first of each group is its leader.

    In layered SGD (arXiv 1906.05936, figure 3) a group is a node, and its leader carries the communicator.

    Raises:
        ValueError: the groups would not be equal; the message lists the sizes that would do.
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
        """How many groups there are."""
        return self.world_size // self.group_size

    def group_of(self, rank: int) -> int:
        """The index of the group that ``rank`` belongs to."""
        return rank // self.group_size

    def group_rank(self, rank: int) -> int:
        """The place of ``rank`` within its group; 0 is the leader."""
        return rank % self.group_size

    def members(self, rank: int) -> list[int]:
        """All ranks of ``rank``'s group."""
        first = self.group_of(rank) * self.group_size
        return list(range(first, first + self.group_size))

    def peers(self, rank: int) -> list[int]:
        """The ranks that have ``rank``'s place in their groups, one a group: of a leader, all leaders."""
        return list(range(self.group_rank(rank), self.world_size, self.group_size))
