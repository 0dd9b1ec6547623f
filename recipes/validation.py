"""Find mistakes in a configuration before any process is started."""

from __future__ import annotations

import inspect
import logging
import os
import pkgutil
from collections.abc import Iterator
from typing import Any

import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from options import check_together

from lightning_dp.launch import check_ranks, external_rank

log = logging.getLogger("validation")

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
