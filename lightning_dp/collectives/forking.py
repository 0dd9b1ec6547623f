"""Forked processes, such as a loader's workers, must not free process groups: they lack the threads to wait for.

The destructor of a gloo group joins the group's threads. A forked process has a copy of the group and none of its
threads, so that the destructor never returns. Python runs it there if the group is garbage in a reference cycle when
the process forks (the strategy of an earlier Trainer, say), and the child's garbage collector finds it.
"""

from __future__ import annotations

import gc
import os

_was_enabled: list[bool] = []  # of the garbage collector, for the fork in progress


def _before_fork() -> None:
    _was_enabled.append(gc.isenabled())
    gc.disable()  # a collection in the child before `_after_fork_in_child` would be too early


def _after_fork_in_parent() -> None:
    if _was_enabled.pop():
        gc.enable()


def _after_fork_in_child() -> None:
    gc.freeze()  # what the child has inherited is not collected there any more; it ends with the process
    _after_fork_in_parent()


if hasattr(os, "register_at_fork"):  # there is no fork on Windows
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
