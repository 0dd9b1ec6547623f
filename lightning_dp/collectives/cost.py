"""What collectives cost: bytes that a rank sends, and steps, one after the other, in which it does so. Pure functions.

Counted is the array alone, as `ring_all_reduce` and the others send it, to the byte; their headers come on top (see
`lightning_dp.collectives.same_call`). What a rank receives is not the same for each rank, but in sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_dp.collectives.ring_schedule import chunk_bounds


@dataclass(frozen=True)
class Cost:
    """Of one rank. ``inter_group_bytes`` cross from group to group, ``intra_group_bytes`` do not leave it."""

    inter_group_bytes: int
    num_steps: int
    intra_group_bytes: int = 0

    @property
    def bytes_sent(self) -> int:
        """All bytes that the rank sends."""
        return self.inter_group_bytes + self.intra_group_bytes

    def time_bound_s(self, bandwidth_bytes_per_s: float, latency_s: float = 0.0) -> float:
        """No faster than this, where a rank's link between groups carries ``bandwidth_bytes_per_s`` each way."""
        return self.inter_group_bytes / bandwidth_bytes_per_s + self.num_steps * latency_s


def ring_cost(num_elements: int, element_bytes: int, world_size: int, rank: int = 0) -> Cost:
    """`ring_all_reduce`: "Data Transferred = 2(N-1) K/N", and exactly so where N divides K.

    Otherwise chunks differ by one element: the rank sends each chunk twice, except its own and the next one, once each.
    """
    _require_sizes(num_elements, element_bytes, world_size)
    require_rank(rank, world_size)
    if world_size == 1:
        return Cost(0, 0)
    sizes = [end - begin for begin, end in chunk_bounds(num_elements, world_size)]
    # Scatter-reduce sends all but chunk rank+1; all-gather all but chunk rank+2.
    elements = 2 * num_elements - sizes[(rank + 1) % world_size] - sizes[(rank + 2) % world_size]
    return Cost(elements * element_bytes, 2 * (world_size - 1))


def half_ring_cost(num_elements: int, element_bytes: int, world_size: int, rank: int = 0) -> Cost:
    """`ring_reduce_scatter`: each rank sends all chunks but its own."""
    _require_sizes(num_elements, element_bytes, world_size)
    require_rank(rank, world_size)
    begin, end = chunk_bounds(num_elements, world_size)[rank]
    return Cost((num_elements - (end - begin)) * element_bytes, world_size - 1)


def star_cost(num_elements: int, element_bytes: int, world_size: int, is_reducer: bool) -> Cost:
    """`star_all_reduce`: each rank sends the array once, the reducer N-1 times. It also receives it N-1 times."""
    _require_sizes(num_elements, element_bytes, world_size)
    copies = world_size - 1 if is_reducer else min(1, world_size - 1)
    return Cost(copies * num_elements * element_bytes, 2 if world_size > 1 else 0)


def hierarchical_cost(
    num_elements: int,
    element_bytes: int,
    num_groups: int,
    group_size: int,
    communicator: Literal["leader", "sharded"] = "leader",
    group_rank: int = 0,
) -> Cost:
    """Sum in groups, ring all-reduce between them, and hand the result out in groups (arXiv 1906.05936, Algorithm 3).

    "leader": local rank 0 gets the array of each other member, takes part in the ring between groups, and sends each
    member the result. "sharded": reduce-scatter in the group, a ring between groups for each share, all-gather in the
    group. The cost is that of group 0. Inside a group, native collectives may spread the leader's bytes over the
    members, but not save any.
    """
    _require_sizes(num_elements, element_bytes, num_groups)
    require_rank(group_rank, group_size)
    if communicator not in ("leader", "sharded"):
        raise ValueError(f"communicator={communicator!r} is not known; use leader or sharded")
    if communicator == "leader":
        across = ring_cost(num_elements, element_bytes, num_groups)
        inside = star_cost(num_elements, element_bytes, group_size, is_reducer=group_rank == 0)
        between = across.inter_group_bytes if group_rank == 0 else 0
        return Cost(between, across.num_steps + inside.num_steps, inside.bytes_sent)
    begin, end = chunk_bounds(num_elements, group_size)[group_rank]
    across = ring_cost(end - begin, element_bytes, num_groups)
    scatter = half_ring_cost(num_elements, element_bytes, group_size, group_rank)
    # The all-gather starts from the own share and passes on all but the right neighbour's.
    gather = half_ring_cost(num_elements, element_bytes, group_size, (group_rank + 1) % group_size)
    return Cost(
        across.inter_group_bytes,
        across.num_steps + scatter.num_steps + gather.num_steps,
        scatter.bytes_sent + gather.bytes_sent,
    )


def _require_sizes(num_elements: int, element_bytes: int, world_size: int) -> None:
    if num_elements < 0 or element_bytes < 1 or world_size < 1:
        raise ValueError(
            f"num_elements={num_elements}, element_bytes={element_bytes}, number of ranks or groups={world_size}: "
            "elements must not be negative, the others at least 1"
        )


def require_rank(rank: int, world_size: int) -> None:
    """Raise ValueError unless ``rank`` is one of ``world_size`` ranks."""
    if not 0 <= rank < world_size:
        raise ValueError(f"rank={rank} is not in a group of {world_size}; use 0 to {world_size - 1}")
