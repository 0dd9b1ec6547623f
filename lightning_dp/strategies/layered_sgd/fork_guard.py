"""Forked processes start with everything up to date: they have no communicator that they could wait for."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from weakref import WeakSet

log = logging.getLogger(__name__)


class ForkGuard:
    """From its construction to `close`, calls ``bring_up_to_date`` before this process forks (a loader's worker, say).

    Args:
        lock: held during the fork, so that no thread is in the middle of an update then: the child has no such thread,
            and would find the lock taken for ever.
        bring_up_to_date: leaves nothing pending.
    """

    def __init__(self, lock: AbstractContextManager[object], bring_up_to_date: Callable[[], None]) -> None:
        self.lock = lock
        self.bring_up_to_date = bring_up_to_date
        _guards.add(self)

    def close(self) -> None:
        """Stop guarding."""
        _guards.discard(self)


_guards: WeakSet[ForkGuard] = WeakSet()
_locks = ExitStack()


def _before_fork() -> None:
    for guard in list(_guards):
        _locks.enter_context(guard.lock)
        try:
            guard.bring_up_to_date()
        except Exception as error:  # Python would only print it, and fork
            log.warning(f"a process is forked while an update is pending that failed: {error}")


def _after_fork() -> None:
    _locks.close()


if hasattr(os, "register_at_fork"):  # there is no fork on Windows
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
