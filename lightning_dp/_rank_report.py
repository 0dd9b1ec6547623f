"""What a rank that fails leaves for the process that started it: its message, and whether another died before it.

The processes of one `launch` share a folder. A rank that raises an error writes ``RANK.json``. A rank that is killed
writes nothing, and the others then fail with lost connections. To tell these apart, each rank holds a lock on
``RANK.alive`` while it runs. The kernel releases the lock when the process dies, in whatever way.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# The agent sees within a fraction of a second that a process has died. A rank that waits for this does not wait longer.
AGENT_LIMIT_S = 30.0


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


def run_and_report(folder: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Call ``function(*args)`` in the process of a rank. Return its result on rank 0, and None on the others.

    Raises:
        SystemExit: the function raised an error, which is now in the rank's report.
    """
    rank = int(os.environ["RANK"])
    alive = Path(folder, f"{rank}.alive")
    with _locked(alive):
        try:
            result = function(*args)
        except BaseException as error:
            died = dead_ranks(Path(folder), but=rank)
            message = f"{type(error).__name__}: {error}"
            report = RankReport(rank, time.time(), message, traceback.format_exc(), bool(died))
            _write(Path(folder, f"{rank}.json"), json.dumps(asdict(report)))
            if died:
                # The agent reports the rank whose exit it sees first. Let it see the one that died. It then ends this
                # process with SIGTERM, which must not go to a handler that the function has left.
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                time.sleep(AGENT_LIMIT_S)
            raise SystemExit(1) from None
        alive.unlink()
    return result if rank == 0 else None


def first_report(folder: Path) -> RankReport | None:
    """Return the first report that is no consequence of a death without a report, or None if there is none."""
    reports = [RankReport(**json.loads(path.read_text())) for path in folder.glob("*.json")]
    causes = [report for report in reports if not report.follows_death]
    return min(causes, key=lambda report: report.time_s, default=None)


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
