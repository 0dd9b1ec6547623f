"""Checks of numbers that a GPU computes, without a wait for the GPU in each step."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from lightning_dp.collectives import streams

Check = Callable[[Tensor], None]


class DeferredChecks:
    """Calls checks with numbers on the host: at once for numbers on the CPU, one step later for those on a GPU.

    To read a number from a GPU, the host waits for all kernels that were launched before, and launches none meanwhile.
    One step later the number has long arrived. An error is then raised one step late, after an update with the wrong
    gradients; `finish`, called before a checkpoint and at the end of training, keeps them out of both.
    """

    def __init__(self) -> None:
        self._pending: list[tuple[Tensor, streams.Event, Check]] = []

    def add(self, numbers: Tensor, check: Check) -> None:
        """Call ``check`` with ``numbers`` on the CPU: now, or in `finish` if they are on a GPU."""
        if not streams.has_streams(numbers.device):
            check(numbers)
            return
        on_host = streams.pinned_like(numbers)
        on_host.copy_(numbers, non_blocking=True)
        arrived = streams.record_event(streams.current_stream(numbers.device), blocking=True)
        self._pending.append((on_host, arrived, check))

    def finish(self) -> None:
        """Call the checks that wait, in their order. The first that raises is the last that is called."""
        pending = self._pending
        self._pending = []
        for numbers, arrived, check in pending:
            arrived.synchronize()
            check(numbers)
