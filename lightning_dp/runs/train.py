"""Train and test one configuration: check it, start its ranks, and on each of them build, fit and test.

Each run has a folder: metrics.csv, curves.png, checkpoints/, .hydra/ with the configuration, train.log, hparams.yaml.
Of the checkpoints, last.ckpt has the weights at the end.
"""

from __future__ import annotations

import logging.config
import os
import shutil
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from pytorch_lightning import seed_everything
from pytorch_lightning.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint, WeightAveraging
from pytorch_lightning.loggers.logger import DummyLogger
from pytorch_lightning.plugins.precision import DoublePrecision

from lightning_dp.launch import external_rank, is_job_of_slurm, launch
from lightning_dp.runs.checkpoints import CURVES, METRICS, ConfigurationInCheckpoint, is_of, naming_another_model
from lightning_dp.runs.command_line import (
    UNREADABLE,
    config_error,
    exits_as_errors,
    is_in_sweep,
    is_search,
    job_error,
    job_logging,
    names_folder,
    require_named_run_dir,
    resolved_command,
    run,
    write_configuration,
)
from lightning_dp.runs.hydra_versions import instantiate
from lightning_dp.runs.metrics import (
    IMAGES_PER_S,
    MetricsFile,
    RowsInCheckpoint,
    draw_curves,
    last_values,
    rows_before,
    rows_of,
)
from lightning_dp.runs.resume import alone_in, checkpoints_elsewhere, find_checkpoint
from lightning_dp.runs.uninterrupted import (
    BestCheckpoint,
    ContinuesAfterCheckpoint,
    LastCheckpoint,
    PartsOfRanks,
    SameBuckets,
    SeedEachEpoch,
)
from lightning_dp.runs.validation import Config, make_callbacks, naming_keys, validate
from lightning_dp.strategies.complete_files import write_complete_files


def main() -> None:
    """Run the command: a job for the configuration on the command line, or the jobs of a sweep."""
    run(job, "train")


def job(cfg: DictConfig) -> float | None:
    """Run one job: check its configuration, then train and test in its processes, and print the result."""
    is_first = external_rank() in (None, 0)
    with ExitStack() as stack:
        try:
            config = resolved_command(cfg)
            require_named_run_dir(config["ckpt_path"])
            with exits_as_errors():
                num_processes = validate(config)
            # SLURM starts a job again with the same command, whose folder is that of the first time.
            launched = external_rank() is not None or (is_job_of_slurm() and names_folder())
            checkpoint = find_checkpoint(config, in_sweep=is_in_sweep(), launched=launched)
            cfg.ckpt_path = config["ckpt_path"] = None if checkpoint is None else str(checkpoint)
            if is_first:
                stack.enter_context(alone_in(Path(cfg.run_dir), "hydra.run.dir"))
                if (elsewhere := checkpoints_elsewhere(config)) is not None:
                    stack.enter_context(alone_in(elsewhere, "callbacks.checkpoint.dirpath"))
        except Exception as error:
            raise config_error(error) from error
        try:
            if is_first:
                # The folder keeps the configuration of its training, also in hparams.yaml.
                if not keeps_run(config):
                    write_configuration(cfg)
                if cfg.print_config:
                    print(OmegaConf.to_yaml(cfg, resolve=True), flush=True)
            num_nodes = config["trainer"]["num_nodes"]
            with exits_as_errors():
                metrics = launch(train, config, job_logging(), num_processes=num_processes, num_nodes=num_nodes)
            if not is_first:
                return None
            print(result_line(metrics, cfg.run_dir), flush=True)
            return optimized(metrics, config["optimized_metric"], required=is_search())
        except Exception as error:
            raise job_error(cfg.run_dir, error, config) from error


def train(config: Config, logging_config: Config | None) -> dict[str, float]:
    """Fit and test on this rank, plot the curves on rank 0, and return the final metrics.

    Args:
        config: configuration of the job, resolved, in plain dicts and lists.
        logging_config: argument of ``logging.config.dictConfig``, or None to leave logging as it is.
    """
    configure_logging(logging_config)
    seed_everything(config["seed"], workers=True, verbose=False)
    # Other ranks write no metrics, and must not read a file that rank 0 replaces.
    is_first = not external_rank()
    rows = first_rows(config) if is_first and config["ckpt_path"] is not None else []
    keeps = keeps_run(config)  # which does not change whether the run has ended
    if is_first and not keeps:
        Path(config["run_dir"], CURVES).unlink(missing_ok=True)
    trainer, model, data = build(config, loggers=make_loggers(config, rows))
    metrics: dict[str, Any] = {}
    with leaving_nothing():
        for logger in trainer.loggers:
            # The whole configuration, so that loggers can compare the runs of a sweep. Each may change what it gets.
            logger.log_hyperparams(deepcopy(config))
        if config["train"]:
            if config["ckpt_path"] is None:
                StartsFromTheBeginning(trainer)
            with naming_another_model(config["ckpt_path"]):
                trainer.fit(model, datamodule=data, ckpt_path=config["ckpt_path"])
            # A checkpoint from the end of a run leaves nothing to train, so nothing is logged.
            metrics |= last_values(rows)
            metrics |= trainer.callback_metrics
            remove_checkpoints_of_slurm(trainer, config)
        if config["test"]:
            weights = weights_to_test(config, trainer)
            if weights is not None:
                # After a fit it would load the weights that it averages over those in the checkpoint, their mean.
                trainer.callbacks = [each for each in trainer.callbacks if not isinstance(each, WeightAveraging)]
            with naming_another_model(weights):
                tested = trainer.test(model, datamodule=data, ckpt_path=weights, verbose=False)
            for found in tested:  # by each loader
                metrics |= found
    if trainer.is_global_zero and Path(config["run_dir"], METRICS).exists():
        draw_curves(config["run_dir"], at_end=not keeps)
    return {name: float(value) for name, value in metrics.items()}


class StartsFromTheBeginning(Callback):
    """Hides each ``OnExceptionCheckpoint`` of ``trainer`` until its next ``fit`` has chosen a checkpoint.

    Without one, Lightning would continue from what such a callback has saved in another run, or within the first epoch
    of this one, whose rows would be lost.
    """

    def __init__(self, trainer: Any) -> None:
        self.hidden = [each for each in trainer.callbacks if isinstance(each, OnExceptionCheckpoint)]
        trainer.callbacks = [self, *(each for each in trainer.callbacks if each not in self.hidden)]

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Put them back, as the last ones, where Lightning has all that save. It is calling those of the old list."""
        trainer.callbacks = [*(each for each in trainer.callbacks if each is not self), *self.hidden]
        for each in self.hidden:
            each.setup(trainer, pl_module, stage)


@contextmanager
def leaving_nothing() -> Iterator[None]:
    """End the process group and the run of Weights & Biases: the next job of a sweep may run in this process.

    Runs inside share the group. A second one would find the addresses of the first.
    """
    exit_code = 1
    try:
        yield
        exit_code = 0
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        wandb: Any = sys.modules.get("wandb")
        if getattr(wandb, "run", None) is not None:  # the logger of the next job would take it for its own
            wandb.finish(exit_code=exit_code)


def first_rows(config: Config) -> list[dict[str, str]]:
    """Return the rows with which the metrics.csv of a run from a checkpoint begins."""
    if keeps_run(config):  # the weights of an earlier epoch, maybe, and the run has gone on from there
        return rows_of(Path(config["run_dir"]))
    rows = rows_before(Path(config["ckpt_path"]))
    if is_of(Path(config["run_dir"]), Path(config["ckpt_path"])):
        return rows
    # `compare` averages the speed of a run, and that of another one may come from other machines or another strategy.
    return [{name: value for name, value in row.items() if name != IMAGES_PER_S} for row in rows]


def keeps_run(config: Config) -> bool:
    """Return whether the run of a folder stays as it is: it is only tested there, or tried with fast_dev_run."""
    path = config["ckpt_path"]
    trains = config["train"] and not config["trainer"].get("fast_dev_run")
    return not trains and path is not None and is_of(Path(config["run_dir"]), Path(path))


def make_loggers(config: Config, rows: list[dict[str, str]]) -> list[Any]:
    """Return the loggers: those of the group ``logger``, and always that of metrics.csv, which begins with ``rows``.

    The first one is ``self.logger`` of a module.
    """
    chosen = [instantiate(node) for node in config["logger"].values() if node is not None]
    return [*chosen, MetricsFile(config["run_dir"], rows, writes_hyperparameters=not keeps_run(config))]


def remove_checkpoints_of_slurm(trainer: Any, config: Config) -> None:
    """Remove what Lightning has written on SLURM's signal: its test would load that, not the weights at the end."""
    if trainer.is_global_zero:
        for path in Path(config["run_dir"]).glob("hpc_ckpt_*.ckpt"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    trainer.strategy.barrier()  # each rank looks for them


def weights_to_test(config: Config, trainer: Any) -> str | None:
    """Return the checkpoint with the weights to test, or None for those that the model has."""
    if not config["train"]:
        return config["ckpt_path"]
    if config["test"] == "last":
        return None
    (best,) = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, BestCheckpoint)]
    if not best.best_model_path:
        raise ValueError(
            f"test=best: optimized_metric={best.monitor} was not logged before the end of any epoch; validate more "
            "often, or use test=last"
        )
    best.keep_copy(trainer)
    best.require_measured(trainer)
    return str(best.best_model_path)


def configure_logging(config: Config | None) -> None:
    """Configure logging on this rank, or leave it as it is for None. Only rank 0 logs to the file."""
    if config is None:
        return
    for handler in (config.get("handlers") or {}).values():
        if handler.get("class") == "logging.FileHandler":
            handler["errors"] = UNREADABLE
    if external_rank():
        # hydra/job_logging=none has no handler.
        handlers = {name: each for name, each in config.get("handlers", {}).items() if name == "console"}
        config = config | {"handlers": handlers, "root": (config.get("root") or {}) | {"handlers": list(handlers)}}
    logging.config.dictConfig(config)


def build(config: Config, loggers: list[Any] | None = None) -> tuple[Any, Any, Any]:
    """Make the Trainer, the LightningModule and the LightningDataModule of a configuration."""
    # Lightning calls a function that newer versions of torch deprecate.
    warnings.filterwarnings("ignore", message=".*treespec, LeafSpec")
    # For each job of a sweep, since it holds for the whole process. Configurations of old runs do not have it.
    torch.set_float32_matmul_precision(config.get("matmul_precision", "highest"))
    with naming_keys("model", config):
        model = instantiate(config["model"])
    data = instantiate(config["data"])
    made = make_callbacks(config)
    # Other checkpoints of an epoch come before last.ckpt, which holds what these callbacks know of theirs.
    writes_last = made.get("checkpoint")
    keys = [each.state_key for each in made.values()]
    if type(writes_last) is ModelCheckpoint and keys.count(writes_last.state_key) > 1:
        writes_last = made["checkpoint"] = instantiate(config["callbacks"]["checkpoint"], _target_=LastCheckpoint)
    callbacks = sorted(made.values(), key=lambda each: each is writes_last or not isinstance(each, ModelCheckpoint))
    callbacks += [SeedEachEpoch(config["seed"]), PartsOfRanks(), SameBuckets(config.get("ckpt_path"))]
    callbacks.append(ConfigurationInCheckpoint(config))
    if config.get("test") == "best" and config["train"]:
        callbacks.insert(0, BestCheckpoint(config))
    callbacks += [RowsInCheckpoint(logger) for logger in loggers or () if isinstance(logger, MetricsFile)]
    callbacks.insert(0, ContinuesAfterCheckpoint(config.get("ckpt_path"), config["run_dir"]))
    trainer = instantiate(config["trainer"], callbacks=callbacks, logger=loggers or False, _convert_="all")
    if loggers is None:
        # Every run has a logger, so that a module may write to it. Hydra would take this one for a configuration.
        trainer.loggers = [NoLogger(trainer.default_root_dir)]
    if isinstance(trainer.precision_plugin, DoublePrecision):
        # Lightning converts the module after it has loaded a checkpoint, and so rounds the weights in it to 32 bits.
        model = trainer.precision_plugin.convert_module(model)
    write_complete_files(trainer.strategy)
    return trainer, model, data


class NoLogger(DummyLogger):
    """Keeps nothing of what a module logs to it. A module may put files of its own into the run folder."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._folder = folder

    @property
    def save_dir(self) -> str:
        """That folder. It is also the Trainer's ``log_dir``."""
        return self._folder

    @property
    def log_dir(self) -> str:
        """That folder, by the name that Lightning's loggers of files have for it."""
        return self._folder


def result_line(metrics: dict[str, float], run_dir: str) -> str:
    """Return the last line that a run prints, for example ``test/acc=0.9861  run_dir=runs/...``.

    Without test/acc it has all that was tested, as of several loaders, or else of the validation or training.
    """
    folder = os.path.relpath(run_dir)
    tested = sorted(name for name in metrics if name.startswith("test"))
    others = [name for name in ("val/acc", "train/loss") if name in metrics]
    names = ["test/acc"] if "test/acc" in metrics else tested or others[:1]
    shown = "  ".join(f"{name}={metrics[name]:.4f}" for name in names)
    return f"{shown or 'done'}  run_dir={run_dir if folder.startswith('.') else folder}"


def optimized(metrics: dict[str, float], name: str | None, required: bool) -> float | None:
    """Return the metric that a sweep may optimize, or None if it was not logged.

    Raises:
        ValueError: it was not logged, and is required.
    """
    if required and name not in metrics:
        raise ValueError(f"optimized_metric={name} was not logged; use one of {', '.join(sorted(metrics))}")
    return None if name is None else metrics.get(name)
