"""The top-level keys of a configuration: which ones exist, and which go together."""

from __future__ import annotations

import difflib
import pkgutil
import re
from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

Config = dict[str, Any]

READ_BY_RECIPES = {
    *("name", "seed", "run_dir", "ckpt_path", "train", "test", "optimized_metric", "optimized_mode", "print_config"),
    "matmul_precision",
    *("data", "num_classes", "model", "optim", "strategy", "trainer", "callbacks", "logger"),
}

# Option of the Trainer -> the base class in pytorch_lightning.callbacks of what it switches off.
SWITCHES = {
    "enable_checkpointing": "Checkpoint",
    "enable_progress_bar": "ProgressBar",
    "enable_model_summary": "ModelSummary",
}


def check_top_level(config: DictConfig, *also_read: str) -> None:
    """Raise ValueError for a key that neither the recipes nor an interpolation in the configuration reads.

    Args:
        config: the whole configuration.
        also_read: keys that this recipe reads, and not all do.
    """
    node = OmegaConf.to_container(config, resolve=False)
    interpolated = {name for text in _strings(node) for name in re.findall(r"[{:]\s*(\w+)", text)}
    read = READ_BY_RECIPES | {*also_read} | interpolated
    for key in map(str, config):
        if key not in read:
            similar = difflib.get_close_matches(key, sorted(READ_BY_RECIPES), n=1)
            remedy = f"did you mean {similar[0]}?" if similar else f"there are {', '.join(sorted(READ_BY_RECIPES))}"
            raise ValueError(f"nothing reads the key {key!s}; {remedy}")


def _strings(node: Any) -> Iterator[str]:
    """Yield the strings of a configuration that contain an interpolation."""
    if isinstance(node, str) and "${" in node:
        yield node
    elif isinstance(node, dict | list):
        for value in node.values() if isinstance(node, dict) else node:
            yield from _strings(value)


def check_together(config: Config) -> None:
    """Raise ValueError for options that contradict each other."""
    trainer, metric = config["trainer"], config["optimized_metric"]
    if "logger" in trainer:
        raise ValueError("trainer.logger cannot be given; choose loggers with logger=csv, tensorboard, wandb or mlflow")
    if config["test"] not in ("last", "best", False):
        raise ValueError(f"test={config['test']} must be last, best or false")
    if config["optimized_mode"] not in ("max", "min"):
        raise ValueError(f"optimized_mode={config['optimized_mode']} must be max or min")
    if config["matmul_precision"] not in ("highest", "high", "medium"):
        raise ValueError(f"matmul_precision={config['matmul_precision']} must be highest, high or medium")
    if not config["train"]:
        if not config["test"]:
            raise ValueError("train=false and test=false leave nothing to do; use test=last to test ckpt_path")
        if config["ckpt_path"] is None:
            raise ValueError("train=false needs weights to test; give ckpt_path=PATH or ckpt_path=last")
        return
    if config["test"] == "best":
        _check_best(trainer, metric, config["data"])
    if not config["test"] and metric is not None and metric.startswith("test/"):
        raise ValueError(f"optimized_metric={metric} is not measured with test=false; use val/acc, or null")


def _check_best(trainer: Config, metric: str | None, data: Config) -> None:
    """Raise ValueError unless there will be a checkpoint with the best ``metric``."""
    if metric is None or metric.startswith("test/"):
        raise ValueError(
            f"test=best needs a metric that is measured during training, not optimized_metric={metric}; use val/acc"
        )
    if metric.startswith("val/") and 0 in (data.get("val_size"), data.get("num_val")):
        raise ValueError(f"test=best needs optimized_metric={metric}, but no images are held out for validation")
    if not trainer["enable_checkpointing"] or trainer.get("fast_dev_run"):
        raise ValueError("test=best needs checkpoints; leave enable_checkpointing and fast_dev_run as they are")


def without_contradictions(config: Config) -> Config:
    """Leave out the callbacks of a kind that the Trainer's ``enable_...`` options switch off."""
    off = tuple(
        pkgutil.resolve_name(f"pytorch_lightning.callbacks.{kind}")
        for option, kind in SWITCHES.items()
        if not config["trainer"].get(option, True)
    )
    kept = {
        name: node
        for name, node in config["callbacks"].items()
        if node is not None and not _is_kind(pkgutil.resolve_name(node["_target_"]), off)
    }
    return config | {"callbacks": kept}


def _is_kind(target: Any, kinds: tuple[type, ...]) -> bool:
    return isinstance(target, type) and issubclass(target, kinds)
