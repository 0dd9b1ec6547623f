"""Communication cost of collectives: bytes that a rank sends and sequential steps that it takes. Pure functions.

Bytes are those of the array, exactly as the functions of this package send them. Headers are not included (see
`lightning_dp.collectives.same_call`). Bytes received are not listed: they can differ from the bytes sent on a single
rank, but are equal to them in the sum over all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_dp.collectives.ring_schedule import chunk_bounds


@dataclass(frozen=True)
class Cost:
    """Communication cost of one rank.

    Attributes:
        inter_group_bytes: bytes sent to ranks of other groups. All bytes, if there are no groups.
        num_steps: messages that must follow one after another.
        intra_group_bytes: bytes sent to ranks of the same group.
    """

    inter_group_bytes: int
    num_steps: int
    intra_group_bytes: int = 0

    @property
    def bytes_sent(self) -> int:
        """All bytes that the rank sends."""
        return self.inter_group_bytes + self.intra_group_bytes

    def time_bound_s(self, bandwidth_bytes_per_s: float, latency_s: float = 0.0) -> float:
        """Return a lower bound on the time in seconds.

        Args:
            bandwidth_bytes_per_s: bandwidth of the rank's inter-group link, in each direction.
            latency_s: latency of one message.
        """
        return self.inter_group_bytes / bandwidth_bytes_per_s + self.num_steps * latency_s


def ring_cost(num_elements: int, element_bytes: int, world_size: int, rank: int = 0) -> Cost:
    """Return the cost of `ring_all_reduce`: "Data Transferred = 2(N-1) K/N", exactly so if N divides K.

    Otherwise chunks differ by one element. The rank sends each chunk twice, except two chunks that it sends once.
    """
    _require_sizes(num_elements, element_bytes, world_size)
    require_rank(rank, world_size)
    if world_size == 1:
        return Cost(0, 0)
    sizes = [end - begin for begin, end in chunk_bounds(num_elements, world_size)]
    # The reduce-scatter sends all chunks but rank+1, the all-gather all chunks but rank+2.
    elements = 2 * num_elements - sizes[(rank + 1) % world_size] - sizes[(rank + 2) % world_size]
    return Cost(elements * element_bytes, 2 * (world_size - 1))


def half_ring_cost(num_elements: int, element_bytes: int, world_size: int, rank: int = 0) -> Cost:
    """Return the cost of `ring_reduce_scatter`: each rank sends all chunks but its own."""
    _require_sizes(num_elements, element_bytes, world_size)
    require_rank(rank, world_size)
    begin, end = chunk_bounds(num_elements, world_size)[rank]
    return Cost((num_elements - (end - begin)) * element_bytes, world_size - 1)


def star_cost(num_elements: int, element_bytes: int, world_size: int, is_reducer: bool) -> Cost:
    """Return the cost of `star_all_reduce`: the reducer sends the array N-1 times, each other rank once.

    The reducer also receives the array N-1 times.
    """
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
    """Return the cost of a hierarchical all-reduce with a ring between groups (arXiv 1906.05936, Algorithm 3).

    "leader": the leader receives the array of each other member, takes part in the inter-group ring, and sends the
    result to each member. "sharded": reduce-scatter inside the group, an inter-group ring per shard, all-gather inside
    the group. The cost is that of a rank of group 0. Native intra-group collectives may distribute the bytes of the
    leader over the members, but cannot send fewer in all.
    """
    _require_sizes(num_elements, element_bytes, num_groups)
    require_rank(group_rank, group_size)
    if communicator not in ("leader", "sharded"):
        raise ValueError(f"communicator={communicator!r} is not known; use leader or sharded")
    if communicator == "leader":
        inter_group = ring_cost(num_elements, element_bytes, num_groups)
        intra_group = star_cost(num_elements, element_bytes, group_size, is_reducer=group_rank == 0)
        # Only the leader sends between groups, but every rank waits for the steps of its ring.
        inter_group_bytes = inter_group.inter_group_bytes if group_rank == 0 else 0
        return Cost(inter_group_bytes, inter_group.num_steps + intra_group.num_steps, intra_group.bytes_sent)
    begin, end = chunk_bounds(num_elements, group_size)[group_rank]
    inter_group = ring_cost(end - begin, element_bytes, num_groups)
    scatter = half_ring_cost(num_elements, element_bytes, group_size, group_rank)
    # The all-gather starts with the rank's own shard and forwards all shards but that of the right neighbor.
    gather = half_ring_cost(num_elements, element_bytes, group_size, (group_rank + 1) % group_size)
    return Cost(
        inter_group.inter_group_bytes,
        inter_group.num_steps + scatter.num_steps + gather.num_steps,
        scatter.bytes_sent + gather.bytes_sent,
    )


def _require_sizes(num_elements: int, element_bytes: int, world_size: int) -> None:
    if num_elements < 0 or element_bytes < 1 or world_size < 1:
        raise ValueError(
            f"num_elements={num_elements}, element_bytes={element_bytes}, number of ranks or groups={world_size}: "
            "elements must not be negative, the others at least 1"
        )


def require_rank(rank: int, world_size: int) -> None:
    """Raise ValueError unless 0 <= ``rank`` < ``world_size``."""
    if not 0 <= rank < world_size:
        raise ValueError(f"rank={rank} is not in a group of {world_size}; use 0 to {world_size - 1}")
