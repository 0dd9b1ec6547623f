"""What is in a run folder and its checkpoints: whether one is whole, and which configuration its run has."""

from __future__ import annotations

import logging
import os
import re
import textwrap
import traceback
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer

from lightning_dp.runs.validation import Config
from lightning_dp.strategies.complete_files import CHECKSUMS, checksum
from lightning_dp.strategies.consolidate import REST

log = logging.getLogger("train")

FOLDER = "checkpoints"
METRICS = "metrics.csv"
CONFIGURATION = ".hydra/config.yaml"
CURVES = "curves.png"  # is written when a run has ended, and removed where it begins or continues
OF_A_RUN = {"last": Path(FOLDER, "last.ckpt"), "best": Path(FOLDER, "best.ckpt")}
# Keys that do not change what is trained: a run may continue with other values.
FREE = {
    *("name", "run_dir", "ckpt_path", "train", "test", "optimized_metric", "optimized_mode", "print_config", "logger"),
    *("data.root", "data.index_dir", "data.download", "data.num_workers", "callbacks.progress_bar"),
    *("trainer.enable_progress_bar", "trainer.enable_model_summary"),
}
PLACE = {"data.root"}  # free in the run's own folder, where its data may have been moved; elsewhere it tells data apart
# Lightning loads these with the state of the optimizer and its schedule, whatever the configuration says.
IN_STATE = ("optim.", "model.optimizer.", "model.scheduler.", "model.parameter_groups.")
VERSION = "pytorch-lightning_version"
OTHERS = "runs keep theirs in RUN_DIR/checkpoints/last.ckpt"


def is_of(run_dir: Path, checkpoint: Path) -> bool:
    """Return whether a checkpoint is in a run folder."""
    return run_dir.resolve() in located(checkpoint).parents


def run_folder(checkpoint: Path) -> Path:
    """Return the folder of a checkpoint's run. A name with "{val/acc}" makes folders of its own below checkpoints/."""
    path = located(checkpoint)
    is_of_run = (folder for folder in path.parents if (folder / CONFIGURATION).is_file())
    return next(is_of_run, path.parent.parent)


def located(checkpoint: Path) -> Path:
    """Return the path without links, but to a file in a run folder whose checkpoints/ is a link to another disk."""
    path = Path(os.path.abspath(checkpoint))
    run_dir = path.parent.parent.resolve()
    return run_dir / path.parent.name / path.name if (run_dir / CONFIGURATION).is_file() else path.resolve()


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Return what a checkpoint holds. Its weights stay on disk, and no code in it is executed.

    Raises:
        ValueError: the file is no checkpoint of Lightning.
    """
    # A sharded checkpoint is a folder. A file in it has what all ranks share: the hybrid's, or PyTorch's of FSDP2.
    is_of_fsdp = (path / REST).exists()
    file = path / (REST if is_of_fsdp else "checkpoint.ckpt") if path.is_dir() else path
    try:
        checkpoint = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # an unpickler can raise any error for bytes that are not a pickle
        found = re.search(r"GLOBAL (\S+)", str(error))
        if found is not None:
            # Hydra passes lists and dicts of a configuration as objects of its own.
            is_list = found[1].startswith("omegaconf.")
            remedy = "with _convert_: all beside the _target_" if is_list else "with save_hyperparameters(ignore=...)"
            raise ValueError(
                f"{path} holds an object of {found[1]}, and to read it would run code that the file names; keep "
                f"objects out of checkpoints, for example {remedy}"
            ) from error
        raise ValueError(
            f"{path} is no checkpoint of a run, or is damaged ({type(error).__name__}); {OTHERS}"
        ) from error
    if is_of_fsdp and isinstance(checkpoint, dict):
        checkpoint |= {"state_dict": {}, "optimizer_states": []}  # they are in the files of the ranks
    if not isinstance(checkpoint, dict) or not {"state_dict", "global_step"} <= checkpoint.keys():
        raise ValueError(f"{path} is no checkpoint of a run: it has no state_dict and global_step; {OTHERS}")
    weights, num_steps = checkpoint["state_dict"], checkpoint["global_step"]
    if not (isinstance(weights, dict) and isinstance(checkpoint.setdefault("callbacks", {}), dict)):
        raise ValueError(f"{path} is no checkpoint of a run: state_dict and callbacks must be dicts; {OTHERS}")
    if type(num_steps) is not int or num_steps < 0:
        raise ValueError(f"{path} is no checkpoint of a run: global_step={num_steps!r} is no number of steps; {OTHERS}")
    return checkpoint


def require_intact(path: Path) -> None:
    """Raise ValueError if a byte of a checkpoint has changed since it was written, which torch does not see."""
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        # A file of torch's distributed checkpoints is several archives in one.
        if file.suffix == ".distcp" or not torch.serialization.get_crc32_options() or not zipfile.is_zipfile(file):
            continue
        try:
            with zipfile.ZipFile(file) as archive:
                damaged = archive.testzip()
        except Exception:  # a reader of damaged files can raise any error
            damaged = "what lists the parts"
        if damaged is not None:
            raise ValueError(f"{file} is damaged: {damaged} in it does not have the checksum it had; {OTHERS}")
    if (path / CHECKSUMS).is_file():  # folders of Lightning's own strategy have none
        _require_checksums(path)


def _require_checksums(folder: Path) -> None:
    try:
        expected = dict(torch.load(folder / CHECKSUMS, weights_only=True))
    except Exception as error:  # an unpickler can raise any error for bytes that are not a pickle
        raise ValueError(f"{folder / CHECKSUMS} is damaged ({type(error).__name__}); {OTHERS}") from error
    try:
        damaged = [name for name, value in expected.items() if checksum(folder / name) != value]
    except FileNotFoundError as error:
        raise ValueError(f"{folder} is not complete: {error.filename} is missing; {OTHERS}") from error
    if damaged:
        raise ValueError(f"{folder / damaged[0]} is damaged: it does not have the checksum it had; {OTHERS}")


def require_version(path: Path) -> None:
    """Raise ValueError if a checkpoint does not say which Lightning wrote it, without which Lightning reads none."""
    if VERSION not in read_checkpoint(path):
        raise ValueError(
            f"{path} has no {VERSION}, so Lightning cannot read it; take that of the checkpoint whose weights these are"
        )


def require_complete(path: Path) -> None:
    """Raise ValueError if a checkpoint has no more than weights, with which no training can go on as it was."""
    missing = sorted({"loops", "lr_schedulers", "optimizer_states"} - read_checkpoint(path).keys())
    if missing:
        raise ValueError(
            f"{path} has no {', '.join(missing)}, so no training can continue from it; test its weights with "
            "train=false, or continue from another one"
        )


@contextmanager
def naming_another_model(path: Any) -> Iterator[None]:
    """Shorten torch's error for weights that do not fit a model, and name the file in those for an optimizer's state.

    Some of the latter come in the first step, where the optimizer or schedule looks for a key of its own in the state.
    """
    try:
        yield
    except (KeyError, ValueError) as error:
        if path is None or not _is_of_optimizer(error):
            raise
        raise ValueError(
            f"{path} holds the state of another optimizer or schedule than the configuration ({type(error).__name__}: "
            f"{error}); give the options of its run, or start a new one"
        ) from error
    except RuntimeError as error:
        if not str(error).startswith("Error(s) in loading state_dict"):
            raise
        first, *others = [line.strip() for line in str(error).splitlines()[1:]]
        more = f" (and {len(others)} more such lines)" if others else ""
        raise ValueError(
            f"{path} holds another model than the configuration: {textwrap.shorten(first, 200)}{more}; give the "
            "options of its run"
        ) from error


def _is_of_optimizer(error: Exception) -> bool:
    """Return whether torch raises this error for the state of another optimizer or schedule, or of other parameters."""
    is_missing = isinstance(error, KeyError) or str(error).startswith("loaded state dict")
    *_, last = traceback.extract_tb(error.__traceback__)
    return is_missing and Path(last.filename).is_relative_to(Path(torch.optim.__file__).parent)


def completed_steps(checkpoint: Path) -> int:
    """Return the number of optimizer steps before a checkpoint was saved.

    Raises:
        ValueError: the file is no checkpoint of Lightning.
    """
    return int(read_checkpoint(checkpoint)["global_step"])


def differences(checkpoint: Path, config: Config) -> list[str]:
    """Return the values of a checkpoint's run that differ from ``config``, for example ``"seed=1, not 2"``.

    Checkpoints of version 0.1 do not hold them, and so differ in nothing.
    """
    saved = configuration_of(checkpoint)
    if "run_dir" not in saved:
        return []
    free = FREE if is_of(Path(config["run_dir"]), checkpoint) else FREE - PLACE
    found: dict[tuple[bool, str, str, str], str] = {}
    # A value, such as the seed, is passed on to several objects; it is named once, and once of what a state has.
    for key, old, new in _different(saved, config, free):
        found.setdefault((key.startswith(IN_STATE), key.rpartition(".")[2], old, new), f"{key}={old}, not {new}")
    return list(found.values())


def _different(theirs: Config, ours: Config, free: set[str]) -> list[tuple[str, str, str]]:
    """Return the keys with other values in two configurations, except free ones, with both values as text."""
    old, new = (dict(_leaves(each, each["run_dir"], free)) for each in (theirs, ours))
    keys = sorted({**old, **new}, key=lambda key: (key.count("."), key))
    both = [(key, old.get(key, "nothing"), new.get(key, "nothing")) for key in keys]
    return [(key, before, after) for key, before, after in both if before != after]


def configuration_of(checkpoint: Path) -> Config:
    """Return the configuration of the run that wrote a checkpoint, ``{}`` if it is of version 0.1."""
    of_callback = read_checkpoint(checkpoint)["callbacks"].get(ConfigurationInCheckpoint.__qualname__, {})
    saved: Config = of_callback.get("config", {})
    return saved


def _leaves(node: Any, run_dir: str, free: set[str], path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the values of a configuration with their dotted keys, except free ones. The run folder may be another."""
    if path in free:
        return
    if isinstance(node, dict) and node:
        for key, value in node.items():
            yield from _leaves(value, run_dir, free, f"{path}.{key}" if path else str(key))
    else:
        yield path, str(node).replace(run_dir, "RUN_DIR")


class ConfigurationInCheckpoint(Callback):
    """Puts the configuration of a run into its checkpoints, and sees that the first of them can be read again.

    It is that of all ranks, which may be started by a command on each machine.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._has_read = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Raise ValueError if rank 0 has other options: the weights would differ, or ranks wait for each other.

        Machines may have files in folders of their own.
        """
        first = trainer.strategy.broadcast(self._config)
        found = _different(first, self._config, FREE)
        if others := [f"{key}={new}, but rank 0 {old}" for key, old, new in found if "/" not in old + new]:
            raise ValueError(
                f"rank {trainer.global_rank} has {others[0]}; start all machines with the same command and files"
            )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Do what the next epoch would have begun with, for a run of one epoch."""
        self.on_train_epoch_start(trainer, pl_module)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Warn of a checkpoint that no run can continue from now, and not when a run is to be continued.

        Raises:
            ValueError: the run needs it for its test.
        """
        path = Path(self._config["run_dir"], OF_A_RUN["last"])
        if self._has_read or not trainer.is_global_zero or not path.exists():
            return
        self._has_read = True
        try:
            read_checkpoint(path)
        except ValueError as error:
            if self._config.get("test") == "best":  # it could not be read at the end of the run
                raise ValueError(f"test=best reads the best checkpoint again: {error}") from error
            log.warning("no run can continue from this checkpoint: %s", error)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps. Called by Lightning."""
        return {"config": self._config}
