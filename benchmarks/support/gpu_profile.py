"""How much of a GPU's communication lies under its computation, from a profile."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

Interval = tuple[float, float]  # begin and end


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of the intervals: disjoint, in order."""
    union: list[Interval] = []
    for begin, end in sorted(intervals):
        if union and begin <= union[-1][1]:
            union[-1] = (union[-1][0], max(end, union[-1][1]))
        else:
            union.append((begin, end))
    return union


def hidden_share(communication: Sequence[Interval], computation: Sequence[Interval]) -> float | None:
    """Return the share of the time of ``communication`` in which ``computation`` runs, too. None: there is none."""
    sending, computing = merged(communication), merged(computation)
    total = sum(end - begin for begin, end in sending)
    both = sum(
        max(0.0, min(end, other_end) - max(begin, other_begin))
        for begin, end in sending
        for other_begin, other_end in computing
    )
    return both / total if total else None


def is_communication(name: str) -> bool:
    """Return whether a CUDA activity of this name moves gradients: to the host and back, or between GPUs."""
    return name.startswith(("Memcpy DtoH", "Memcpy HtoD")) or name.startswith("nccl")


def is_computation(name: str) -> bool:
    """Return whether a CUDA activity of this name computes."""
    return not name.startswith(("Memcpy", "Memset", "nccl"))


def cuda_activities(profile: Any) -> list[tuple[str, Interval]]:
    """Return name and microseconds of what ran on the GPU in a finished ``torch.profiler.profile``."""
    found = []
    for event in profile.events():
        if "CUDA" in str(event.device_type):
            found.append((event.name, (event.time_range.start, event.time_range.end)))
    return found


def summarize(activities: Sequence[tuple[str, Interval]]) -> dict[str, Any]:
    """Return the share of communication that is hidden, and the milliseconds of both kinds."""
    sending = [interval for name, interval in activities if is_communication(name)]
    computing = [interval for name, interval in activities if is_computation(name)]
    return {
        "hidden_share": hidden_share(sending, computing),
        "communication_ms": sum(end - begin for begin, end in merged(sending)) / 1e3,
        "computation_ms": sum(end - begin for begin, end in merged(computing)) / 1e3,
        "num_copies": len(sending),
    }
