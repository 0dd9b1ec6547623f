"""Records every collective of a process, also those that DDP issues in C++; and checks the order of several ranks'.

`register` makes a backend ``"recorded"``: gloo behind a process group that writes down what passes.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tests.ranks import thread_group

COLLECTIVES = (
    *("allreduce", "broadcast", "reduce", "allgather", "gather", "scatter", "barrier", "alltoall"),
    *("reduce_scatter_single", "all_gather_single", "allreduce_coalesced", "allgather_coalesced", "send", "recv"),
)


class Call(NamedTuple):
    """One collective, as one rank has issued it."""

    group: tuple[int, ...]
    operation: str
    numel: int
    thread: int


calls: list[Call] = []


class RecordingGroup(dist.ProcessGroup):
    """A process group whose ranks are known, in front of gloo's."""

    def __init__(self, store: dist.Store, rank: int, ranks: Sequence[int], timeout: timedelta) -> None:
        super().__init__(rank, len(ranks))
        self.ranks = tuple(ranks)
        self.gloo = thread_group(store, rank, len(ranks), timeout.total_seconds())

    def getBackendName(self) -> str:
        return "recorded"


def _recorded(name: str) -> Any:
    def call(self: RecordingGroup, *args: Any) -> Any:
        calls.append(Call(self.ranks, name, _numel(args), threading.get_ident()))
        return getattr(self.gloo, name)(*args)

    return call


def _numel(args: Any) -> int:
    if isinstance(args, torch.Tensor):
        return args.numel()
    return sum(map(_numel, args)) if isinstance(args, (list, tuple)) else 0


for _name in COLLECTIVES:
    setattr(RecordingGroup, _name, _recorded(_name))


def register() -> None:
    """Let ``dist.init_process_group("recorded")`` work in this process."""

    def create(options: Any, _: Any) -> RecordingGroup:
        ranks = options.global_ranks_in_group or range(options.group_size)
        return RecordingGroup(options.store, options.group_rank, ranks, options.timeout)

    dist.Backend.register_backend("recorded", create, extended_api=True, devices=["cpu"])


def check_order(ranks: Sequence[Sequence[Call]]) -> None:
    """Raise AssertionError unless all ranks' calls fit into one order.

    Each rank's next call is a collective that it waits in. If no collective has all its members, they wait for ever.
    """
    place = [0] * len(ranks)
    while True:
        waiting = [calls[position] if position < len(calls) else None for calls, position in zip(ranks, place)]  # noqa: B905
        if not any(waiting):
            return
        # A collective runs if all its members are at it.
        at = Counter(call[:3] for call in waiting if call is not None)
        able = {call for call, count in at.items() if count == len(call[0])}
        assert able, f"the ranks wait for each other: {waiting}, after {place} calls"
        for rank, call in enumerate(waiting):
            if call is not None and call[:3] in able and rank in call.group:
                place[rank] += 1


def check_threads(ranks: Sequence[Sequence[Call]]) -> None:
    """Raise AssertionError if a process has issued collectives from more than one thread."""
    for rank, issued in enumerate(ranks):
        threads = {call.thread for call in issued}
        assert len(threads) == 1, f"rank {rank} has issued collectives from {len(threads)} threads"
