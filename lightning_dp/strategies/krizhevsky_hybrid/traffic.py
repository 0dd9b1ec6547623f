"""The bytes and exchanges of hybrid parallelism, computed without running it (arXiv 1404.5997, section 4)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from lightning_dp.collectives.cost import Cost, require_rank, ring_cost
from lightning_dp.collectives.ring_schedule import chunk_bounds
from lightning_dp.strategies.krizhevsky_hybrid.schemes import sub_passes

HeadLoss = Literal["own", "logistic", "cross_entropy"]


def head_traffic(
    widths: Sequence[int],
    batch_sizes: Sequence[int],
    element_bytes: int,
    scheme: Literal["a", "b", "c"] = "c",
    loss: HeadLoss = "logistic",
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
        loss: "own": each rank gets the logits of its own examples. "logistic" and "cross_entropy", within a
            ``head_step``: logits stay divided, and ranks exchange their sums, or four numbers an example.
        rank: the one whose cost it is.
        target_bytes: of one example's target, which all ranks get for a ``head_step``.
    """
    world_size = len(batch_sizes)
    _require_head(widths, batch_sizes, element_bytes, scheme, loss)
    require_rank(rank, world_size)
    peers, own, total = world_size - 1, batch_sizes[rank], sum(batch_sizes)
    features, *hidden, classes = widths
    *own_hidden, own_classes = (end - begin for begin, end in (chunk_bounds(w, world_size)[rank] for w in widths[1:]))
    passes = len(sub_passes(scheme, batch_sizes))
    elements = {
        "features": (peers * own * features, passes),
        "feature gradients": ((total - own) * features, passes),
        "hidden activations": (peers * total * sum(own_hidden), passes * len(hidden)),
        "hidden gradients": (total * (sum(hidden) - sum(own_hidden)), passes * len(hidden)),
    }
    if loss == "own":
        elements["logits"] = ((total - own) * own_classes, passes)
        elements["logit gradients"] = (own * (classes - own_classes), passes)
    sent = {what: (count * element_bytes, steps) for what, (count, steps) in elements.items()}
    sent["sizes"] = (peers * 3 * 8, 1)  # batch size, checksum of the shapes, seed
    if loss != "own":
        numbers, exchanges = (4 * total, 2 * passes) if loss == "cross_entropy" else (passes, passes)
        sent["targets"] = (peers * own * target_bytes, 1)
        sent["loss"] = (peers * numbers * max(4, element_bytes), exchanges)
    return {what: Cost(num_bytes, steps if peers else 0) for what, (num_bytes, steps) in sent.items()}


def hybrid_cost(
    trunk_elements: int,
    widths: Sequence[int],
    batch_sizes: Sequence[int],
    element_bytes: int,
    scheme: Literal["a", "b", "c"] = "c",
    loss: HeadLoss = "logistic",
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
        loss: see there.
        rank: see there.
    """
    head = head_traffic(widths, batch_sizes, element_bytes, scheme, loss, rank).values()
    trunk = ring_cost(trunk_elements, element_bytes, len(batch_sizes), rank)
    return Cost(
        trunk.bytes_sent + sum(part.bytes_sent for part in head), trunk.num_steps + sum(part.num_steps for part in head)
    )


def _require_head(
    widths: Sequence[int], batch_sizes: Sequence[int], element_bytes: int, scheme: str, loss: str
) -> None:
    if scheme not in ("a", "b", "c"):
        raise ValueError(f"scheme={scheme!r} is not known; use a, b or c")
    if loss not in ("own", "logistic", "cross_entropy"):
        raise ValueError(f"loss={loss!r} is not known; use own, logistic or cross_entropy")
    if len(widths) < 2 or not batch_sizes or element_bytes < 1 or any(size < 0 for size in (*widths, *batch_sizes)):
        raise ValueError(
            f"widths={widths}, batch_sizes={batch_sizes}, element_bytes={element_bytes}: use two widths or more, a "
            "batch size for each rank, none below 0, and at least 1 byte"
        )
