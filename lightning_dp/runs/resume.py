"""Which checkpoint a run continues from, and what makes it end as if it had not been interrupted.

`CompleteFiles` writes the checkpoints, so that one is complete at every moment. Each holds the run's configuration,
because ``ckpt_path=last`` must not continue another run; and the best weights so far are known again.
"""

from __future__ import annotations

import fcntl
import logging
import math
import os
import random
import re
import textwrap
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.callbacks import (
    BatchSizeFinder,
    LearningRateFinder,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from pytorch_lightning.callbacks.early_stopping import EarlyStoppingReason
from pytorch_lightning.utilities import CombinedLoader

from lightning_dp._private.lightning_names import begin_next_epoch, modes_in_training, restart_loader
from lightning_dp._private.torch_names import BatchNorm
from lightning_dp.data.loading import derive_seed
from lightning_dp.runs.validation import Config, is_of_validation
from lightning_dp.strategies.complete_files import copy, existing
from lightning_dp.strategies.consolidate import REST
from lightning_dp.trial_run import generators_of

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
OF_ANOTHER_SCHEDULE = ".scheduler._target_="  # within a difference
MAX_NAMED = 3  # differences in an error
VERSION = "pytorch-lightning_version"
OTHERS = "runs keep theirs in RUN_DIR/checkpoints/last.ckpt"


def find_checkpoint(config: Config, in_sweep: bool = False, launched: bool = False) -> Path | None:
    """Return the checkpoint that ``ckpt_path`` stands for, or None to start from the beginning.

    - A path: that checkpoint, whatever its configuration.
    - ``"last"`` or ``"best"``: that of the run folder. If it has none, a single run takes that of the newest run of the
      same name and configuration beside it. These begin again instead, where the run in that folder had begun, since
      they may have been killed before their first checkpoint: a run whose folder has its metrics or configuration, a
      job of a sweep in which any job has metrics, and ranks that torchrun or SLURM has started.

    Args:
        config: the whole configuration.
        in_sweep: the run is a job of a sweep.
        launched: torchrun or SLURM has started this process.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        ValueError: it is no checkpoint, or that of another configuration, or the run would overwrite another one; or
            the best one is not that of all epochs.
    """
    requested, run_dir = config["ckpt_path"], Path(config["run_dir"])
    path = None if requested is None else Path(requested)
    if requested in OF_A_RUN:
        own = _of_a_run(requested, config, in_sweep, launched)
        path = own or _begun_from(run_dir)
        if path is None:
            log.info("%s has no %s: this job starts from the beginning", run_dir, OF_A_RUN[requested])
            return None
        if own is not None:
            _require_same(requested, path, config)
        else:
            requested = str(path)
    if path is not None and not (requested and path.exists()):  # an empty text would be this folder
        raise FileNotFoundError(f"ckpt_path={requested}: there is no such checkpoint; {OTHERS}")
    require_unused(run_dir, path, "hydra.sweep.dir" if in_sweep else "hydra.run.dir")
    if path is None:
        return None
    read_checkpoint(path)
    require_intact(path)
    if config["train"]:
        require_complete(path)
        if config["test"] == "best":
            _require_best_is_known(path, config)
        if requested not in OF_A_RUN and (found := differences(path, config)):
            _require_schedule_goes_on(path, found, config)
            log.warning("%s is of a run with %s", path, _named(found))
            if kept := _in_state(found, path):
                log.warning("optimizer and schedule go on with their values in the checkpoint: %s", _named(kept))
    log.info("continuing from %s", path)
    return _located(path)


def _of_a_run(requested: str, config: Config, in_sweep: bool, launched: bool) -> Path | None:
    run_dir, name, file = Path(config["run_dir"]), config["name"], OF_A_RUN[requested]
    own = Path(existing(run_dir / file))
    if own.exists():
        return own
    # Lightning would continue from it in a job of SLURM that is given no checkpoint, and the rows before it be lost.
    of_slurm = sorted(run_dir.glob("hpc_ckpt_*.ckpt"), key=lambda path: int(path.stem.rpartition("_")[2]))
    if requested == "last" and of_slurm:
        return of_slurm[-1]
    if in_sweep and f"ckpt_path={requested}" in str(run_dir):
        raise ValueError(
            f"ckpt_path={requested}: hydra.sweep.subdir puts this into the name of the job's folder, which is then not "
            "the one to continue; add 'hydra.job.config.override_dirname.exclude_keys=[ckpt_path]'"
        )
    others = sorted(run_dir.parent.glob(f"*/{file}"), key=lambda path: path.stat().st_mtime, reverse=True)
    begun = any((run_dir / file).exists() for file in (METRICS, CONFIGURATION))
    begun = begun or (in_sweep and any(run_dir.parent.glob(f"*/{METRICS}")))
    kept = "" if requested == "last" else "; test=best keeps the best weights"
    if (launched or begun) and not _has_results(run_dir):
        if config["train"]:
            return None
        if begun and _recorded(run_dir).get("train", True):  # else a test of another run's weights is repeated
            raise FileNotFoundError(
                f"ckpt_path={requested}: {run_dir} has no {file} to test, because its run ended before{kept}; name "
                "another file with ckpt_path=PATH"
            )
    if _has_results(run_dir) and _recorded(run_dir).get("train", True):
        raise FileNotFoundError(
            f"ckpt_path={requested}: {run_dir} has no {file} beside the results of its run{kept}; put the file "
            "back, or name another one with ckpt_path=PATH"
        )
    if in_sweep:
        raise FileNotFoundError(
            f"ckpt_path={requested}: {run_dir} has no {file}{kept}; continue a sweep with hydra.sweep.dir=FOLDER, or "
            "start one without ckpt_path"
        )
    of_name = Path(name).parts  # several if it has a slash
    if not others or run_dir.parent.parts[-len(of_name) :] != of_name:
        raise FileNotFoundError(
            f"ckpt_path={requested}: {run_dir} has no {file}, nor has another run named {name} beside it{kept}; name "
            "the folder of the run with hydra.run.dir=FOLDER, or the file with ckpt_path=PATH"
        )
    return min(others, key=lambda path: _num_differences(path, config))


def _has_results(run_dir: Path) -> bool:
    """Return whether a run in this folder has come to its end, or to a checkpoint. The best one is before the last."""
    others = [path for path in run_dir.glob(f"{FOLDER}/*.ckpt") if path.name != OF_A_RUN["best"].name]
    return (run_dir / CURVES).exists() or bool(others)


def _begun_from(run_dir: Path) -> Path | None:
    """Return the checkpoint of another folder that the run in this one has begun from, or None."""
    path = _recorded(run_dir).get("ckpt_path")
    return None if path in (None, *OF_A_RUN) or is_of(run_dir, Path(path)) else Path(path)


def _recorded(run_dir: Path) -> Any:
    """Return the configuration that the last run in this folder has written there, ``{}`` if none has."""
    file = run_dir / CONFIGURATION
    return OmegaConf.load(file) if file.is_file() else {}


def _begins_again(run_dir: Path, checkpoint: Path) -> bool:
    """Return whether the run in a folder has begun from this checkpoint, and has no results of its own."""
    path = _begun_from(run_dir)
    return path is not None and path.resolve() == checkpoint.resolve() and not _has_results(run_dir)


def _num_differences(path: Path, config: Config) -> float:
    try:
        return len(differences(path, config))
    except ValueError:  # a damaged file of one run must not stop another
        return math.inf


def _require_same(requested: str, path: Path, config: Config) -> None:
    """Raise ValueError if a checkpoint is that of another configuration, or the best one not that of all epochs."""
    found = differences(path, config)
    if found:
        _require_schedule_goes_on(path, found, config)
        raise ValueError(
            f"ckpt_path={requested}: {path} is of a run with {_named(found)}; give the same options, or continue it "
            f"all the same with ckpt_path={path}"
        )
    if requested == "best":
        _require_best_of_all(path)


def _require_schedule_goes_on(path: Path, found: list[str], config: Config) -> None:
    """Raise ValueError for a run with more epochs than the schedule in its checkpoint, which Lightning loads.

    Where other values that count steps differ as well, such as the batch size, `Classifier.on_train_start` does so. Not
    where the schedule is another one, which may have no end.
    """
    trainer, model = config["trainer"], config["model"]
    counted = {text.partition("=")[0] for text in found if text.startswith(("data.", "trainer."))}
    is_ours = model["_target_"].startswith("lightning_dp.") and isinstance(model.get("scheduler"), dict)
    if not config["train"] or counted != {"trainer.max_epochs"} or trainer.get("max_steps", -1) != -1 or not is_ours:
        return
    if any(OF_ANOTHER_SCHEDULE in text for text in found):
        return
    now, before = (each["trainer"].get("max_epochs") or 0 for each in (config, _configuration(path)))
    has_end = any("total_steps" in state for state in read_checkpoint(path).get("lr_schedulers", ()))
    if now > before and has_end and model["scheduler"].get("total_steps") is None:
        raise ValueError(
            f"trainer.max_epochs={now}: the run of {path} has {before}, and its schedule "
            f"{model['scheduler']['_target_']} ends with them; keep trainer.max_epochs={before}, or start a new run"
        )


def _require_best_of_all(path: Path) -> None:
    """Raise ValueError if the run of a best checkpoint has gone on without keeping the best one."""
    last = Path(existing(path.with_name(OF_A_RUN["last"].name)))
    try:
        test = _configuration(last).get("test", "best") if last.exists() else "best"
    except ValueError:  # it is damaged, and not what is asked for
        return
    if test != "best":
        raise ValueError(
            f"ckpt_path=best: {path} is the best of its first epochs only: the run has gone on with test={test}, which "
            f"keeps none; use ckpt_path=last, or take these weights all the same with ckpt_path={path}"
        )


def _in_state(found: list[str], checkpoint: Path) -> list[str]:
    """Return the values that Lightning loads. Of a schedule that is a function, as of optim=goyal, that is its step.

    Of another schedule than the run's it is that, too, and what both have.
    """
    is_function = any("lr_lambdas" in state for state in read_checkpoint(checkpoint)["lr_schedulers"])
    is_another = any(OF_ANOTHER_SCHEDULE in text for text in found)
    new = (".interval=", ".scheduler.") if is_function or is_another else (".interval=",)
    return [text for text in found if text.startswith(IN_STATE) and not any(part in text for part in new)]


def _named(found: list[str]) -> str:
    more = f", and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else ""
    return f"{', '.join(found[:MAX_NAMED])}{more}"


def require_unused(run_dir: Path, checkpoint: Path | None, key: str) -> None:
    """Raise ValueError if a folder holds a run, and not the one that is continued."""
    used = (run_dir / METRICS).exists() or any(run_dir.glob(f"{FOLDER}/*.ckpt"))
    if used and (checkpoint is None or not (is_of(run_dir, checkpoint) or _begins_again(run_dir, checkpoint))):
        raise ValueError(
            f"{key}: {run_dir} holds the results of a run, which this one would replace; continue that with "
            "ckpt_path=last, or name another folder"
        )


def is_of(run_dir: Path, checkpoint: Path) -> bool:
    """Return whether a checkpoint is in a run folder."""
    return run_dir.resolve() in _located(checkpoint).parents


def run_folder(checkpoint: Path) -> Path:
    """Return the folder of a checkpoint's run. A name with "{val/acc}" makes folders of its own below checkpoints/."""
    path = _located(checkpoint)
    is_of_run = (folder for folder in path.parents if (folder / CONFIGURATION).is_file())
    return next(is_of_run, path.parent.parent)


def _located(checkpoint: Path) -> Path:
    """Return the path without links, but to a file in a run folder whose checkpoints/ is a link to another disk."""
    path = Path(os.path.abspath(checkpoint))
    run_dir = path.parent.parent.resolve()
    return run_dir / path.parent.name / path.name if (run_dir / CONFIGURATION).is_file() else path.resolve()


@contextmanager
def alone_in(run_dir: Path) -> Iterator[None]:
    """Hold a lock on a run folder, at most until this process dies: two runs would write to the same files.

    The file stays there. If it were removed, a run that has opened it and one that makes it again could both lock it.

    Raises:
        ValueError: another process holds it.
    """
    path = run_dir / ".hydra" / "lock"
    path.parent.mkdir(exist_ok=True)
    with open(path, "w") as file:
        try:
            # Forked processes do not inherit this kind of lock: loader workers that survive their rank do not hold it.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            raise ValueError(
                f"hydra.run.dir: {run_dir} is in use by a run that has not ended; wait for it, or name another folder"
            ) from error
        except OSError as error:
            log.debug("no lock on %s: %s", path, error)  # of a file system without locks
        yield


# --- what is in a checkpoint ---


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


def require_complete(path: Path) -> None:
    """Raise ValueError if a checkpoint has no more than weights, with which no training can go on as it was."""
    missing = sorted({"loops", "lr_schedulers", "optimizer_states", VERSION} - read_checkpoint(path).keys())
    if missing:
        raise ValueError(
            f"{path} has no {', '.join(missing)}, so no training can continue from it; test its weights with "
            "train=false, or continue from another one"
        )


@contextmanager
def naming_another_model(path: Any) -> Iterator[None]:
    """Shorten torch's error for weights that do not fit a model, which names each of them."""
    try:
        yield
    except RuntimeError as error:
        if not str(error).startswith("Error(s) in loading state_dict"):
            raise
        first, *others = [line.strip() for line in str(error).splitlines()[1:]]
        more = f" (and {len(others)} more such lines)" if others else ""
        raise ValueError(
            f"{path} holds another model than the configuration: {textwrap.shorten(first, 200)}{more}; give the "
            "options of its run"
        ) from error


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
    saved = _configuration(checkpoint)
    if "run_dir" not in saved:
        return []
    free = FREE if is_of(Path(config["run_dir"]), checkpoint) else FREE - PLACE
    theirs, ours = (dict(_leaves(each, each["run_dir"], free)) for each in (saved, config))
    found: dict[tuple[bool, str, str, str], str] = {}
    # A value, such as the seed, is passed on to several objects; it is named once, and once of what a state has.
    for key in sorted({**theirs, **ours}, key=lambda key: (key.count("."), key)):
        old, new = theirs.get(key, "nothing"), ours.get(key, "nothing")
        if old != new:
            found.setdefault((key.startswith(IN_STATE), key.rpartition(".")[2], old, new), f"{key}={old}, not {new}")
    return list(found.values())


def _configuration(checkpoint: Path) -> Config:
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
    """Puts the configuration of a run into its checkpoints, and sees that the first of them can be read again."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._has_read = False

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Do what the next epoch would have begun with, for a run of one epoch."""
        self.on_train_epoch_start(trainer, pl_module)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Warn of a checkpoint that no run can continue from now, and not when a run is to be continued."""
        path = Path(self._config["run_dir"], OF_A_RUN["last"])
        if self._has_read or not trainer.is_global_zero or not path.exists():
            return
        self._has_read = True
        try:
            read_checkpoint(path)
        except ValueError as error:
            log.warning("no run can continue from this checkpoint: %s", error)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps. Called by Lightning."""
        return {"config": self._config}


class SeedEachEpoch(Callback):
    """Seed the generators of PyTorch, NumPy and Python from the run's seed and the epoch, the same on all ranks.

    A checkpoint does not hold the state of these generators. With this callback, a run that continues from the end of
    an epoch draws what the uninterrupted run draws, for example in dropout.

    On one rank it also puts the states of the training loaders' own generators into checkpoints, as of
    ``DataLoader(generator=...)``. On several each rank may have another state, and a checkpoint is that of one.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._own: dict[str, torch.Generator] = {}  # those that are put into checkpoints
        self._saved: dict[str, torch.Tensor] = {}  # of the checkpoint that this run continues from
        self._of_loaders: list[Any] = []  # the states of loaders in it

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps. Called by Lightning."""
        return {name: generator.get_state() for name, generator in self._own.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the states until the loaders have been made. Called by Lightning."""
        self._saved = state_dict

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Keep the states of loaders, which Lightning forgets. A checkpoint to test may have weights only."""
        loop = checkpoint.get("loops", {}).get("fit_loop", {})
        self._of_loaders = loop.get("state_dict", {}).get("combined_loader", [])

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Seed the generators before the loader is made, for epoch 0 also in a run that continues.

        What makes the loader may draw from them, as `random_split` does. So does its iterator: the seed of its workers,
        and the order of a RandomSampler; then the dataset draws for the first batch.
        """
        self._seed_generators(0)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let the iterator of a run that continues be made again: it was made for epoch 0. Seed before each loader."""
        found = _own_generators(trainer)
        is_kept = trainer.world_size == 1 and not trainer.reload_dataloaders_every_n_epochs  # type: ignore[attr-defined]
        self._own = {name: each for name, each in found.items() if is_kept and isinstance(each, torch.Generator)}
        if trainer.current_epoch > 0:
            for name in self._own.keys() & self._saved.keys():
                self._own[name].set_state(self._saved[name])
            _warn_of_what_starts_over(trainer, sorted(found.keys() - (self._own.keys() & self._saved.keys())))
            self._seed_generators(trainer.current_epoch)
            restart_loader(trainer, trainer.current_epoch, self._of_loaders)
        # With reload_dataloaders_every_n_epochs, what makes the loader of an epoch draws, and so do its workers. No
        # hook is right before it: the module's `on_train_start` and `on_train_epoch_end` follow those of callbacks.
        loop: Any = trainer.fit_loop
        set_up_data = loop.setup_data

        def seed_and_set_up() -> None:
            if trainer.current_epoch > 0:
                self._seed_generators(trainer.current_epoch)
            set_up_data()

        loop.setup_data = seed_and_set_up

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Do the same in later epochs. That of epoch 0 has been made by now."""
        if trainer.current_epoch > 0:
            self._seed_generators(trainer.current_epoch)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Seed the generators at the first batch of an epoch: not all epochs draw as much before it."""
        if batch_idx == 0:
            # By another seed: the first batch has been drawn by that of the epoch, and the second would be as it is.
            # -1, because `TrainingSampler` has seeds for the numbers of batches.
            self._seed_generators(trainer.current_epoch, -1)

    def _seed_generators(self, *numbers: int) -> None:
        seed = derive_seed(self._seed, *numbers)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)


def _own_generators(trainer: Any) -> dict[str, Any]:
    """Return the generators of the training loaders. Without those that each epoch's workers have a new copy of."""
    found: dict[str, Any] = {}
    for number, loader in enumerate(CombinedLoader(trainer.train_dataloader).flattened):
        is_copied = getattr(loader, "num_workers", 0) > 0 and not getattr(loader, "persistent_workers", False)
        of_dataset = generators_of(getattr(loader, "dataset", None)) if is_copied else {}
        for name, generator in generators_of(loader).items():
            if not any(generator is each for each in of_dataset.values()):
                found[f"{name} of training loader {number}" if number else name] = generator
    return found


def _warn_of_what_starts_over(trainer: Trainer, generators: list[str]) -> None:
    """Warn once, on rank 0, of what the checkpoint does not hold: a continued run may end with other weights."""
    lost = [f"{name} begins from its seed" for name in generators]
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, ModelPruning):
            lost.append(f"{type(callback).__name__} has no masks until it prunes again")
    if lost and trainer.is_global_zero:
        log.warning("this run may differ from one that was not interrupted: %s", "; ".join(lost))


class ContinuesAfterCheckpoint(Callback):
    """Continues with the epoch after that of the checkpoint, or not at all where EarlyStopping had stopped the run.

    With ``max_steps`` Lightning would go through the epoch that has ended again, and after EarlyStopping train another.
    The callback comes before the others, so that they see the right epoch.

    Args:
        checkpoint: that this rank continues from, or None.
        run_dir: the folder of the run.
    """

    def __init__(self, checkpoint: str | None, run_dir: str) -> None:
        self._checkpoint = checkpoint
        self._run_dir = Path(run_dir)
        self._has_trained = False
        self._at_start: dict[str, bool] = {}  # see `_switches`
        self._switched: dict[str, bool] = {}  # what the run of the checkpoint had changed

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add what has been frozen or unfrozen since training began. Called by Lightning.

        Not what the module's constructor has: a run may continue on purpose with a part frozen.
        """
        now = _switches(trainer).items()
        switched = {name: value for name, value in now if value != self._at_start.get(name, value)}
        checkpoint["callbacks"][self.state_key] = {"switched": switched}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep that until the first epoch or batch. Called by Lightning."""
        self._switched = state_dict["switched"]

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Raise ValueError if this rank continues from elsewhere than rank 0: its momentum and images would be others.

        A machine that does not see the run folder finds no ``ckpt_path=last`` there, and would start. Also raise it for
        a search for the batch size, of which no checkpoint has the result.
        """
        if stage != "fit":
            return
        steps = 0 if self._checkpoint is None else completed_steps(Path(self._checkpoint))
        first = trainer.strategy.broadcast(steps)
        if steps != first:
            raise ValueError(
                f"rank {trainer.global_rank} would continue after {steps} steps, but rank 0 after {first}: all "
                "machines must see one run folder; name one that they share with hydra.run.dir=FOLDER"
            )
        if self._checkpoint is not None:
            # The optimizer's state has the rate that was found. After a search at the start, Lightning has forgotten
            # all of the checkpoint but the weights, and would begin with epoch 0.
            of: Any = trainer
            search = LearningRateFinder.on_fit_start
            of.callbacks = [each for each in of.callbacks if type(each).on_fit_start is not search]
            if any(type(each).on_fit_start is BatchSizeFinder.on_fit_start for each in of.callbacks):
                raise ValueError(
                    f"ckpt_path={self._checkpoint}: BatchSizeFinder would search again, and Lightning then begins with "
                    "epoch 0; leave it out, and set the batch size that it has found"
                )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Correct the loop. Called by Lightning when the checkpoint has been loaded."""
        self._has_trained = True
        self._take_back(trainer)
        begin_next_epoch(trainer)
        self._at_start = {}
        # The epoch does not tell that it stopped in the first one, nor the reason that another rank had one.
        running = EarlyStoppingReason.NOT_STOPPED
        if any(each.stopped_epoch > 0 or each.stopping_reason != running for each in trainer.early_stopping_callbacks):
            trainer.should_stop = True

    def _writes(self, trainer: Trainer) -> bool:
        """Return whether this is the rank that writes last.ckpt, in a run that began from a checkpoint and has one."""
        saves = bool(trainer.checkpoint_callbacks) and not trainer.fast_dev_run  # type: ignore[attr-defined]
        return self._checkpoint is not None and trainer.is_global_zero and saves

    def _take_back(self, trainer: Trainer) -> None:
        """Replace last.ckpt by an earlier checkpoint of its run, or that would be continued if this run is killed."""
        path, last = Path(self._checkpoint or ""), self._run_dir / OF_A_RUN["last"]
        is_own = self._writes(trainer) and last.exists() and is_of(self._run_dir, path)
        if is_own and path.resolve() != last.resolve():
            copy(path, last)

    def _keep_copy(self, trainer: Trainer) -> None:
        """Copy the checkpoint of a run that was complete to the folder of this one, which would have none."""
        path, last = Path(self._checkpoint or ""), self._run_dir / OF_A_RUN["last"]
        # After EarlyStopping, training has begun without a step.
        is_new = self._writes(trainer) and not is_of(self._run_dir, path)
        if is_new and completed_steps(path) == trainer.global_step:
            copy(path, last)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Freeze and unfreeze what the run before had, after all hooks of the start and before those of the epoch.

        Lightning restores neither: after the epoch that unfreezes a part, it would stay frozen to the end.
        """
        self._at_start = self._at_start or _switches(trainer)
        owners = {**dict(pl_module.named_parameters()), **dict(pl_module.named_modules())}
        for key, value in self._switched.items():
            name, _, switch = key.rpartition(".")
            if name in owners:
                setattr(owners[name], switch, value)
        self._switched = {}

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Do the same in a run that continues within an epoch."""
        if not self._at_start:
            self.on_train_epoch_start(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep a last.ckpt that was written before this run continued.

        Lightning does not know of it any more, and would write it again, with other weights if a monitored metric has
        not improved since.
        """
        for each in trainer.checkpoint_callbacks:
            # With filename: last, one file is both, and a kill between the two writes leaves it known as the best only.
            if isinstance(each, ModelCheckpoint) and (each.last_model_path or each.kth_best_model_path):
                each.save_last = False

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count the epoch of a checkpoint as completed, also if no step was left: then no hook of training was called.

        Lightning does so itself for ``max_epochs``, not for ``max_steps``. The test is logged with this number. The
        mean of the weights, which is tested, is put into the module when training ends.
        """
        epoch: Any = trainer.fit_loop.epoch_progress.current
        epoch.completed = epoch.processed
        self._keep_copy(trainer)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            # SWA's epoch for batch norm ends with the mean in the module, and so in the checkpoint.
            has_mean = isinstance(callback, StochasticWeightAveraging) and trainer.current_epoch > callback.swa_end + 1
            is_averaging = isinstance(callback, WeightAveraging | StochasticWeightAveraging)
            if is_averaging and not has_mean and not self._has_trained:
                callback.on_train_end(trainer, pl_module)


def _switches(trainer: Trainer) -> dict[str, bool]:
    """Return what fine-tuning switches and no state_dict has: of parameters, batch norms and all modules, by name."""
    module = trainer.lightning_module
    norms = {name: each for name, each in module.named_modules() if isinstance(each, BatchNorm)}
    found = {f"{name}.requires_grad": each.requires_grad for name, each in module.named_parameters()}
    found |= {f"{name}.track_running_stats": each.track_running_stats for name, each in norms.items()}
    return found | {f"{name}.training": mode for name, mode in modes_in_training(trainer).items()}


# --- the last and the best weights ---


class LastCheckpoint(ModelCheckpoint):
    """Writes last.ckpt beside a ModelCheckpoint of the user's that counts alike, such as one that keeps every epoch.

    In a checkpoint Lightning tells the states of two by their class and by what they count, and refuses equal ones.
    """


class BestCheckpoint(ModelCheckpoint):
    """Keeps the weights with the best ``optimized_metric`` of all epochs or validations in checkpoints/best.ckpt.

    It is a class of its own so that its state in a checkpoint is never that of a user's ModelCheckpoint. It must come
    before the callback that writes last.ckpt. Else last.ckpt would hold the best of the epochs before.
    """

    def __init__(self, config: Config) -> None:
        metric = config["optimized_metric"]
        super().__init__(
            dirpath=Path(config["run_dir"], FOLDER),
            filename="best",
            monitor=metric,
            mode=config["optimized_mode"],
            # None: right after a validation, if not each epoch ends with one. Later weights are not those it measured.
            save_on_train_epoch_end=None if is_of_validation(metric) else True,
            enable_version_counter=False,
        )
        self._config = config
        self._has_batches = False  # in this epoch

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Copy the best weights of before: the run that they are of may go on, and replace them."""
        super().on_train_start(trainer, pl_module)
        self.keep_copy(trainer)

    def keep_copy(self, trainer: Trainer) -> None:
        """Copy the best weights to the folder of this run, if the best epoch was before it continued there."""
        path, own = Path(self.best_model_path), Path(self.dirpath or "", OF_A_RUN["best"].name)
        if not self.best_model_path or path.resolve() == own.resolve():
            return
        if trainer.is_global_zero:
            copy(path, own)
        trainer.strategy.barrier()
        assert self.best_model_score is not None
        self.best_k_models = {str(own): self.best_model_score}
        self.best_model_path = self.kth_best_model_path = str(own)

    def on_train_batch_start(self, *_: Any) -> None:
        """Note that the epoch has a batch. Called by Lightning."""
        self._has_batches = True

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the weights if they are the best.

        Raises:
            ValueError: the metric is not logged.
        """
        every = trainer.check_val_every_n_epoch  # None: val_check_interval counts steps, over epochs
        # A run that continues from the checkpoint of a validation at the end of an epoch has nothing of that epoch.
        is_validated = self._has_batches and every is not None and (trainer.current_epoch + 1) % every == 0
        self._has_batches = False
        if is_validated and self.monitor not in trainer.callback_metrics:
            there_are = ", ".join(sorted(trainer.callback_metrics))
            raise ValueError(f"test=best: optimized_metric={self.monitor} is not logged; use one of {there_are}")
        super().on_train_epoch_end(trainer, pl_module)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from the best of the epochs before, also if the run continues in another folder.

        Raises:
            FileNotFoundError: its weights are gone.
        """
        path, own = state_dict["best_model_path"], Path(self.dirpath or "", OF_A_RUN["best"].name)
        best_score = state_dict.get("best_model_score")
        beside = Path(self._config.get("ckpt_path") or own).with_name(own.name)
        for moved in (beside, own):  # the folder of the run has been moved, or copied
            if path and moved.exists() and (not Path(path).exists() or _best_score(moved, self) == best_score):
                path = str(moved)
        if path and not Path(path).exists():
            raise FileNotFoundError(f"test=best: the best weights so far are gone; put {beside} back, or use test=last")
        is_elsewhere = path and Path(path).resolve().parent != Path(self.dirpath or "").resolve()
        # In its own folder, a run that was killed between the two files writes the same best weights again. With other
        # values, such as fewer epochs, it may write none, and test those of the epochs that it was taken back from.
        is_another = path and (is_elsewhere or differences(Path(path), self._config))
        if is_another and _best_score(Path(path), self) != best_score:
            raise FileNotFoundError(
                f"test=best: the best weights so far are gone: {path} is now of a later epoch; continue in the folder "
                "of that run and with its options, or use test=last"
            )
        # Without its scores, the best of the remaining epochs would be taken for the best of all.
        super().load_state_dict(state_dict | {"dirpath": self.dirpath, "best_model_path": path})


def _best_score(path: Path, keeper: BestCheckpoint) -> Any:
    return read_checkpoint(path)["callbacks"].get(keeper.state_key, {}).get("best_model_score")


def _require_best_is_known(checkpoint: Path, config: Config) -> None:
    keeper = BestCheckpoint(config | {"ckpt_path": str(checkpoint)})
    state = read_checkpoint(checkpoint)["callbacks"].get(keeper.state_key)
    if state is None:
        raise ValueError(
            f"test=best: the run of {checkpoint} did not keep its best weights by {config['optimized_mode']} "
            f"optimized_metric={config['optimized_metric']}, so the best of all its epochs is not known; use test=last"
        )
    keeper.load_state_dict(state)  # as each rank will, but before the run is taken for one that has not ended
