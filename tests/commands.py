"""Run a command that starts processes of its own, and leave none of them behind."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path


def run_command(
    command: Sequence[str | Path],
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
    limit_s: float = 400.0,
) -> subprocess.CompletedProcess[str]:
    """Run ``command`` and return its status and output.

    ``subprocess.run(timeout=...)`` would end the command alone. The processes that it has started would live on, and
    with ``capture_output`` the caller would wait for them without end.

    Args:
        command: program and arguments.
        cwd: its working folder; None for the present one.
        environment: added to the present environment.
        limit_s: ends a command that hangs. Far longer than any command needs on a busy machine.

    Raises:
        AssertionError: the command ran into ``limit_s``; with its output.
    """
    process = subprocess.Popen(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=limit_s)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        raise AssertionError(f"not finished after {limit_s:g} s: {command}\n{out[-4000:]}\n{err[-4000:]}") from None
    return subprocess.CompletedProcess(command, process.returncode, out, err)
