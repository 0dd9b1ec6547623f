"""Several ranks for a test: as threads (for collectives and layers) or as processes (for strategies and callbacks).

``run_threads(world_size, function, ...)`` calls ``function(rank, group, ...)`` in one thread per rank, over gloo; it
takes 0.05 s. ``run_processes(world_size, function, ...)`` calls ``function(rank, ...)`` in one process per rank, with
the environment variables that torchrun sets, so that ``Trainer(devices=world_size)`` works in it; it takes 0.05 s, too.
The processes have the environment of the start of the test session, not what the test changed in it, and the test's
warning filters.

Each process is new, so a test may patch classes in it, kill it, or leave threads behind. It is a fork of a server that
has imported already what ranks need, the modules of the tests included. These imports would take most of the time.

Both return the results in rank order. They raise `RankError` with the traceback of each failed rank. No process
outlives the call, and no port is fixed.

The time limits are there to end a test that hangs. They are far longer than any test needs on a busy machine, and the
clock starts when all ranks have entered ``function``. A rank that runs past its limit is reported with its stack.
"""

from __future__ import annotations

import faulthandler
import importlib
import inspect
import logging
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
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

LIMIT_S = 240.0
# After a failure, how long the other ranks may take to report what they saw of it.
GRACE_S = 30.0

# A server process that has imported once what every rank needs. Each rank is a fork of it, without the test's threads.
_context = multiprocessing.get_context("forkserver")

# The name of DDP's option for buffers: from torch 2.13 on, and before.
SYNC_BUFFERS = "forward_sync_buffers"
if SYNC_BUFFERS not in inspect.signature(DistributedDataParallel).parameters:
    SYNC_BUFFERS = "broadcast_buffers"


class RankError(AssertionError):
    """A rank raised, died or did not finish in time."""


@contextmanager
def logged(name: str = "lightning_dp") -> Iterator[list[str]]:
    """Yield what this logger says within the context, for processes in which pytest sees nothing."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(name).addHandler(handler)
    yield said
    logging.getLogger(name).removeHandler(handler)


def start_server() -> None:
    """Start the process of which the ranks are forks: a fork of this one, which has imported the tests.

    With a GPU it is a new interpreter, which has imported no tests: some ask for GPUs when they are imported, and a
    process that has asked cannot have forks that use CUDA.
    """
    if torch.cuda.is_available():
        _context.set_forkserver_preload(["torch", "torchmetrics", "pytorch_lightning", "lightning_dp"])
        forkserver.ensure_running()
        return
    resource_tracker.ensure_running()
    util.spawnv_passfds = _fork_server  # by which Python starts its server
    try:
        forkserver.ensure_running()
    finally:
        util.spawnv_passfds = _spawn


_spawn = util.spawnv_passfds


def _fork_server(path: str, arguments: list[str], descriptors: Iterable[int]) -> int:
    """Do what Python's own function does, with a fork of this process in the place of a new interpreter."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # pytest-xdist has a thread, which the fork does not need
        pid = os.fork()
    if pid:
        return pid
    try:
        # As they were before `start_server`.
        util.spawnv_passfds, forkserver._forkserver._lock = _spawn, threading.Lock()
        # Pipes that this process has open would not end with it otherwise. Their numbers stay taken, because objects
        # that pytest has left here will close them.
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in {int(name) for name in os.listdir("/dev/fd")} - {0, 1, 2, null, *descriptors}:
            os.dup2(null, descriptor)
        # Not those of pytest, which nobody reads here.
        sys.stdout, sys.stderr = (os.fdopen(n, "w", closefd=False) for n in (1, 2))
        sys.unraisablehook, threading.excepthook = sys.__unraisablehook__, threading.__excepthook__
        faulthandler.disable()
        importlib.import_module("tests.first_fit")
        exec(arguments[-1])
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(1)


def thread_group(store: dist.Store, rank: int, world_size: int, timeout: float) -> dist.ProcessGroup:
    """Make a gloo process group for a rank that is a thread. It is not the default group: pass it as ``group``."""
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=timeout)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._threads = 1
    _meet(store, "begun", rank, world_size)  # a short timeout is for the test, not for peers that start late
    backend = dist.ProcessGroupGloo(store, rank, world_size, options)
    # A rank that went on, finished and dropped its group would close connections that its peers are still opening.
    _meet(store, "built", rank, world_size)
    group = dist.ProcessGroup(store, rank, world_size)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    return group


def _meet(store: dist.Store, place: str, rank: int, world_size: int) -> None:
    """Wait until all ranks are at this place."""
    store.set(f"{place} {rank}", "")
    store.wait([f"{place} {peer}" for peer in range(world_size)], timedelta(seconds=LIMIT_S))


def run_threads(world_size: int, function: Callable[..., Any], *args: Any, timeout: float = LIMIT_S) -> list[Any]:
    """Call ``function(rank, group, *args)`` on every rank, one thread each; see the head of this module."""
    store = dist.HashStore()
    results: list[Any] = [None] * world_size
    errors: dict[int, str] = {}
    entered = threading.Semaphore(0)

    def work(rank: int) -> None:
        try:
            group = thread_group(dist.PrefixStore("ranks", store), rank, world_size, LIMIT_S)
            entered.release()
            results[rank] = function(rank, group, *args)
        except BaseException:
            errors[rank] = traceback.format_exc()
            entered.release()

    threads = [
        threading.Thread(target=work, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(world_size)
    ]
    for thread in threads:
        thread.start()
    for _ in threads:
        entered.acquire(timeout=LIMIT_S)
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
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    num_nodes: int = 1,
    timeout: float = LIMIT_S,
    grace: float = GRACE_S,
) -> list[Any]:
    """Call ``function(rank, *args)`` on every rank, one process each; see the head of this module.

    ``function`` is a module-level function; arguments and results are pickled. ``num_nodes`` divides the ranks evenly.
    ``grace`` is the time (s) that the peers of a failed rank get to fail as well, or to finish.
    """
    ends = ends_of_processes(world_size, function, *args, num_nodes=num_nodes, timeout=timeout, grace=grace)
    _raise({rank: error for rank, (error, _) in enumerate(ends) if error})
    return [result for _, result in ends]


def ends_of_processes(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    num_nodes: int = 1,
    timeout: float = LIMIT_S,
    grace: float = GRACE_S,
) -> list[tuple[str | None, Any]]:
    """Call a function on every rank, as `run_processes` does, and return why a rank failed and what it returned.

    For tests in which ranks are meant to die.
    """
    # The parent keeps the store, as torchrun's agent does. Its port was free, and stays taken.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        ranks: list[_Process] = []
        try:
            for rank in range(world_size):
                environment = environment_of_rank(rank, world_size, num_nodes, store.port)
                ranks.append(_Process(rank, environment, folder, function, args))
            _receive(ranks, LIMIT_S, lambda rank: rank.entered or rank.done)
            _receive(ranks, timeout, lambda rank: rank.done)
            if any(rank.error for rank in ranks):
                _receive(ranks, grace, lambda rank: rank.done, stop_at_error=False)
            failed = any(rank.error for rank in ranks)
            for rank in ranks:
                if not rank.done:
                    late = f"not finished after {timeout} s; it stands at\n"
                    rank.error = "stopped after a peer failed" if failed else late + rank.where()
        finally:
            for rank in ranks:
                rank.stop()
    return [(rank.error, rank.result) for rank in ranks]


def run_cases(world_size: int, function: Callable[..., Any], cases: Iterable[str], *args: Any, **options: Any) -> None:
    """Call ``function(rank, case, *args)`` for one case after the other, all in the same processes.

    A case that fails ends its processes; the next one then has new ones. ``options`` are those of `run_processes`.

    Raises:
        RankError: some cases failed. It names each of them, with the errors of its ranks.
    """
    errors: dict[str, str] = {}
    left = list(cases)
    while left:
        try:
            run_processes(world_size, _each, function, left, args, **options)
            break
        except RankError as error:
            # All ranks take the cases in the same order, so the first that is named ends them all.
            begun = [place for place, case in enumerate(left) if _in(case) in str(error)]
            if not begun:
                raise
            errors[left[min(begun)]] = str(error)
            left = left[min(begun) + 1 :]
    if errors:
        raise RankError("\n".join(f"case {case!r}: {text}" for case, text in errors.items()))


def _in(case: str) -> str:
    return f"in the case {case!r}"


def _each(rank: int, function: Callable[..., Any], cases: list[str], args: tuple[Any, ...]) -> None:
    for case in cases:
        try:
            function(rank, case, *args)
        except BaseException as error:
            error.add_note(_in(case))
            raise


def _receive(
    ranks: list[_Process], limit_s: float, arrived: Callable[[_Process], bool], stop_at_error: bool = True
) -> None:
    """Take messages until all ranks have arrived, one has failed, or the time is up."""
    deadline = time.monotonic() + limit_s
    while pending := [rank for rank in ranks if not arrived(rank)]:
        left = deadline - time.monotonic()
        if left <= 0 or (stop_at_error and any(rank.error for rank in ranks)):
            return
        ready = wait([rank.receiver for rank in pending], left)
        for rank in pending:
            if rank.receiver in ready:
                rank.receive()


def _raise(errors: dict[int, str]) -> None:
    if errors:
        raise RankError("\n".join(f"rank {rank}: {text}" for rank, text in sorted(errors.items())))


def environment_of_rank(rank: int, world_size: int, num_nodes: int, port: int) -> dict[str, str]:
    """Return the variables that torchrun would set for this rank."""
    assert world_size % num_nodes == 0
    per_node = world_size // num_nodes
    values = {
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
    return {name: str(value) for name, value in values.items()}


class _Process:
    """One rank's process, seen from the test.

    Attributes:
        entered: the rank has called the test's function.
        done: the rank has returned, raised or died.
        result: what the function returned.
        error: why there is no result.
    """

    def __init__(self, rank: int, environment: dict[str, str], folder: str, function: Any, args: Any) -> None:
        self.rank = rank
        self.entered = self.done = False
        self.result: Any = None
        self.error: str | None = None
        self._output = Path(folder, f"output{rank}")
        self.receiver, sender = _context.Pipe(duplex=False)
        # The filters are the test's own: those of pyproject.toml, the command line and its marks.
        filters = list(warnings.filters)
        self._process = _context.Process(
            target=_work,
            args=(rank, environment, filters, str(self._output), sender, function, args),
            name=f"rank {rank}",
            daemon=True,
        )
        self._process.start()
        sender.close()

    def receive(self) -> None:
        """Take the next of its two messages: that it has entered the function, and how the function ended."""
        try:
            message = pickle.loads(self.receiver.recv_bytes())  # noqa: S301  our own child wrote it
        except EOFError:
            self._process.join()
            self.error, self.done = f"died with exit code {self._process.exitcode}\n{self._read_output()}", True
            return
        if message is None:
            self.entered = True
        else:
            (self.error, self.result), self.done = message, True

    def where(self) -> str:
        """End the process, and return the stack of each of its threads, after what it has printed."""
        os.kill(self._process.pid, signal.SIGABRT)  # the handler of `faulthandler` writes the stacks
        self._process.join()
        return self._read_output()

    def _read_output(self) -> str:
        return self._output.read_text(errors="replace") if self._output.exists() else "(it has printed nothing)"

    def stop(self) -> None:
        """End the process, if it has not ended by itself."""
        if self.error is not None:
            self._process.kill()
        self._process.join(GRACE_S)  # a rank that was successful has only to exit
        if self._process.is_alive():
            self.error = f"returned, and did not exit within {GRACE_S} s"
            self._process.kill()
            self._process.join()
        self._process.close()
        self.receiver.close()


def _work(
    rank: int, environment: dict[str, str], filters: Any, output: str, sender: Any, function: Any, args: Any
) -> None:
    os.environ.update(environment)
    warnings.resetwarnings()
    warnings.filters.extend(filters)  # type: ignore[attr-defined]
    torch.set_num_threads(1)
    with open(output, "w") as file:
        for descriptor in (1, 2):  # else it would print on the terminal of the session, past pytest
            os.dup2(file.fileno(), descriptor)
        faulthandler.enable(file)
        sender.send_bytes(pickle.dumps(None))
        try:
            message = (None, function(rank, *args))
        except BaseException:
            message = (traceback.format_exc(), None)
        if dist.is_initialized():
            dist.destroy_process_group()
        sender.send_bytes(pickle.dumps(message))  # by value: torch's own way hands over files that die with the process
        sender.close()
        faulthandler.disable()
