"""Which checkpoint a run continues from."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import torch

log = logging.getLogger("train")

LAST = Path("checkpoints", "last.ckpt")


def find_checkpoint(requested: str | None, run_dir: Path, name: str, in_sweep: bool) -> Path | None:
    """Return the checkpoint to continue from, or None to start from the beginning.

    Args:
        requested: the key ``ckpt_path``: None, a path, or ``"last"``. That is the last checkpoint of the run folder. If
            it has none: of a single run, that of the newest run of the same name beside it; of a job in a sweep of
            which another job has one, none, because this job had not come to its first checkpoint.
        run_dir: this run's folder.
        name: the key ``name``.
        in_sweep: the run is a job of a sweep.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        ValueError: it is no checkpoint.
    """
    if requested is None:
        return None
    path = _last_checkpoint(run_dir, name, in_sweep) if requested == "last" else Path(requested)
    if path is None:
        log.info("%s has no checkpoint: this job starts from the beginning", run_dir)
        return None
    if not path.exists():
        raise FileNotFoundError(f"ckpt_path={path}: there is no such checkpoint; runs keep theirs in RUN_DIR/{LAST}")
    completed_steps(path)
    log.info("continuing from %s", path)
    return path.resolve()


def _last_checkpoint(run_dir: Path, name: str, in_sweep: bool) -> Path | None:
    if (run_dir / LAST).exists():
        return run_dir / LAST
    others = sorted(run_dir.parent.glob(f"*/{LAST}"), key=lambda path: path.stat().st_mtime)
    if in_sweep:
        if others:
            return None
        raise FileNotFoundError(
            f"ckpt_path=last: no job of {run_dir.parent} has a checkpoint; continue a sweep with hydra.sweep.dir=FOLDER"
        )
    if not others or run_dir.parent.name != name:
        raise FileNotFoundError(
            f"ckpt_path=last: {run_dir} has no checkpoint, nor has another run named {name} beside it; name the folder "
            "of the run to continue with hydra.run.dir=FOLDER, or the file with ckpt_path=PATH"
        )
    return others[-1]


def completed_steps(checkpoint: Path) -> int:
    """Return the number of optimizer steps before a checkpoint was saved. No code in the file is executed.

    Raises:
        ValueError: the file is no checkpoint of Lightning.
    """
    # A sharded checkpoint is a folder. This file in it has what all ranks share.
    file = checkpoint / "checkpoint.ckpt" if checkpoint.is_dir() else checkpoint
    try:
        # The weights stay on disk.
        return int(torch.load(file, map_location="cpu", weights_only=True, mmap=True)["global_step"])
    except Exception as error:  # an unpickler can raise any error for bytes that are not a pickle
        raise ValueError(f"ckpt_path={checkpoint} is not a checkpoint of a run: {error}") from error


def with_last_checkpoint(arguments: list[str]) -> list[str]:
    """Replace ``ckpt_path=last`` in the command line of a rank that torchrun or SLURM started.

    These launchers restart a job with the same command line. So the folder must be named, and if it has no checkpoint
    yet, the run starts from the beginning.

    Raises:
        ValueError: the folder is not named.
    """
    if "ckpt_path=last" not in arguments:
        return arguments
    folders = [argument.partition("=")[2] for argument in arguments if argument.startswith("hydra.run.dir=")]
    if not folders or "$" in folders[-1]:
        raise ValueError(
            "ckpt_path=last under torchrun or SLURM needs a run folder that is the same after a restart; "
            "name it with hydra.run.dir=FOLDER"
        )
    path = Path(folders[-1], LAST)
    continued = f"ckpt_path={path}" if path.exists() else "ckpt_path=null"
    if int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", 0))) == 0:
        print(f"{continued}: {'continuing' if path.exists() else 'starting from the beginning'}", flush=True)
    return [continued if argument == "ckpt_path=last" else argument for argument in arguments]
