"""Start a function in several local processes, as ranks that Lightning and torch.distributed accept.

Lightning's own launcher runs ``sys.argv`` again in each process and leaves its environment variables behind. Under a
configuration framework both are wrong. In a sweep, every child would start the whole sweep, in folders of its own. The
second job would take the variables of the first for those of a cluster
(https://github.com/Lightning-AI/pytorch-lightning/issues/2727). Here a child gets a function and its arguments, and
nothing else. Each call has a free port of its own, and restores the caller's environment.

The processes are started by torch's elastic agent, as ``torchrun --standalone`` does. Lightning therefore takes them
for ranks that were created externally, and starts none itself.

A rank that fails makes the others fail, with lost connections, and the error must name the first. So the processes of a
`launch` share a folder. A rank that raises an error writes ``RANK.json`` there. A rank that is killed writes nothing.
To find it, each rank holds a lock on ``RANK.alive`` while it runs. The kernel releases the lock when the process dies,
in whatever way.
"""

from __future__ import annotations

import ctypes
import fcntl
import io
import json
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from typing_extensions import override

OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
_HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)

# The agent sees within a fraction of a second that a process has died. A rank that waits for this does not wait longer.
AGENT_LIMIT_S = 30.0

LOST_CONNECTION = ("Connection closed by peer", "Connection reset by peer")  # gloo's words


class LaunchError(RuntimeError):
    """A rank failed. The message is the rank's own.

    Attributes:
        traceback: the rank's traceback, as text. Empty if the process died without one.
    """

    def __init__(self, message: str, traceback: str = "") -> None:
        super().__init__(message)
        self.traceback = traceback


def is_job_of_slurm() -> bool:
    """Return whether this process is in a batch job of SLURM, which may queue it again with the same command."""
    return "SLURM_JOB_ID" in os.environ and not _is_interactive()


def _is_interactive() -> bool:
    return os.environ.get("SLURM_JOB_NAME") in ("bash", "interactive")


def external_rank() -> int | None:
    """Return the global rank that torchrun or SLURM gave to this process, or None if neither started it.

    A SLURM job with a single task returns None: its processes are still to be started, by `launch`.

    Raises:
        ValueError: the environment is that of such a launcher, as in a shell of ``salloc``, but it did not start this.
    """
    environment = os.environ
    if "TORCHELASTIC_RUN_ID" in environment:
        launcher, sign, name = "torchrun", "TORCHELASTIC_RUN_ID", "RANK"
    elif int(environment.get("SLURM_NTASKS", 1)) > 1 and not _is_interactive():
        launcher, sign, name = "srun", "SLURM_NTASKS", "SLURM_PROCID"
    else:
        return None
    if name not in environment:
        raise ValueError(
            f"{sign}={environment[sign]} is in the environment without {name}, so {launcher} has not started this "
            f"process; start it with {launcher}, or take the variable away: env -u {sign} ..."
        )
    return int(environment[name])


def launch(function: Callable[..., Any], *args: Any, num_processes: int, num_nodes: int = 1) -> Any:
    """Run ``function(*args)`` as ``num_processes`` local ranks and return the result of rank 0.

    The function is called in this process, and its result returned, if the ranks exist already (under torchrun or
    SLURM), or if there is one process on one node. Standard output and error stay those of the caller, so the progress
    bar of rank 0 is live. The caller's environment variables are restored at the end.

    Args:
        function: a function of a module, not a closure. It, ``args`` and the result are pickled if processes are
            started. The children import the caller's main module and do not run it.
        args: its positional arguments. Each process that is started has copies of its own, also of parameters.
        num_processes: ranks on this node.
        num_nodes: number of nodes. More than one needs an external launcher.

    Raises:
        ValueError: the number of existing ranks is not ``num_processes * num_nodes``, or there are several nodes and no
            launcher.
        LaunchError: a rank raised an error or died. The other ranks have been stopped.
        KeyboardInterrupt: Ctrl-C. Every rank has been stopped.
    """
    check_ranks(num_processes, num_nodes)
    if external_rank() is None and num_processes > 1:
        return _start(function, args, num_processes)
    with environment_restored():
        if external_rank() is None:
            for name in OF_A_RANK:  # left by another launcher, Lightning would take them for this process's
                os.environ.pop(name, None)
        return function(*args)


def check_ranks(num_processes: int, num_nodes: int = 1) -> None:
    """Raise ValueError if `launch` cannot run with this number of ranks."""
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
        raise ValueError(
            f"num_nodes={num_nodes} needs a launcher on each node, for example torchrun --nnodes={num_nodes}"
        )


def _start(function: Callable[..., Any], args: tuple[Any, ...], num_processes: int) -> Any:
    with tempfile.TemporaryDirectory(prefix="launch_") as folder, environment_restored(), _agent_undone():
        # Each rank gets its share of the cores. By default it would start as many threads as there are cores.
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_processes)))
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_processes,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            # The agent's own store finds a free port and keeps it.
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        try:
            return elastic_launch(config, _run)(folder, _OfEachRank((function, args)))[0]
        except ChildFailedError as error:
            failure = _launch_error(Path(folder), error, num_processes)
        except SignalException as error:
            if error.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise SystemExit(128 + error.sigval) from None
    raise failure


def _launch_error(folder: Path, error: ChildFailedError, num_processes: int) -> LaunchError:
    """Return the error of the rank that failed first. The errors of the others are mostly lost connections to it.

    The agent stops all ranks when it sees that one has exited, and it reports that rank alone. This need not be the one
    that failed first: gloo aborts a rank that waits for one that has raised an error. So a report comes before what the
    agent saw.
    """
    report = first_report(folder)
    if report is not None:
        return LaunchError(f"rank {report.rank} of {num_processes}: {report.message}", report.traceback)
    rank, failure = error.get_first_failure()
    if failure.exitcode < 0:
        name = failure.signal_name()
        hint = " (often: out of memory)" if name == "SIGKILL" else ""
        return LaunchError(f"rank {rank} of {num_processes} was killed by {name}{hint}")
    if (folder / f"{rank}.json").exists() and (dead := dead_ranks(folder, but=rank)):
        # Its report says that it follows a death, of which the agent has seen nothing: the status was that of success.
        return LaunchError(f"rank {dead[0]} of {num_processes} ended before its function returned, as by os._exit(0)")
    return LaunchError(f"rank {rank} of {num_processes} ended with exit code {failure.exitcode} and no message")


def _run(folder: str, call: tuple[Callable[..., Any], tuple[Any, ...]]) -> Any:
    _die_with_parent()
    # Let this process start others as the platform does. It has the method by which it was started itself: workers of
    # its loaders would be new interpreters, which import torch in each epoch and take no lambda.
    multiprocessing.set_start_method(None, force=True)
    return run_and_report(folder, *call)


def _die_with_parent() -> None:
    """Let the kernel kill this process when the one that has started it dies, as by kill -9.

    torch lets it send SIGINT, which Python does not see while this process connects or waits in C++. It could then
    write to the folder of a run that is started again meanwhile.
    """
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
        # It may have died before, while this process imported torch. The kernel says nothing of that any more.
        parent = multiprocessing.parent_process()
        if parent is not None and not parent.is_alive():
            os.kill(os.getpid(), signal.SIGKILL)


class _OfEachRank:
    """An object that arrives in each rank as a copy of its content."""

    def __init__(self, content: Any) -> None:
        self._content = content

    @override
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[bytes]]:
        return ForkingPickler.loads, (bytes(_CopyingPickler.dumps(self._content)),)


class _CopyingPickler(ForkingPickler):
    """Gives tensors memory of their own where they are loaded.

    torch's pickler gives all ranks the same memory: the optimizers of all would update one model. Quantized tensors,
    which nobody trains, stay shared: their `.data` cannot be cloned.
    """

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.is_quantized:
            return NotImplemented
        reduce = self.dispatch_table.get(type(value))
        return NotImplemented if reduce is None else (_load_copy, reduce(value)[:2])


def _load_copy(load: Callable[..., torch.Tensor], arguments: tuple[Any, ...]) -> torch.Tensor:
    tensor = load(*arguments)
    tensor.data = tensor.data.clone()
    return tensor


@contextmanager
def environment_restored() -> Iterator[None]:
    """Give the environment variables of this process their present values afterwards."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)


@contextmanager
def _agent_undone() -> Iterator[None]:
    """Silence the agent, choose a start method that children know, and undo afterwards what both change."""
    with ExitStack() as undo:
        # The agent installs signal handlers and leaves them. Python allows that in the main thread only.
        if threading.current_thread() is threading.main_thread():
            for number in _HANDLED:
                undo.callback(signal.signal, number, signal.getsignal(number))
        # A child sets the start method of its parent as its own. In a worker of joblib that is "loky", which a child
        # that has not imported joblib does not know: it would fail before it can say why.
        start_method = multiprocessing.get_start_method(allow_none=True)
        if start_method not in (None, "fork", "spawn", "forkserver"):
            multiprocessing.set_start_method("spawn", force=True)
            undo.callback(multiprocessing.set_start_method, start_method, force=True)
        # Drop the agent's banner and warnings: the message of the rank that failed is raised instead. The agent's
        # loggers are children of this one and set levels of their own, so a level here would have no effect.
        logger = logging.getLogger("torch.distributed.elastic")
        handler = logging.NullHandler()
        logger.addHandler(handler)
        undo.callback(logger.removeHandler, handler)
        undo.callback(setattr, logger, "propagate", logger.propagate)
        logger.propagate = False
        yield


# --- what a rank that fails leaves for the process that started it ---


@dataclass(frozen=True)
class RankReport:
    """How a rank failed.

    Attributes:
        rank: global rank.
        time_s: when it failed, in seconds since the epoch.
        message: type and text of its error.
        traceback: its traceback, as text.
        follows_death: another rank had died without a report, so this error is a consequence.
    """

    rank: int
    time_s: float
    message: str
    traceback: str
    follows_death: bool


class _Probe(ForkingPickler):
    """Finds what cannot be sent, as the agent will send it, where an error would have no message. Tensors stay here."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        if value.requires_grad and not value.is_leaf:
            raise RuntimeError("a tensor that is part of a graph cannot be sent to another process; return x.detach()")
        return int, ()


def run_and_report(folder: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Call ``function(*args)`` in the process of a rank. Return its result on rank 0, and None on the others.

    Raises:
        SystemExit: the function raised an error, which is now in the rank's report.
    """
    rank = int(os.environ["RANK"])
    alive = Path(folder, f"{rank}.alive")
    with _locked(alive), _noting_sigterm() as sigterm_has_come:
        try:
            result = function(*args)
            if rank == 0:
                _Probe(io.BytesIO()).dump(result)
        except BaseException as error:
            died = dead_ranks(Path(folder), but=rank)
            message = f"{type(error).__name__}: {error}"
            report = RankReport(rank, time.time(), message, traceback.format_exc(), bool(died))
            _write(Path(folder, f"{rank}.json"), json.dumps(asdict(report)))
            if died:
                # The agent reports the rank whose exit it sees first. Let it see the one that died. It then ends this
                # process with SIGTERM, which must not go to a handler that the function has left.
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                if not sigterm_has_come():
                    time.sleep(AGENT_LIMIT_S)
            raise SystemExit(1) from None
        alive.unlink()
    return result if rank == 0 else None


@contextmanager
def _noting_sigterm() -> Iterator[Callable[[], bool]]:
    """Give a function that says whether SIGTERM has come, also where a handler of Lightning's has taken it."""
    reader, writer = os.pipe()
    for end in (reader, writer):
        os.set_blocking(end, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)  # Python writes the number of each signal to it
    os.register_at_fork(after_in_child=partial(signal.set_wakeup_fd, -1))  # what comes to a forked process is not ours

    def has_come() -> bool:
        with suppress(BlockingIOError):  # none
            return signal.SIGTERM in os.read(reader, 1 << 16)
        return False

    try:
        yield has_come
    finally:
        signal.set_wakeup_fd(before)
        os.close(reader)
        os.close(writer)


def first_report(folder: Path) -> RankReport | None:
    """Return the first report that is no consequence of a death without a report, or None if there is none.

    A rank that raises an error closes its connections before it reports. So a lost connection may be reported first.
    """
    reports = [RankReport(**json.loads(path.read_text())) for path in folder.glob("*.json")]
    causes = [report for report in reports if not report.follows_death]

    def place(report: RankReport) -> tuple[bool, float]:
        return any(words in report.message for words in LOST_CONNECTION), report.time_s

    return min(causes, key=place, default=None)


def dead_ranks(folder: Path, but: int) -> list[int]:
    """Return the ranks, except ``but``, whose processes have died without a report and without finishing."""
    others = [path for path in folder.glob("*.alive") if path.stem != str(but)]
    return [int(path.stem) for path in others if not path.with_suffix(".json").exists() and not _is_locked(path)]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Create a file and hold a lock on it, at most until this process dies."""
    with open(path.with_suffix(".starting"), "w") as file:
        # Forked processes do not inherit this kind of lock: loader workers that survive their rank do not hold it.
        fcntl.lockf(file, fcntl.LOCK_EX)
        # The file gets its name when it is locked, so that no rank sees it without the lock.
        os.replace(file.name, path)
        yield


def _is_locked(path: Path) -> bool:
    try:
        with open(path) as file:
            # A shared lock, so that several ranks can ask at the same time.
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:  # the rank holds it, or has just finished and removed the file
        return True
    return False


def _write(path: Path, text: str) -> None:
    """Write a file that is never seen in part: the agent may stop this process while it writes."""
    part = path.with_suffix(".part")
    part.write_text(text)
    os.replace(part, path)
