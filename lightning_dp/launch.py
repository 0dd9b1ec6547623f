"""Start a function in several local processes, as ranks that Lightning, torch.distributed and the user can rely on.

Lightning's own launcher runs ``sys.argv`` again in each process, and leaves its environment variables behind. Under a
configuration framework that is wrong twice: in a sweep every child would start the whole sweep, in folders of its own,
and the second job would take the first one's variables for a cluster's
(https://github.com/Lightning-AI/pytorch-lightning/issues/2727). Here a child gets a function and its arguments, nothing
else; each call has a free port of its own; and the caller's environment is afterwards what it was.

The processes are torch's elastic agent's (what ``torchrun --standalone`` uses), so Lightning sees ranks that were
created externally and starts none itself.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

_HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class LaunchError(RuntimeError):
    """A rank failed; the message is the rank's own.

    Attributes:
        traceback: the rank's traceback, as text; empty where the process died without one.
    """

    def __init__(self, message: str, traceback: str = "") -> None:
        super().__init__(message)
        self.traceback = traceback


def external_rank() -> int | None:
    """The global rank that torchrun or SLURM gave to this process; None if neither started it.

    A SLURM allocation with one task is none: there the processes are ours to start.
    """
    environment = os.environ
    if "TORCHELASTIC_RUN_ID" in environment:
        return int(environment["RANK"])
    interactive = environment.get("SLURM_JOB_NAME") in ("bash", "interactive")
    if int(environment.get("SLURM_NTASKS", 1)) > 1 and not interactive:
        return int(environment["SLURM_PROCID"])
    return None


def launch(function: Callable[..., Any], *args: Any, num_processes: int, num_nodes: int = 1) -> Any:
    """Run ``function(*args)`` as ``num_processes`` local ranks and return rank 0's result.

    Under torchrun or SLURM, where the ranks exist already, and for one process on one node it is called right here, and
    the result is this rank's. Standard output and error stay the caller's own, so rank 0's progress bar is live. The
    environment is afterwards as it was.

    Args:
        function: of a module, not a closure: with ``args`` and the result it is pickled, if processes are started.
            The caller's main module is imported in them, not run.
        args: its positional arguments.
        num_processes: ranks on this node.
        num_nodes: nodes; more than one only under an external launcher.

    Raises:
        ValueError: the ranks that exist are not ``num_processes * num_nodes``, or several nodes without a launcher.
        LaunchError: a rank raised or died; the others have been stopped.
        KeyboardInterrupt: Ctrl-C; every rank has been stopped.
    """
    check_ranks(num_processes, num_nodes)
    if external_rank() is None and num_processes > 1:
        return _start(function, args, num_processes)
    with _environment_kept():
        return function(*args)


def check_ranks(num_processes: int, num_nodes: int = 1) -> None:
    """Raise ValueError if `launch` could not have so many ranks here; see there."""
    if num_processes < 1 or num_nodes < 1:
        raise ValueError(f"num_processes={num_processes} and num_nodes={num_nodes} must be at least 1")
    if external_rank() is not None:
        world_size = int(os.environ["WORLD_SIZE" if "TORCHELASTIC_RUN_ID" in os.environ else "SLURM_NTASKS"])
        if world_size != num_processes * num_nodes:
            raise ValueError(
                f"{world_size} processes were started, for {num_processes} devices on each of {num_nodes} nodes; "
                f"devices times nodes must be {world_size}"
            )
    elif num_nodes > 1:
        raise ValueError(f"num_nodes={num_nodes} needs a launcher on each node, as torchrun --nnodes={num_nodes}")


def _start(function: Callable[..., Any], args: tuple[Any, ...], num_processes: int) -> Any:
    with tempfile.TemporaryDirectory(prefix="launch_") as folder, _environment_kept(), _signals_kept(), _quiet():
        # A rank's share of the cores: without it each would take all of them.
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_processes)))
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_processes,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",  # a free port, found and kept by the agent's own store
            local_addr="localhost",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        try:
            return elastic_launch(config, _run_rank)(folder, function, args)[0]
        except ChildFailedError as error:
            failure = _first_failure(Path(folder), error, num_processes)
        except SignalException as error:
            if error.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise SystemExit(128 + error.sigval) from None
    raise failure


def _run_rank(folder: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """In the child: call the function; only rank 0's result travels back. What it raises is written down first."""
    rank = int(os.environ["RANK"])
    try:
        result = function(*args)
    except BaseException as error:
        report = {
            "time": time.time(),
            "rank": rank,
            "message": f"{type(error).__name__}: {error}",
            "traceback": traceback.format_exc(),
        }
        Path(folder, f"{rank}.json").write_text(json.dumps(report))
        raise SystemExit(1) from None
    return result if rank == 0 else None


def _first_failure(folder: Path, error: ChildFailedError, num_processes: int) -> LaunchError:
    """The failure that came first: the other ranks' are mostly lost connections to that one."""
    rank, failure = error.get_first_failure()
    if failure.exitcode < 0:
        name = failure.signal_name()
        hint = " (often: out of memory)" if name == "SIGKILL" else ""
        return LaunchError(f"rank {rank} of {num_processes} was killed by {name}{hint}")
    reports = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    if not reports:
        return LaunchError(f"rank {rank} of {num_processes} ended with exit code {failure.exitcode} and no message")
    first = min(reports, key=lambda report: report["time"])
    return LaunchError(f"rank {first['rank']} of {num_processes}: {first['message']}", first["traceback"])


@contextmanager
def _environment_kept() -> Iterator[None]:
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)


@contextmanager
def _signals_kept() -> Iterator[None]:
    """The agent installs handlers and leaves them."""
    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in _HANDLED} if main else {}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _quiet() -> Iterator[None]:
    """No banner and no warnings of the agent: the message of what failed is raised instead."""
    logger = logging.getLogger(
        "torch.distributed.elastic"
    )  # its children set levels of their own: a level would not do
    handler, propagate = logging.NullHandler(), logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate
