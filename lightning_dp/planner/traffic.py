"""Communication cost of collectives: bytes that a rank sends and sequential steps that it takes. Pure functions.

Bytes are those of the array, exactly as the functions of this package send them. Headers are not included (see
`lightning_dp.collectives.point_to_point`). Bytes received are not listed: they can differ from the bytes sent on a
single rank, but are equal to them in the sum over all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_dp.collectives.ring import chunk_bounds
from lightning_dp.strategies.krizhevsky_hybrid.exchange import sub_passes


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


# The bytes and exchanges of hybrid parallelism, computed without running it (arXiv 1404.5997, section 4).

HeadLoss = Literal["own", "gathered", "logistic", "cross_entropy"]


def head_traffic(
    widths: Sequence[int],
    batch_sizes: Sequence[int],
    element_bytes: int,
    scheme: Literal["a", "b", "c"] = "c",
    loss: HeadLoss = "logistic",
    rank: int = 0,
    target_bytes: int = 8,
    num_passes: int | None = None,
) -> dict[str, Cost]:
    """Return what a rank sends in a step for a sharded head, by kind of message (arXiv 1404.5997, section 4).

    Features go from the rank that has them to all others, and their gradients come back. So do each rank's slices of
    the hidden activations. The schemes send the same bytes at different times. The keys are those of
    ``KrizhevskyHybridStrategy.bytes_sent``; steps are exchanges.

    Args:
        widths: number of features, of each hidden layer's outputs, and of classes.
        batch_sizes: batch size of each rank.
        element_bytes: bytes of an activation.
        scheme: "a", "b" or "c".
        loss: "own": each rank receives the logits of its own samples, without ``head_step``. "gathered": with it, all
            ranks receive all logits. "logistic" and "cross_entropy": the functions of `lightning_dp.losses` within
            ``head_step``, with which logits stay sharded.
        rank: the rank that sends.
        target_bytes: bytes of a sample's target, which all ranks receive for ``head_step``.
        num_passes: of b and c. None: as many as there are ranks.
    """
    _require_head(widths, batch_sizes, element_bytes, scheme, loss)
    require_rank(rank, len(batch_sizes))
    peers = len(batch_sizes) - 1
    passes = len(sub_passes(scheme, batch_sizes, num_passes))
    elements = _activations(widths, batch_sizes, passes, loss, rank)
    sent = {what: (count * element_bytes, steps) for what, (count, steps) in elements.items()}
    sent["sizes"] = (peers * 3 * 8, 1)  # batch size, checksum of the shapes, seed
    if loss != "own":
        sent["targets"] = (peers * batch_sizes[rank] * target_bytes, 1)
    if loss in ("logistic", "cross_entropy"):
        # Softmax: four numbers per sample in two exchanges. Logistic units: the loss of each pass.
        numbers, exchanges = (4 * sum(batch_sizes), 2 * passes) if loss == "cross_entropy" else (passes, passes)
        sent["loss"] = (peers * numbers * max(4, element_bytes), exchanges)
    return {what: Cost(num_bytes, steps if peers else 0) for what, (num_bytes, steps) in sent.items()}


def _activations(
    widths: Sequence[int], batch_sizes: Sequence[int], passes: int, loss: HeadLoss, rank: int
) -> dict[str, tuple[int, int]]:
    """Return the activations and their gradients that a rank sends: elements and exchanges, by kind of message."""
    world_size = len(batch_sizes)
    peers = world_size - 1
    own = batch_sizes[rank]
    total = sum(batch_sizes)
    features, *hidden, classes = widths
    *own_hidden, own_classes = (end - begin for begin, end in (chunk_bounds(w, world_size)[rank] for w in widths[1:]))
    elements = {
        "features": (peers * own * features, passes),
        "feature gradients": ((total - own) * features, passes),
        "hidden activations": (peers * total * sum(own_hidden), passes * len(hidden)),
        "hidden gradients": (total * (sum(hidden) - sum(own_hidden)), passes * len(hidden)),
    }
    if loss == "gathered":
        elements["logits"] = (peers * total * own_classes, passes)
    if loss == "own":
        elements["logits"] = ((total - own) * own_classes, passes)
        elements["logit gradients"] = (own * (classes - own_classes), passes)
    return elements


def hybrid_cost(
    trunk_elements: int,
    widths: Sequence[int],
    batch_sizes: Sequence[int],
    element_bytes: int,
    scheme: Literal["a", "b", "c"] = "c",
    loss: HeadLoss = "logistic",
    rank: int = 0,
    num_passes: int | None = None,
) -> Cost:
    """Return the cost of a step: the ring all-reduce of the trunk's gradients, and `head_traffic` for the head.

    With N ranks of B samples each, and sizes that N divides, a rank sends 2(N-1)/N times the trunk's parameters and
    2(N-1) B times the sum of the widths that enter the head's layers. The rest is small.

    Args:
        trunk_elements: number of parameters of the trunk.
        widths: see `head_traffic`.
        batch_sizes: see `head_traffic`.
        element_bytes: bytes of a parameter and of an activation.
        scheme: see `head_traffic`.
        loss: see `head_traffic`.
        rank: see `head_traffic`.
        num_passes: see `head_traffic`.
    """
    head = head_traffic(widths, batch_sizes, element_bytes, scheme, loss, rank, num_passes=num_passes).values()
    trunk = ring_cost(trunk_elements, element_bytes, len(batch_sizes), rank)
    return Cost(
        trunk.bytes_sent + sum(part.bytes_sent for part in head), trunk.num_steps + sum(part.num_steps for part in head)
    )


def _require_head(
    widths: Sequence[int], batch_sizes: Sequence[int], element_bytes: int, scheme: str, loss: str
) -> None:
    if scheme not in ("a", "b", "c"):
        raise ValueError(f"scheme={scheme!r} is not known; use a, b or c")
    if loss not in ("own", "gathered", "logistic", "cross_entropy"):
        raise ValueError(f"loss={loss!r} is not known; use own, gathered, logistic or cross_entropy")
    if len(widths) < 2 or not batch_sizes or element_bytes < 1 or any(size < 0 for size in (*widths, *batch_sizes)):
        raise ValueError(
            f"widths={widths}, batch_sizes={batch_sizes}, element_bytes={element_bytes}: use two widths or more, a "
            "batch size for each rank, none below 0, and at least 1 byte"
        )
