"""Several ranks for a test: as threads (for collectives and layers) or as processes (for strategies and callbacks).

``run_threads(world_size, function, ...)`` calls ``function(rank, group, ...)`` in a thread a rank, over gloo; it takes
0.05 s. ``run_processes(world_size, function, ...)`` calls ``function(rank, ...)`` in a process a rank, with the
environment that torchrun gives, so that ``Trainer(devices=world_size)`` works in it; about 0.5 s. The processes have
the environment of the test session's start, not what the test changed in it.

Both return the results in rank order, and raise `RankError` with each failed rank's traceback, or, past ``timeout``,
with the place where each rank stands. No process outlives the call, and no port is fixed.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# A server that has imported torch and Lightning once: each rank is a fork of it, clean of the test's own threads.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torchmetrics", "pytorch_lightning"])


class RankError(AssertionError):
    """A rank raised, died or did not finish in time."""


def thread_group(store: dist.Store, rank: int, world_size: int, timeout: float) -> dist.ProcessGroup:
    """A gloo process group for a rank that is a thread. It is not the default group: pass it as ``group``."""
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=timeout)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._threads = 1
    backend = dist.ProcessGroupGloo(store, rank, world_size, options)
    group = dist.ProcessGroup(store, rank, world_size)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    return group


def run_threads(world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 30.0) -> list[Any]:
    """Call ``function(rank, group, *args)`` on every rank, a thread each; see the head of this module."""
    store = dist.HashStore()
    results: list[Any] = [None] * world_size
    errors: dict[int, str] = {}

    def work(rank: int) -> None:
        try:
            group = thread_group(dist.PrefixStore("ranks", store), rank, world_size, timeout)
            results[rank] = function(rank, group, *args)
        except BaseException:
            errors[rank] = traceback.format_exc()

    threads = [
        threading.Thread(target=work, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(world_size)
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    frames = sys._current_frames()
    for rank, thread in enumerate(threads):
        if thread.is_alive():
            stack = "".join(traceback.format_stack(frames[thread.ident]))
            errors[rank] = f"not finished after {timeout} s; it stands at\n{stack}"
    _raise(errors)
    return results


def run_processes(
    world_size: int, function: Callable[..., Any], *args: Any, num_nodes: int = 1, timeout: float = 60.0
) -> list[Any]:
    """Call ``function(rank, *args)`` on every rank, a process each; see the head of this module.

    ``function`` is a module-level function; arguments and results are pickled. ``num_nodes`` divides the ranks evenly.
    """
    # The parent keeps the store (as torchrun's agent does), so that its port is found free and stays ours.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            _Process(rank, world_size, num_nodes, store.port, timeout, folder, function, args)
            for rank in range(world_size)
        ]
        try:
            deadline = time.monotonic() + timeout
            pending = list(ranks)
            while pending and (left := deadline - time.monotonic()) > 0 and not any(r.error for r in ranks):
                ready = wait([r.receiver for r in pending], left)
                for rank in [r for r in pending if r.receiver in ready]:
                    rank.receive()
                    pending.remove(rank)
            # The peers of a failed rank have a moment to say what they saw, and are stopped then.
            for rank in [r for r in pending if r.receiver in wait([r.receiver for r in pending], 2.0)]:
                rank.receive()
                pending.remove(rank)
            failed = any(r.error for r in ranks)
            for rank in pending:
                late = f"not finished after {timeout} s; it stands at\n"
                rank.error = "stopped after a peer failed" if failed else late + rank.where()
        finally:
            for rank in ranks:
                rank.stop()
    _raise({r.rank: r.error for r in ranks if r.error})
    return [r.result for r in ranks]


def _raise(errors: dict[int, str]) -> None:
    if errors:
        raise RankError("\n".join(f"rank {rank}: {text}" for rank, text in sorted(errors.items())))


class _Process:
    """One rank's process, seen from the test."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        num_nodes: int,
        port: int,
        timeout: float,
        folder: str,
        function: Any,
        args: Any,
    ) -> None:
        assert world_size % num_nodes == 0
        per_node = world_size // num_nodes
        environment = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "RANK": rank,
            "WORLD_SIZE": world_size,
            "LOCAL_RANK": rank % per_node,
            "LOCAL_WORLD_SIZE": per_node,
            "GROUP_RANK": rank // per_node,
            "TORCHELASTIC_RUN_ID": "test",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": 1,
        }
        self.rank = rank
        self.result: Any = None
        self.error: str | None = None
        self._stack = Path(folder, f"stack{rank}")
        self.receiver, sender = _context.Pipe(duplex=False)
        self._process = _context.Process(
            target=_work,
            args=(rank, {k: str(v) for k, v in environment.items()}, str(self._stack), timeout, sender, function, args),
            name=f"rank {rank}",
            daemon=True,
        )
        self._process.start()
        sender.close()

    def receive(self) -> None:
        try:
            self.error, self.result = pickle.loads(self.receiver.recv_bytes())  # noqa: S301  our own child wrote it
        except EOFError:
            self._process.join(5.0)
            self.error = f"died with exit code {self._process.exitcode}"

    def where(self) -> str:
        """The stack of each of its threads."""
        os.kill(self._process.pid, _STACK_SIGNAL)
        self._process.join(0.5)  # the handler writes and the process goes on; this gives it the time to
        return self._stack.read_text() if self._stack.exists() else "(unknown)"

    def stop(self) -> None:
        self._process.join(10.0 if self.error is None else 0.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()
        self.receiver.close()


_STACK_SIGNAL = signal.SIGUSR1


def _work(
    rank: int, environment: dict[str, str], stack: str, timeout: float, sender: Any, function: Any, args: Any
) -> None:
    os.environ.update(environment)
    warnings.simplefilter("error")
    # Lightning's own use of a function that torch has deprecated.
    warnings.filterwarnings("ignore", r".*isinstance\(treespec, LeafSpec\)", FutureWarning)
    torch.set_num_threads(1)
    with open(stack, "w") as file:
        faulthandler.register(_STACK_SIGNAL, file=file)
        try:
            message = (None, function(rank, *args))
        except BaseException:
            message = (traceback.format_exc(), None)
        if dist.is_initialized():
            dist.destroy_process_group()
        sender.send_bytes(pickle.dumps(message))  # by value: torch's own way hands over files that die with the process
        sender.close()
