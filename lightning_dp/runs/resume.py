"""Which checkpoint a run continues from, and whether its folder is free for it."""

from __future__ import annotations

import fcntl
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from lightning_dp.runs.checkpoints import (
    CONFIGURATION,
    CURVES,
    FOLDER,
    IN_STATE,
    METRICS,
    OF_A_RUN,
    OTHERS,
    configuration_of,
    differences,
    is_of,
    located,
    read_checkpoint,
    require_complete,
    require_intact,
    require_version,
)
from lightning_dp.runs.uninterrupted import BestCheckpoint
from lightning_dp.runs.validation import Config
from lightning_dp.strategies.complete_files import existing

log = logging.getLogger("train")

OF_ANOTHER_SCHEDULE = ".scheduler._target_="  # within a difference
MAX_NAMED = 3  # differences in an error


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
    path = None if requested is None else Path(existing(requested))
    if requested in OF_A_RUN:
        own = _of_a_run(requested, config, in_sweep, launched)
        path = own or _begun_from(run_dir)
        if path is None:
            _require_unused_elsewhere(config, None)
            log.info("%s has no %s: this job starts from the beginning", run_dir, OF_A_RUN[requested])
            return None
        if own is not None:
            _require_same(requested, path, config)
        else:
            requested = str(path)
    if path is not None and not (requested and path.exists()):  # an empty text would be this folder
        where = "" if path.is_absolute() else f" in {Path.cwd()}"  # with hydra.job.chdir it is the run folder
        raise FileNotFoundError(f"ckpt_path={requested}: there is no such checkpoint{where}; {OTHERS}")
    require_unused(run_dir, path, "hydra.sweep.dir" if in_sweep else "hydra.run.dir")
    _require_unused_elsewhere(config, path)
    if path is None:
        return None
    read_checkpoint(path)
    require_intact(path)
    require_version(path)
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
    return located(path)


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
    begun = begun or (in_sweep and any(_sweep_of(run_dir).rglob(METRICS)))
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
        _require_unused_elsewhere(config, None)
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


def _sweep_of(run_dir: Path) -> Path:
    """Return the folder of a job's sweep. With hydra.sweep.subdir it may have folders between."""
    return next((path for path in run_dir.parents if (path / "multirun.yaml").exists()), run_dir.parent)


def checkpoints_elsewhere(config: Config) -> Path | None:
    """Return the folder that a run writes last.ckpt to, if it is not that of its run folder."""
    folder = (config["callbacks"].get("checkpoint") or {}).get("dirpath")
    writes = config["train"] and not config["trainer"].get("fast_dev_run")
    if not writes or folder is None or "://" in str(folder):  # a remote one is not looked at
        return None
    return None if Path(folder).resolve() == Path(config["run_dir"], FOLDER).resolve() else Path(folder)


def _require_unused_elsewhere(config: Config, checkpoint: Path | None) -> None:
    """Raise ValueError if that folder has the last.ckpt of a run that is not continued from a checkpoint there."""
    folder = checkpoints_elsewhere(config)
    path = None if folder is None else Path(existing(folder / OF_A_RUN["last"].name))
    if path is None or not path.exists() or (checkpoint and located(checkpoint).parent == path.parent.resolve()):
        return
    raise ValueError(
        f"callbacks.checkpoint.dirpath: {path.parent} holds the last.ckpt of a run, which this one would replace; "
        f"continue that in a new run folder with ckpt_path={path}, or name another folder"
    )


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
    now, before = (each["trainer"].get("max_epochs") or 0 for each in (config, configuration_of(path)))
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
        test = configuration_of(last).get("test", "best") if last.exists() else "best"
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
        has_begun = _recorded(run_dir).get("train", True) and not _has_results(run_dir)
        goes_on = has_begun or any(run_dir.glob(f"{FOLDER}/*.ckpt"))
        continued = "continue that with ckpt_path=last, or " if goes_on else ""
        raise ValueError(
            f"{key}: {run_dir} holds the results of a run, which this one would replace; {continued}name another folder"
        )


@contextmanager
def alone_in(folder: Path, key: str) -> Iterator[None]:
    """Hold a lock on the folder of a run, at most until this process dies: two runs would write to the same files.

    The file stays there. If it were removed, a run that has opened it and one that makes it again could both lock it.

    Raises:
        ValueError: another process holds it.
    """
    path = folder / ".hydra" / "lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        try:
            # Forked processes do not inherit this kind of lock: loader workers that survive their rank do not hold it.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            raise ValueError(
                f"{key}: {folder} is in use by a run that has not ended; wait for it, or name another folder"
            ) from error
        except OSError as error:
            log.debug("no lock on %s: %s", path, error)  # of a file system without locks
        yield


def _require_best_is_known(checkpoint: Path, config: Config) -> None:
    keeper = BestCheckpoint(config | {"ckpt_path": str(checkpoint)})
    state = read_checkpoint(checkpoint)["callbacks"].get(keeper.state_key)
    if state is None:
        raise ValueError(
            f"test=best: the run of {checkpoint} did not keep its best weights by {config['optimized_mode']} "
            f"optimized_metric={config['optimized_metric']}, so the best of all its epochs is not known; use test=last"
        )
    keeper.load_state_dict(state)  # as each rank will, but before the run is taken for one that has not ended
