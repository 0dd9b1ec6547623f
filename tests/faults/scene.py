"""Runs a case on ranks that are processes, and sees that nothing but its checkpoints is left."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from support.emulated_hosts import UNLIMITED, Hosts
from support.faults import (
    CHECKPOINT,
    CHECKPOINTS,
    TEMPORARY,
    WITHOUT_SOCKETS,
    WORLD_SIZE,
    Case,
    End,
    make_folder,
    rank_main,
)

from lightning_dp.strategies.complete_files import existing
from lightning_dp.strategies.krizhevsky_hybrid.checkpoint import is_sharded, load_folder
from tests.ranks import ends_of_processes

# Ends a rank that hangs: far longer than any case takes, and far less than the timeout of its process groups.
HANG_S = 60.0


def run_case(case: Case, folder: Path, resume: bool = False) -> list[End | str]:
    """Return how each rank has ended: its `End`, or how its process died. ``folder`` is made if it does not exist."""
    if not folder.exists():
        make_folder(folder)
    with ExitStack() as stack:
        namespaces: list[str] = []
        if case.fault == "network cut":
            hosts = stack.enter_context(Hosts(WORLD_SIZE, UNLIMITED))
            namespaces = [hosts.namespace(rank) for rank in range(WORLD_SIZE)]
        if case.fault == "disk full":
            stack.enter_context(small_disk(folder / CHECKPOINTS))
        ends = ends_of_processes(WORLD_SIZE, rank_main, case, folder, namespaces, resume, timeout=HANG_S, grace=HANG_S)
        _assert_nothing_is_left(folder)
    return [end if error is None else error for error, end in ends]


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """Make ``folder`` a file system of a megabyte, if this process may; what is in it at the end stays."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    try:
        yield
    finally:
        if mounted.returncode == 0:
            (folder / "ballast").unlink(missing_ok=True)
            with tempfile.TemporaryDirectory() as kept:
                shutil.copytree(folder, kept, dirs_exist_ok=True)
                subprocess.run(["umount", str(folder)], check=True)
                shutil.copytree(kept, folder, dirs_exist_ok=True)


def _assert_nothing_is_left(folder: Path) -> None:
    for path in folder.glob("pid-*"):
        group = int(path.read_text())
        deadline = time.monotonic() + HANG_S
        # A loader's worker sees within seconds that its rank has died, and ends.
        with suppress(ProcessLookupError):
            while time.monotonic() < deadline:
                os.killpg(group, 0)
            os.killpg(group, signal.SIGKILL)
            raise AssertionError(f"{path.name} has left processes behind")
        path.unlink()
    names = os.listdir(folder / TEMPORARY) + os.listdir(folder / TEMPORARY / WITHOUT_SOCKETS)
    left = [name for name in names if not name.startswith("tmp")]  # fsspec's, of a killed DDP
    assert left == [WITHOUT_SOCKETS]


@cache
def unbroken(strategy: str, global_batch_norm: bool) -> list[dict[str, torch.Tensor]]:
    """Return the weights of each rank after a training that nothing disturbs."""
    with tempfile.TemporaryDirectory() as folder:
        ends = run_case(Case("none", "start", strategy, global_batch_norm=global_batch_norm), Path(folder, "case"))
    assert all(isinstance(end, End) and end.error is None for end in ends), ends
    return [end.weights for end in ends if isinstance(end, End)]


def is_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Return whether two state_dicts are bitwise equal."""
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def saved(folder: Path) -> dict[str, Any] | None:
    """Return what the last checkpoint of a case holds, read as a job that continues reads it; None if there is none."""
    path = existing(folder / CHECKPOINTS / CHECKPOINT)
    if not path.exists():
        return None
    return load_folder(path) if is_sharded(path) else torch.load(path, weights_only=True)
