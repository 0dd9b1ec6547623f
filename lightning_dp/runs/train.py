"""Train and test one configuration: check it, start its ranks, and on each of them build, fit and test.

Each run has a folder: metrics.csv, curves.png, checkpoints/, .hydra/ with the configuration, train.log, hparams.yaml.
Of the checkpoints, last.ckpt has the weights at the end.
"""

from __future__ import annotations

import logging.config
import os
import random
import warnings
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from pytorch_lightning import Callback, LightningModule, Trainer, seed_everything
from pytorch_lightning.callbacks import ModelCheckpoint

from lightning_dp.data.loading import derive_seed
from lightning_dp.launch import external_rank, launch
from lightning_dp.runs.command_line import config_error, job_error, job_logging, run
from lightning_dp.runs.metrics import MetricsFile, draw_curves, last_values, rows_before
from lightning_dp.runs.resume import find_checkpoint
from lightning_dp.runs.validation import Config, check_top_level, validate, without_contradictions


def main() -> None:
    """Run the command: a job for the configuration on the command line, or the jobs of a sweep."""
    run(job, "train")


def job(cfg: DictConfig) -> float | None:
    """Run one job: check its configuration, then train and test in its processes, and print the result."""
    try:
        check_top_level(cfg)
        config = cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=True))
        num_processes = validate(config)
        in_sweep = HydraConfig.get().mode == RunMode.MULTIRUN
        checkpoint = find_checkpoint(config["ckpt_path"], Path(config["run_dir"]), config["name"], in_sweep)
        config["ckpt_path"] = None if checkpoint is None else str(checkpoint)
    except (ValueError, OSError, ImportError) as error:
        raise config_error(cfg.run_dir, error) from error
    is_first = external_rank() in (None, 0)
    if cfg.print_config and is_first:
        print(OmegaConf.to_yaml(cfg, resolve=True), flush=True)
    try:
        metrics = launch(train, config, job_logging(), num_processes=num_processes, num_nodes=cfg.trainer.num_nodes)
        if is_first:
            print(result_line(metrics, cfg.run_dir), flush=True)
        has_trained = cfg.train and 0 not in (cfg.trainer.max_epochs, cfg.trainer.get("max_steps"))
        return optimized(metrics, cfg.optimized_metric if has_trained else None)
    except Exception as error:
        raise job_error(cfg.run_dir, error) from error


def train(config: Config, logging_config: Config | None) -> dict[str, float]:
    """Fit and test on this rank, plot the curves on rank 0, and return the final metrics.

    Args:
        config: configuration of the job, resolved, in plain dicts and lists.
        logging_config: argument of ``logging.config.dictConfig``, or None to leave logging as it is.
    """
    if logging_config is not None:
        configure_logging(logging_config, int(os.environ.get("RANK", 0)))
    # Lightning calls a function that newer versions of torch deprecate.
    warnings.filterwarnings("ignore", message=".*treespec, LeafSpec")
    seed_everything(config["seed"], workers=True, verbose=False)
    # Other ranks write no metrics, and must not read a file that rank 0 replaces.
    is_first = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", 0))) == 0
    rows = rows_before(Path(config["ckpt_path"])) if is_first and config["ckpt_path"] is not None else []
    trainer, model, data = build(config, loggers=make_loggers(config, rows))
    for logger in trainer.loggers:
        # The whole configuration, so that loggers can compare the runs of a sweep.
        logger.log_hyperparams(config)
    metrics: dict[str, Any] = {}
    try:
        if config["train"]:
            trainer.fit(model, datamodule=data, ckpt_path=config["ckpt_path"])
            # A checkpoint from the end of a run leaves nothing to train, so nothing is logged.
            metrics |= last_values(rows)
            metrics |= trainer.callback_metrics
        if config["test"]:
            weights = weights_to_test(config, trainer)
            metrics |= trainer.test(model, datamodule=data, ckpt_path=weights, verbose=False)[0]
    finally:
        if dist.is_initialized():
            # The next job of a sweep may run in this process.
            dist.destroy_process_group()
    if trainer.is_global_zero and Path(config["run_dir"], "metrics.csv").exists():
        draw_curves(config["run_dir"])
    return {name: float(value) for name, value in metrics.items()}


def make_loggers(config: Config, rows: list[dict[str, str]]) -> list[Any]:
    """Return the loggers: always that of metrics.csv, which begins with ``rows``, and those of the group ``logger``."""
    chosen = [instantiate(node) for node in config["logger"].values() if node is not None]
    return [MetricsFile(config["run_dir"], rows), *chosen]


def weights_to_test(config: Config, trainer: Any) -> str | None:
    """Return the checkpoint with the weights to test, or None for those that the model has."""
    if not config["train"]:
        return config["ckpt_path"]
    if config["test"] == "last":
        return None
    # The last one is that of `best_checkpoint`. A user may have others for the same metric.
    *_, best = [callback for callback in trainer.checkpoint_callbacks if callback.monitor == config["optimized_metric"]]
    return best.best_model_path


def configure_logging(config: Config, rank: int) -> None:
    """Configure logging on this rank. Only rank 0 logs to the file."""
    if rank:
        config = config | {"root": config["root"] | {"handlers": ["console"]}}
        config["handlers"] = {"console": config["handlers"]["console"]}
    logging.config.dictConfig(config)


def build(config: Config, loggers: list[Any] | None = None) -> tuple[Any, Any, Any]:
    """Make the Trainer, the LightningModule and the LightningDataModule of a configuration."""
    # For each job of a sweep, since it holds for the whole process. Configurations of old runs do not have it.
    torch.set_float32_matmul_precision(config.get("matmul_precision", "highest"))
    model, data = instantiate(config["model"]), instantiate(config["data"])
    callbacks = [instantiate(node) for node in without_contradictions(config)["callbacks"].values()]
    callbacks.append(SeedEachEpoch(config["seed"]))
    if config.get("test") == "best" and config["train"]:
        callbacks.append(best_checkpoint(config))
    trainer = instantiate(config["trainer"], callbacks=callbacks, logger=loggers or False, _convert_="all")
    return trainer, model, data


def best_checkpoint(config: Config) -> Any:
    """Return the callback that keeps the weights with the best ``optimized_metric`` in checkpoints/best.ckpt."""
    return ModelCheckpoint(
        dirpath=Path(config["run_dir"], "checkpoints"),
        filename="best",
        monitor=config["optimized_metric"],
        mode=config["optimized_mode"],
        save_on_train_epoch_end=True,
        enable_version_counter=False,
    )


def result_line(metrics: dict[str, float], run_dir: str) -> str:
    """Return the last line that a run prints, for example ``test/acc=0.9861  run_dir=runs/...``."""
    folder = os.path.relpath(run_dir)
    shown = [f"{name}={metrics[name]:.4f}" for name in ("test/acc", "val/acc", "train/loss") if name in metrics]
    return f"{shown[0] if shown else 'done'}  run_dir={run_dir if folder.startswith('..') else folder}"


def optimized(metrics: dict[str, float], name: str | None) -> float | None:
    """Return the metric that a sweep optimizes.

    Raises:
        ValueError: no such metric was logged.
    """
    if name is not None and name not in metrics:
        raise ValueError(f"optimized_metric={name} was not logged; there are {', '.join(sorted(metrics))}, or null")
    return None if name is None else metrics[name]


class SeedEachEpoch(Callback):
    """Seed the generators of PyTorch, NumPy and Python from the run's seed and the epoch, the same on all ranks.

    A checkpoint does not hold the state of these generators. With this callback, a run that continues from the end of
    an epoch draws what the uninterrupted run draws, for example in dropout.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Seed the generators at the first batch of an epoch."""
        # Not at the start of the epoch: the loader's iterator draws a number, before it in the first epoch of a run,
        # and after it in all others.
        if batch_idx > 0:
            return
        seed = derive_seed(self._seed, trainer.current_epoch)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
