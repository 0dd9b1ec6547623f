"""What each rank of a run does: build the objects of the configuration, fit, and test."""

from __future__ import annotations

import logging.config
import os
import warnings
from pathlib import Path
from typing import Any

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

    # The logger warns that the run folder is not empty. It contains Hydra's files, which stay.
    warnings.filterwarnings("ignore", message="Experiment logs directory")
    # Lightning calls a function that newer versions of torch deprecate.
    warnings.filterwarnings("ignore", message=".*treespec, LeafSpec")
    seed_everything(config["seed"], workers=True, verbose=False)
    trainer, model, data = build(config)
    try:
        trainer.fit(model, datamodule=data)
        metrics = dict(trainer.callback_metrics)
        metrics |= trainer.test(model, datamodule=data, verbose=False)[0]
    finally:
        if dist.is_initialized():
            # The next job of a sweep may run in this process.
            dist.destroy_process_group()
    if trainer.is_global_zero and Path(config["run_dir"], "metrics.csv").exists():
        from curves import draw_curves

        draw_curves(config["run_dir"])
    return {name: float(value) for name, value in metrics.items()}


def configure_logging(config: Config, rank: int) -> None:
    """Configure logging on this rank. Only rank 0 logs to the file."""
    if rank:
        config = config | {"root": config["root"] | {"handlers": ["console"]}}
        config["handlers"] = {"console": config["handlers"]["console"]}
    logging.config.dictConfig(config)


def build(config: Config, **trainer_options: Any) -> tuple[Any, Any, Any]:
    """Make the Trainer, the LightningModule and the LightningDataModule of a configuration."""
    from hydra.utils import instantiate

    model, data = instantiate(config["model"]), instantiate(config["data"])
    callbacks = [instantiate(callback) for callback in config["callbacks"].values() if callback is not None]
    trainer = instantiate(config["trainer"], callbacks=callbacks, _convert_="all", **trainer_options)
    return trainer, model, data


def result_line(metrics: dict[str, float], run_dir: str) -> str:
    """Return the last line that a run prints, for example ``test/acc=0.9861  run_dir=runs/...``."""
    folder = os.path.relpath(run_dir)
    return f"test/acc={metrics['test/acc']:.4f}  run_dir={run_dir if folder.startswith('..') else folder}"


def optimized(metrics: dict[str, float], name: str | None) -> float | None:
    """Return the metric that a sweep optimizes.

    Raises:
        ValueError: no such metric was logged.
    """
    if name is not None and name not in metrics:
        raise ValueError(f"optimized_metric={name} was not logged; there are {', '.join(sorted(metrics))}, or null")
    return None if name is None else metrics[name]
