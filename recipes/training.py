"""What each rank of a run does: build the objects of the configuration, fit, and test."""

from __future__ import annotations

import logging.config
import os
import warnings
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from options import without_contradictions

# Lightning is imported in the functions. When it is imported, it checks whether logging is configured, so `train` must
# configure logging first.

Config = dict[str, Any]


def train(config: Config, logging_config: Config | None) -> dict[str, float]:
    """Fit and test on this rank, plot the curves on rank 0, and return the final metrics.

    Args:
        config: configuration of the job, resolved, in plain dicts and lists.
        logging_config: argument of ``logging.config.dictConfig``, or None to leave logging as it is.
    """
    if logging_config is not None:
        configure_logging(logging_config, int(os.environ.get("RANK", 0)))
    import torch.distributed as dist
    from pytorch_lightning import seed_everything

    # Lightning calls a function that newer versions of torch deprecate.
    warnings.filterwarnings("ignore", message=".*treespec, LeafSpec")
    from continuation import last_values, rows_before

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
        from curves import draw_curves

        draw_curves(config["run_dir"])
    return {name: float(value) for name, value in metrics.items()}


def make_loggers(config: Config, rows: list[dict[str, str]]) -> list[Any]:
    """Return the loggers: always that of metrics.csv, which begins with ``rows``, and those of the group ``logger``."""
    from continuation import MetricsFile

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
    import torch
    from continuation import SeedEachEpoch

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
    from pytorch_lightning.callbacks import ModelCheckpoint

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
