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
    """Return what a rank sends in a step for a sharded head, by kind of message (arXiv 1404.5997, section 4).

    Features go from the rank that has them to all others, and their gradients come back. So do each rank's slices of
    the hidden activations. The schemes send the same bytes at different times. The keys are those of
    ``KrizhevskyHybridStrategy.bytes_sent``; steps are exchanges.

    Args:
        widths: number of features, of each hidden layer's outputs, and of classes.
        batch_sizes: batch size of each rank.
        element_bytes: bytes of an activation.
        scheme: "a", "b" or "c".
        loss: "own": each rank receives the logits of its own samples, without ``head_step``. "logistic" and
            "cross_entropy": the loss within ``head_step``, where logits stay sharded.
        rank: the rank that sends.
        target_bytes: bytes of a sample's target, which all ranks receive for ``head_step``.
    """
    _require_head(widths, batch_sizes, element_bytes, scheme, loss)
    require_rank(rank, len(batch_sizes))
    peers = len(batch_sizes) - 1
    passes = len(sub_passes(scheme, batch_sizes))
    elements = _activations(widths, batch_sizes, passes, loss, rank)
    sent = {what: (count * element_bytes, steps) for what, (count, steps) in elements.items()}
    sent["sizes"] = (peers * 3 * 8, 1)  # batch size, checksum of the shapes, seed
    if loss != "own":
        # Softmax: four numbers per sample in two exchanges. Logistic units: the loss of each pass.
        numbers, exchanges = (4 * sum(batch_sizes), 2 * passes) if loss == "cross_entropy" else (passes, passes)
        sent["targets"] = (peers * batch_sizes[rank] * target_bytes, 1)
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
