"""Is a configuration right? Mistakes are found before any process is started."""

from __future__ import annotations

import difflib
import inspect
import logging
import os
import pkgutil
import re
from collections.abc import Iterator
from typing import Any

import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from lightning_dp.launch import check_ranks, external_rank

log = logging.getLogger("validation")

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


MAX_RANKS_PER_CORE = 8


def validate(config: dict[str, Any]) -> int:
    """Check arguments, devices and data, download the data if requested, and return the number of processes per node.

    Raises:
        ValueError, OSError, ImportError: the message has the given value, the rule and the remedy.
    """
    for path, node in targets(config):
        check_arguments(path, node)
    for group in ("callbacks", "logger"):
        check_have_targets(group, config[group])
    check_together(config)
    trainer = config["trainer"]
    num_processes = count_processes(
        trainer["accelerator"], trainer["devices"], num_gpus=torch.cuda.device_count(), num_cores=os.cpu_count() or 1
    )
    check_ranks(num_processes, trainer["num_nodes"])
    strategy = make(config["strategy"])
    if hasattr(strategy, "topology_of"):
        strategy.topology_of(trainer["num_nodes"], num_processes)
    for node in [*config["callbacks"].values(), *config["logger"].values()]:
        if node is not None:  # built in each rank again; here for the errors of their constructors
            make(node)
    data = make(config["data"])
    data.check(num_processes * trainer["num_nodes"])
    if external_rank() is None:
        # Before any rank starts: no rank waits for a download, and a download that fails starts no rank.
        data.prepare_data()
    return num_processes


def make(node: dict[str, Any]) -> Any:
    """Build the object of a node. If its constructor raises an error, raise ValueError with the same message."""
    try:
        return instantiate(node)
    except InstantiationException as error:
        raise ValueError(str(error.__cause__ or error)) from error


def targets(node: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield path and content of each node that has a ``_target_``."""
    if isinstance(node, list):
        node = dict(enumerate(node))
    if isinstance(node, dict):
        if "_target_" in node:
            yield path, node
        for key, value in node.items():
            yield from targets(value, f"{path}.{key}" if path else str(key))


def check_have_targets(group: str, nodes: dict[str, Any]) -> None:
    """Raise ValueError for options of an object that the chosen file of a group does not have, but another one has."""
    for name, node in nodes.items():
        if node is not None and not (isinstance(node, dict) and "_target_" in node):
            raise ValueError(
                f"{group}.{name}={node} has no _target_: the chosen {group} have no {name}; choose a file that has it "
                f"({group}=NAME), or write {group}.{name}=null"
            )


def check_arguments(path: str, node: dict[str, Any]) -> None:
    """Raise ValueError if the target of a node does not exist or does not accept one of the arguments."""
    name = node["_target_"]
    try:
        parameters = inspect.signature(pkgutil.resolve_name(name)).parameters
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{path}._target_={name} cannot be imported: {error}") from error
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    for key in node:
        if not key.startswith("_") and key not in parameters:
            raise ValueError(f"{path}.{key} is not an argument of {name}; there are {', '.join(parameters)}")


def count_processes(accelerator: str, devices: Any, *, num_gpus: int, num_cores: int) -> int:
    """Return the number of processes per node: one per device.

    Args:
        accelerator: argument of the Trainer: ``"cpu"``, ``"gpu"``, ``"auto"``, ...
        devices: argument of the Trainer: a number, ``"auto"`` or -1 for all (on CPU: one), or the indices of GPUs.
        num_gpus: number of GPUs of this node.
        num_cores: number of CPU cores of this node.

    Raises:
        ValueError: the devices do not exist, or there would be far more ranks than cores.
    """
    on_gpu = accelerator in ("gpu", "cuda") or (accelerator == "auto" and num_gpus > 0)
    if on_gpu and num_gpus == 0:
        raise ValueError(f"trainer.accelerator={accelerator}, but there is no GPU that torch can use; use trainer=cpu")
    if devices in ("auto", "-1", -1):
        return num_gpus if on_gpu else 1
    if isinstance(devices, list) and on_gpu and devices:
        count, needed = len(devices), max(devices) + 1
    elif str(devices).isdigit() and int(devices) > 0:
        count = needed = int(devices)
    else:
        raise ValueError(f"trainer.devices={devices} must be 1 or more, 'auto', or a list of GPUs with trainer=gpu")
    if on_gpu and needed > num_gpus:
        raise ValueError(f"trainer.devices={devices}, but there are {num_gpus} GPUs; use at most {num_gpus}")
    if not on_gpu and count > MAX_RANKS_PER_CORE * num_cores:
        limit = MAX_RANKS_PER_CORE * num_cores
        raise ValueError(f"trainer.devices={devices}, but there are {num_cores} CPU cores; use at most {limit} ranks")
    if not on_gpu and count > num_cores:
        log.warning("%d ranks share %d CPU cores: the result is right, but training is slow", count, num_cores)
    return count


# --- the top-level keys: which ones exist, and which go together ---


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
