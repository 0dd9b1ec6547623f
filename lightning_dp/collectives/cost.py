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


HeadCost = Literal["own", "logistic", "softmax"]


def head_traffic(
    widths: Sequence[int],
    batch_sizes: Sequence[int],
    element_bytes: int,
    scheme: Literal["a", "b", "c"] = "c",
    cost_function: HeadCost = "logistic",
    rank: int = 0,
    target_bytes: int = 8,
) -> dict[str, Cost]:
    """What a rank sends in a step for a model-parallel head (arXiv 1404.5997, section 4), by what it is.

    Never the head's parameters. Features go from the rank that has them to the N-1 others, and their gradients come
    back. So do the activations of each hidden layer, of which each rank has a slice, for the examples of all ranks. The
    schemes send the same bytes: what they change is when, and in (b) one rank alone sends features at a time. Steps
    count exchanges. The names are those of ``KrizhevskyHybridStrategy.bytes_sent``.

    Args:
        widths: of what enters each divided layer, the features first, and of the head's output.
        batch_sizes: examples of each of the N ranks.
        element_bytes: of an activation.
        scheme: "a", "b" or "c".
        cost_function: "own": each rank gets the logits of its own examples. "logistic" and "softmax", within a
            ``head_step``: logits stay divided, and ranks exchange their sums, or four numbers an example.
        rank: the one whose cost it is.
        target_bytes: of one example's target, which all ranks get for a ``head_step``.
    """
    world_size = len(batch_sizes)
    _require_head(widths, batch_sizes, element_bytes, scheme, cost_function)
    _require_rank(rank, world_size)
    peers, own, total = world_size - 1, batch_sizes[rank], sum(batch_sizes)
    features, *hidden, classes = widths
    *own_hidden, own_classes = (end - begin for begin, end in (chunk_bounds(w, world_size)[rank] for w in widths[1:]))
    passes = _num_passes(scheme, batch_sizes)
    elements = {
        "features": (peers * own * features, passes),
        "feature gradients": ((total - own) * features, passes),
        "hidden activations": (peers * total * sum(own_hidden), passes * len(hidden)),
        "hidden gradients": (total * (sum(hidden) - sum(own_hidden)), passes * len(hidden)),
    }
    if cost_function == "own":
        elements["logits"] = ((total - own) * own_classes, passes)
        elements["logit gradients"] = (own * (classes - own_classes), passes)
    sent = {what: (count * element_bytes, steps) for what, (count, steps) in elements.items()}
    sent["sizes"] = (peers * 3 * 8, 1)  # batch size, checksum of the shapes, seed
    if cost_function != "own":
        numbers, exchanges = (4 * total, 2 * passes) if cost_function == "softmax" else (passes, passes)
        sent["targets"] = (peers * own * target_bytes, 1)
        sent["loss"] = (peers * numbers * max(4, element_bytes), exchanges)
    return {what: Cost(num_bytes, steps if peers else 0) for what, (num_bytes, steps) in sent.items()}


def hybrid_cost(
    trunk_elements: int,
    widths: Sequence[int],
    batch_sizes: Sequence[int],
    element_bytes: int,
    scheme: Literal["a", "b", "c"] = "c",
    cost_function: HeadCost = "logistic",
    rank: int = 0,
) -> Cost:
    """Data-parallel trunk and model-parallel head (arXiv 1404.5997): the trunk's ring and the head's `head_traffic`.

    With N ranks of B examples each, and N dividing all sizes, 2(N-1)/N times the trunk, and 2(N-1) B times the sum of
    the widths that enter the head's layers; the rest is small.

    Args:
        trunk_elements: parameters of the trunk.
        widths: see `head_traffic`.
        batch_sizes: of each of the N ranks.
        element_bytes: of a parameter and of an activation.
        scheme: see `head_traffic`.
        cost_function: see there.
        rank: see there.
    """
    head = head_traffic(widths, batch_sizes, element_bytes, scheme, cost_function, rank).values()
    trunk = ring_cost(trunk_elements, element_bytes, len(batch_sizes), rank)
    return Cost(
        trunk.bytes_sent + sum(part.bytes_sent for part in head), trunk.num_steps + sum(part.num_steps for part in head)
    )


def _num_passes(scheme: Literal["a", "b", "c"], batch_sizes: Sequence[int]) -> int:
    """Passes with at least one example."""
    world_size = len(batch_sizes)
    if scheme == "a":
        return int(any(batch_sizes))
    if scheme == "b":
        return sum(size > 0 for size in batch_sizes)
    # A rank with fewer examples than there are passes begins at a place of its own.
    return sum(
        any((turn + rank) % world_size < size for rank, size in enumerate(batch_sizes)) for turn in range(world_size)
    )


def _require_head(
    widths: Sequence[int], batch_sizes: Sequence[int], element_bytes: int, scheme: str, cost_function: str
) -> None:
    if scheme not in ("a", "b", "c"):
        raise ValueError(f"scheme={scheme!r} is not known; use a, b or c")
    if cost_function not in ("own", "logistic", "softmax"):
        raise ValueError(f"cost_function={cost_function!r} is not known; use own, logistic or softmax")
    if len(widths) < 2 or not batch_sizes or element_bytes < 1 or any(size < 0 for size in (*widths, *batch_sizes)):
        raise ValueError(
            f"widths={widths}, batch_sizes={batch_sizes}, element_bytes={element_bytes}: use two widths or more, a "
            "batch size for each rank, none below 0, and at least 1 byte"
        )


def _require_sizes(num_elements: int, element_bytes: int, world_size: int) -> None:
    if num_elements < 0 or element_bytes < 1 or world_size < 1:
        raise ValueError(
            f"num_elements={num_elements}, element_bytes={element_bytes}, number of ranks or groups={world_size}: "
            "elements must not be negative, the others at least 1"
        )


def _require_rank(rank: int, world_size: int) -> None:
    if not 0 <= rank < world_size:
        raise ValueError(f"rank={rank} is not in a group of {world_size}; use 0 to {world_size - 1}")
