"""Find a configuration's mistakes before any process is started."""

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

from lightning_dp.launch import check_ranks, external_rank

log = logging.getLogger("validation")

MAX_RANKS_PER_CORE = 8


def validate(config: dict[str, Any]) -> int:
    """Check the arguments, the devices and the data, and get the data if that is asked for; return processes a node.

    Raises:
        ValueError, OSError, ImportError: with what was given, the rule and the remedy.
    """
    for path, node in targets(config):
        check_arguments(path, node)
    trainer = config["trainer"]
    num_processes = count_processes(
        trainer["accelerator"], trainer["devices"], num_gpus=torch.cuda.device_count(), num_cores=os.cpu_count() or 1
    )
    check_ranks(num_processes, trainer["num_nodes"])
    strategy = make(config["strategy"])
    if hasattr(strategy, "topology_of"):
        strategy.topology_of(trainer["num_nodes"], num_processes)
    data = make(config["data"])
    data.check(num_processes * trainer["num_nodes"])
    if external_rank() is None:
        data.prepare_data()  # here, so that no rank waits for a download, and a failed one starts none
    return num_processes


def make(node: dict[str, Any]) -> Any:
    """Build the object of a node; what its constructor refuses is a ValueError with its own words."""
    try:
        return instantiate(node)
    except InstantiationException as error:
        raise ValueError(str(error.__cause__ or error)) from error


def targets(node: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the path and the content of each node that names an object."""
    if isinstance(node, list):
        node = dict(enumerate(node))
    if isinstance(node, dict):
        if "_target_" in node:
            yield path, node
        for key, value in node.items():
            yield from targets(value, f"{path}.{key}" if path else str(key))


def check_arguments(path: str, node: dict[str, Any]) -> None:
    """Raise ValueError if the node's object does not exist or does not know one of the arguments."""
    name = node["_target_"]
    try:
        parameters = inspect.signature(pkgutil.resolve_name(name)).parameters
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{path}._target_={name} cannot be imported: {error}") from error
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    for key in node:
        if not key.startswith("_") and key not in parameters:
            raise ValueError(f"{path}.{key} is no argument of {name}; there are {', '.join(parameters)}")


def count_processes(accelerator: str, devices: Any, *, num_gpus: int, num_cores: int) -> int:
    """Number of processes on a node; one a device.

    Args:
        accelerator: as the Trainer's: ``"cpu"``, ``"gpu"``, ``"auto"``, ...
        devices: as the Trainer's: a number, ``"auto"`` or -1 for all (on CPU: one), or the indices of GPUs.
        num_gpus: GPUs that there are.
        num_cores: CPU cores that there are.

    Raises:
        ValueError: devices that do not exist, or far more ranks than cores.
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
        raise ValueError(f"trainer.devices={devices} must be a number from 1, 'auto', or a list of GPUs on trainer=gpu")
    if on_gpu and needed > num_gpus:
        raise ValueError(f"trainer.devices={devices}, but there are {num_gpus} GPUs; use at most {num_gpus}")
    if not on_gpu and count > MAX_RANKS_PER_CORE * num_cores:
        most = MAX_RANKS_PER_CORE * num_cores
        raise ValueError(f"trainer.devices={devices}, but there are {num_cores} CPU cores; use at most {most} ranks")
    if not on_gpu and count > num_cores:
        log.warning("%d ranks share %d CPU cores: right, but slow", count, num_cores)
    return count
