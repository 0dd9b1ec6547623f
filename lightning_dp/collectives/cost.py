"""What collectives cost: bytes that a rank sends, and steps, one after the other, in which it does so. Pure functions.

Counted is the array alone, as `ring_all_reduce` and the others send it, to the byte; their headers come on top (see
`lightning_dp.collectives.agreement`). What a rank receives is not the same for each rank, but in sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_dp.collectives.rotation import chunk_bounds


@dataclass(frozen=True)
class Cost:
    """Of one rank. ``bytes_between_groups`` cross from group to group, ``bytes_inside_group`` do not leave it."""

    bytes_between_groups: int
    num_steps: int
    bytes_inside_group: int = 0

    @property
    def bytes_sent(self) -> int:
        """All bytes that the rank sends."""
        return self.bytes_between_groups + self.bytes_inside_group

    def time_bound_s(self, bandwidth_bytes_per_s: float, latency_s: float = 0.0) -> float:
        """No faster than this, where a rank's link between groups carries ``bandwidth_bytes_per_s`` each way."""
        return self.bytes_between_groups / bandwidth_bytes_per_s + self.num_steps * latency_s


def ring_cost(num_elements: int, element_bytes: int, world_size: int, rank: int = 0) -> Cost:
    """`ring_all_reduce`: "Data Transferred = 2(N-1) K/N", and exactly so where N divides K.

    Otherwise chunks differ by one element: the rank sends each chunk twice, except its own and the next one, once each.
    """
    _require_sizes(num_elements, element_bytes, world_size)
    _require_rank(rank, world_size)
    if world_size == 1:
        return Cost(0, 0)
    sizes = [end - begin for begin, end in chunk_bounds(num_elements, world_size)]
    # Scatter-reduce sends all but chunk rank+1; all-gather all but chunk rank+2.
    elements = 2 * num_elements - sizes[(rank + 1) % world_size] - sizes[(rank + 2) % world_size]
    return Cost(elements * element_bytes, 2 * (world_size - 1))


def half_ring_cost(num_elements: int, element_bytes: int, world_size: int, rank: int = 0) -> Cost:
    """`ring_reduce_scatter`: each rank sends all chunks but its own."""
    _require_sizes(num_elements, element_bytes, world_size)
    _require_rank(rank, world_size)
    begin, end = chunk_bounds(num_elements, world_size)[rank]
    return Cost((num_elements - (end - begin)) * element_bytes, world_size - 1)


def star_cost(num_elements: int, element_bytes: int, world_size: int, is_reducer: bool) -> Cost:
    """`star_all_reduce`: each rank sends the array once, the reducer N-1 times. It also receives it N-1 times."""
    _require_sizes(num_elements, element_bytes, world_size)
    copies = world_size - 1 if is_reducer else min(1, world_size - 1)
    return Cost(copies * num_elements * element_bytes, 2 if world_size > 1 else 0)


def two_level_cost(
    num_elements: int,
    element_bytes: int,
    num_groups: int,
    group_size: int,
    communicator: Literal["leader", "sharded"] = "leader",
    local_rank: int = 0,
) -> Cost:
    """Sum in groups, ring all-reduce between them, and hand the result out in groups (arXiv 1906.05936, Algorithm 3).

    "leader": local rank 0 gets the array of each other member, takes part in the ring between groups, and sends each
    member the result. "sharded": reduce-scatter in the group, a ring between groups for each share, all-gather in the
    group. The cost is that of group 0. Inside a group, native collectives may spread the leader's bytes over the
    members, but not save any.
    """
    _require_sizes(num_elements, element_bytes, num_groups)
    _require_rank(local_rank, group_size)
    if communicator not in ("leader", "sharded"):
        raise ValueError(f"communicator={communicator!r} is not known; use leader or sharded")
    if communicator == "leader":
        across = ring_cost(num_elements, element_bytes, num_groups)
        inside = star_cost(num_elements, element_bytes, group_size, is_reducer=local_rank == 0)
        between = across.bytes_between_groups if local_rank == 0 else 0
        return Cost(between, across.num_steps + inside.num_steps, inside.bytes_sent)
    begin, end = chunk_bounds(num_elements, group_size)[local_rank]
    across = ring_cost(end - begin, element_bytes, num_groups)
    scatter = half_ring_cost(num_elements, element_bytes, group_size, local_rank)
    # The all-gather starts from the own share and passes on all but the right neighbour's.
    gather = half_ring_cost(num_elements, element_bytes, group_size, (local_rank + 1) % group_size)
    return Cost(
        across.bytes_between_groups,
        across.num_steps + scatter.num_steps + gather.num_steps,
        scatter.bytes_sent + gather.bytes_sent,
    )


def hybrid_cost(
    trunk_elements: int,
    sharded_widths: Sequence[int],
    local_batch_size: int,
    element_bytes: int,
    world_size: int,
    scheme: Literal["a", "b", "c"] = "c",
    rank: int = 0,
) -> Cost:
    """Data-parallel trunk and model-parallel head (arXiv 1404.5997, section 4); the head's parameters are never sent.

    The trunk's gradients go round the ring. The activations that enter a sharded layer of input width W go from their
    rank to the N-1 others, and their gradients come back: 2(N-1) times (local batch x W) for each rank, whatever the
    scheme. What the schemes change is who sends trunk activations at one time: in (a) all ranks, at once; in (b) one
    rank in each of N passes, so that its link limits all; in (c) all ranks in each of N passes, a N-th of their batch.

    Args:
        trunk_elements: parameters of the trunk.
        sharded_widths: input width of each sharded layer, the trunk's features first.
        local_batch_size: samples a rank.
        element_bytes: of a parameter and of an activation.
        world_size: N.
        scheme: "a", "b" or "c". Steps count an exchange forward and one backward, for each layer and pass.
        rank: for the ring's chunks.
    """
    trunk = ring_cost(trunk_elements, element_bytes, world_size, rank)
    if scheme not in ("a", "b", "c"):
        raise ValueError(f"scheme={scheme!r} is not known; use a, b or c")
    if local_batch_size < 0 or any(width < 0 for width in sharded_widths):
        raise ValueError(f"local_batch_size={local_batch_size}, sharded_widths={sharded_widths}: use none below 0")
    if world_size == 1:
        return trunk
    features = 2 * (world_size - 1) * local_batch_size * sum(sharded_widths) * element_bytes
    num_passes = 1 if scheme == "a" else world_size
    return Cost(trunk.bytes_sent + features, trunk.num_steps + 2 * num_passes * len(sharded_widths))


def _require_sizes(num_elements: int, element_bytes: int, world_size: int) -> None:
    if num_elements < 0 or element_bytes < 1 or world_size < 1:
        raise ValueError(
            f"num_elements={num_elements}, element_bytes={element_bytes}, number of ranks or groups={world_size}: "
            "elements must not be negative, the others at least 1"
        )


def _require_rank(rank: int, world_size: int) -> None:
    if not 0 <= rank < world_size:
        raise ValueError(f"rank={rank} is not in a group of {world_size}; use 0 to {world_size - 1}")
