"""The recipes' side of Hydra: which process writes a folder, and errors that fit on a few lines."""

from __future__ import annotations

import difflib
import logging
import os
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_dp.launch import LaunchError, external_rank

log = logging.getLogger("train")

FULL_ERROR = "HYDRA_FULL_ERROR"
LOG_FILE = "train.log"


class SweepFolder(Callback):
    """Hydra's callback that knows where a sweep writes, so that one that fails before its first job leaves nothing."""

    path: ClassVar[Path | None] = None

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Remember the folder; Hydra calls this."""
        SweepFolder.path = Path(config.hydra.sweep.dir)


class JobError(Exception):
    """A job failed, and the message is all that there is to say."""


def run(main: Callable[[], Any]) -> None:
    """Call a ``hydra.main`` function; what fails ends the program with a message and status 1.

    With ``HYDRA_FULL_ERROR=1`` in the environment, tracebacks are shown in full. Under torchrun or SLURM rank 0 alone
    has a run folder.
    """
    before = os.environ.get(FULL_ERROR)
    os.environ[FULL_ERROR] = "1"  # Hydra then raises errors instead of printing them
    with tempfile.TemporaryDirectory(prefix="rank_") as folder:
        try:
            sys.argv[1:] = arguments_of_rank(sys.argv[1:], external_rank(), folder)
            main()
        except (JobError, HydraException, OmegaConfBaseException) as error:
            if SweepFolder.path is not None:
                _discard(SweepFolder.path, {"multirun.yaml"})
            if before == "1":
                raise
            sys.exit(f"error: {explain(error)}")
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            sys.exit(128 + signal.SIGINT)
        finally:
            if before is None:
                del os.environ[FULL_ERROR]


def arguments_of_rank(arguments: list[str], rank: int | None, folder: str) -> list[str]:
    """The command line for Hydra: of ranks that torchrun or SLURM started, all but the first write to ``folder``.

    Raises:
        JobError: a sweep, whose jobs start processes of their own, under such a launcher.
    """
    sweep = [argument for argument in arguments if argument in ("-m", "--multirun")]
    if sweep and rank is not None:
        raise JobError("--multirun starts the processes of each job itself; use python, not torchrun or srun")
    if sweep:  # first, for between overrides the parser does not find it
        arguments = [*sweep, *(argument for argument in arguments if argument not in sweep)]
    if rank:
        return [*arguments, f"hydra.run.dir={folder}", "hydra.output_subdir=null", "hydra/job_logging=none"]
    return arguments


def explain(error: Exception) -> str:
    """The message of an error, and for an unknown key or option what there is instead."""
    cause = error
    while cause.__cause__ is not None and not isinstance(error, JobError):
        cause = cause.__cause__
    parent, key = getattr(cause, "parent_node", None), getattr(cause, "key", None)
    if parent is not None and key is not None and OmegaConf.is_dict(parent) and key not in parent:
        there = sorted(str(name) for name in parent)
        near = difflib.get_close_matches(str(key), there, n=1)
        where = cause.full_key.rpartition(".")[0] or "the configuration"
        meant = f"; did you mean {near[0]}?" if near else ""
        return f"{cause.full_key} is unknown{meant} In {where} there are: {', '.join(there)}"
    text = str(error) if cause is error else f"{error}\n{cause}"
    return text.partition("\nConfig search path")[0].strip()


def config_error(run_dir: str, error: Exception) -> JobError:
    """The error of a job that did not start, and whose folder is removed."""
    _discard(Path(run_dir), {".hydra", LOG_FILE})
    return _noted(str(error))


def job_error(run_dir: str, error: Exception) -> JobError:
    """The error of a job that failed on the way; its traceback goes to train.log."""
    if isinstance(error, LaunchError):
        message, text = str(error), error.traceback
    else:
        message, text = f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error))
    log_file = Path(run_dir, LOG_FILE)
    with open(log_file, "a") as file:
        file.write(text)
    return _noted(f"{message}\nThe traceback is in {log_file}")


def _discard(folder: Path, hydras: set[str]) -> None:
    """Remove a folder that holds nothing but Hydra's files, and the two above it, runs/NAME, if they become empty."""
    if folder.is_dir() and {path.name for path in folder.iterdir()} <= hydras:
        for handler in [h for h in logging.root.handlers if isinstance(h, logging.FileHandler)]:
            logging.root.removeHandler(handler)
            handler.close()
        shutil.rmtree(folder)
        for parent in folder.absolute().parents[:2]:
            if parent != Path.cwd() and not any(parent.iterdir()):
                parent.rmdir()


def _noted(message: str) -> JobError:
    """In a sweep say it now, for Hydra speaks of the first failed job alone, and at the end."""
    config = HydraConfig.get()
    if config.mode == RunMode.MULTIRUN:
        log.error("job %d failed: %s", config.job.num, message)
        message = f"job {config.job.num}: {message}"
    return JobError(message)


def job_logging() -> dict[str, Any] | None:
    """Hydra's logging configuration of this job, for processes that the job starts; None where a launcher has."""
    if external_rank() is not None:
        return None
    return OmegaConf.to_container(HydraConfig.get().job_logging, resolve=True)  # type: ignore[return-value]
