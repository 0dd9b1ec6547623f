"""What the hybrid's ranks do in a step, from their own clocks: the waits taken apart, and the share that is hidden."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from support.interception import FEATURES
from support.spread import Spread, min_max
from support.timeline import Segment, Stage, draw_timeline, gaps

WITHIN = ("hidden activations", "hidden gradients", "loss")  # exchanges of a pass
FOR_BYTES = "wait for bytes"
FOR_RANKS = "wait for a rank that computes"
OTHER = "everything else"
COLORS = {
    "trunk forward": "#4c9ed9",
    "trunk backward": "#1f5c99",
    "head": "#8cc084",
    OTHER: "#c9b3e6",
    FOR_RANKS: "#f4a6a0",
    FOR_BYTES: "#d62728",
    "features": "#e07b39",
    "feature gradients": "#e8c547",
    "exchange within the head": "#8c8c8c",
}
# Of a rank, from top to bottom.
ROWS = ("", ", features", ", within the head")


@dataclass(frozen=True)
class Waits:
    """Seconds that all ranks together waited in one step for features and their gradients."""

    for_bytes_s: float
    for_ranks_s: float


def split_waits(ranks: Sequence[Sequence[Stage]], names: Sequence[str]) -> list[list[Stage]]:
    """Return each rank's waits for exchanges of these names, in parts named `FOR_RANKS` and `FOR_BYTES`.

    A wait is for bytes from when the last rank has started the exchange: before, it is for a rank that still computes,
    and no faster link would shorten it.

    Args:
        ranks: the stages of one step, of each rank.
        names: of the exchanges. The n-th exchange of a name is the same one on all ranks.
    """
    parts: list[list[Stage]] = [[] for _ in ranks]
    for name in names:
        starts = [[begin for what, begin, _ in stages if what == name] for stages in ranks]
        waits = [[(begin, end) for what, begin, end in stages if what == f"wait for {name}"] for stages in ranks]
        for exchange, start_of_ranks in enumerate(zip(*starts, strict=True)):
            all_started = max(start_of_ranks)
            for rank, of_rank in enumerate(waits):
                begin, end = of_rank[exchange]
                if begin < all_started:
                    parts[rank].append((FOR_RANKS, begin, min(end, all_started)))
                if end > all_started:
                    parts[rank].append((FOR_BYTES, max(begin, all_started), end))
    return parts


def feature_waits(ranks: Sequence[Sequence[Stage]]) -> Waits:
    """Return how long the ranks waited for features and their gradients in one step."""
    parts = [part for of_rank in split_waits(ranks, FEATURES) for part in of_rank]
    seconds = {kind: sum(end - begin for name, begin, end in parts if name == kind) for kind in (FOR_BYTES, FOR_RANKS)}
    return Waits(seconds[FOR_BYTES], seconds[FOR_RANKS])


def hidden_share(overlapped: Sequence[Waits], alone: Sequence[Waits]) -> Spread:
    """Return the share of the feature traffic's time that is hidden: over all steps, with minimum and maximum of pairs.

    Args:
        overlapped: steps as they are.
        alone: the steps next to them, in which each exchange is waited for at once, so that none is hidden.
    """
    pairs = zip(overlapped, alone, strict=True)
    of_pairs = min_max(1 - exposed.for_bytes_s / taken.for_bytes_s for exposed, taken in pairs)
    whole = 1 - sum(step.for_bytes_s for step in overlapped) / sum(step.for_bytes_s for step in alone)
    return Spread(whole, of_pairs.low, of_pairs.high)


def draw_step(ranks: Sequence[Sequence[Stage]], path: Path, title: str) -> None:
    """Draw one step of all ranks, three rows a rank; see `ROWS`."""
    first = min(begin for stages in ranks for _, begin, _ in stages)
    last = max(end for stages in ranks for _, _, end in stages)
    waits = split_waits(ranks, [name for name in (*FEATURES, *WITHIN) if _has(ranks, name)])
    segments: list[Segment] = []
    for rank, stages in enumerate(ranks):
        computing = [stage for stage in stages if stage[0] in ("trunk forward", "trunk backward", "head")]
        covered = [*computing, *waits[rank]]
        idle = [(OTHER, begin, end) for begin, end in gaps(covered, first, last)]
        # Waits come last: they are drawn over the head's computation, which they interrupt.
        for name, begin, end in (*idle, *covered):
            segments.append((3 * rank, name, begin - first, end - first))
        for name, begin, end in stages:
            if name in FEATURES:
                segments.append((3 * rank + 1, name, begin - first, end - first))
            elif name in WITHIN:
                segments.append((3 * rank + 2, "exchange within the head", begin - first, end - first))
    rows = [f"rank {rank}{row}" for rank in range(len(ranks)) for row in ROWS]
    draw_timeline(segments, rows, COLORS, path, title=title, background="nothing on its way", end_s=last - first)


def _has(ranks: Sequence[Sequence[Stage]], name: str) -> bool:
    return any(stage[0] == name for stage in ranks[0])
