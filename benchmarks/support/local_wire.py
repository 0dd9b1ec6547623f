"""Several carriers of compressed gradients in one process, as threads: for simulations, without a process group."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from torch import Tensor
from typing_extensions import override

from lightning_dp.collectives.compression.wire import Transport
from lightning_dp.collectives.point_to_point import Transfer

Result = TypeVar("Result")


class _Board:
    """Messages by number, sender and receiver, until they are fetched."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._messages: dict[tuple[int, int, int], Tensor] = {}
        self._failed = False

    def put(self, key: tuple[int, int, int], message: Tensor) -> None:
        with self._changed:
            self._messages[key] = message
            self._changed.notify_all()

    def fetch(self, key: tuple[int, int, int]) -> Tensor:
        with self._changed:
            self._changed.wait_for(lambda: key in self._messages or self._failed)
            if self._failed:
                raise RuntimeError("another rank has failed")
            return self._messages.pop(key)

    def fail(self) -> None:
        with self._changed:
            self._failed = True
            self._changed.notify_all()


class LocalWire(Transport):
    """The messages of one of several threads to the others; see `local_wires`."""

    def __init__(self, rank: int, num_ranks: int, board: _Board) -> None:
        # Not that of `Transport`: there is no process group.
        self.rank = rank
        self.num_ranks = num_ranks
        self.bytes_sent = 0
        self.board = board
        self._num_started = 0

    @override
    def start(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> list[Transfer]:
        number = self._num_started
        self._num_started += 1
        incoming[self.rank].copy_(outgoing[self.rank])
        peers = [rank for rank in range(self.num_ranks) if rank != self.rank]
        for peer in peers:
            self.board.put((number, self.rank, peer), outgoing[peer].clone())
        self.bytes_sent += sum(outgoing[peer].nbytes for peer in peers)
        return [_LocalTransfer(self.board, (number, peer, self.rank), incoming[peer]) for peer in peers]


class _LocalTransfer(Transfer):
    def __init__(self, board: _Board, key: tuple[int, int, int], place: Tensor) -> None:
        # Not that of `Transfer`: there is no process group.
        self._board = board
        self._key = key
        self._place = place

    @override
    def wait(self) -> None:
        self._place.copy_(self._board.fetch(self._key))


def local_wires(num_ranks: int) -> list[LocalWire]:
    """Return the wire of each rank. Each rank must be a thread of its own; see `run_ranks`."""
    board = _Board()
    return [LocalWire(rank, num_ranks, board) for rank in range(num_ranks)]


def run_ranks(wires: Sequence[LocalWire], function: Callable[[LocalWire], Result]) -> list[Result]:
    """Call ``function`` with each wire, each in a thread of its own; return the results in rank order."""

    def run(wire: LocalWire) -> Result:
        try:
            return function(wire)
        except BaseException:
            wire.board.fail()  # the others would wait for this rank
            raise

    with ThreadPoolExecutor(len(wires)) as pool:
        return list(pool.map(run, wires))
