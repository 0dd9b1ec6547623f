"""The bytes that a rank sends in a training step, computed from a configuration."""

from __future__ import annotations

from statistics import mean
from typing import Any

import torch
from pytorch_lightning.strategies import DDPStrategy
from torch import nn

from lightning_dp.callbacks import AdaptiveGlobalBatchNorm
from lightning_dp.planner.traffic import half_ring_cost, head_traffic, hierarchical_cost, ring_cost
from lightning_dp.runs.hydra_versions import instantiate
from lightning_dp.strategies import KrizhevskyHybridStrategy, LayeredFSDPStrategy, LayeredSGDStrategy

ELEMENT_BYTES = 4
OF_32_BITS = ("None", "32", "32-true", "16", "16-mixed", "bf16", "bf16-mixed")  # what the Trainer's precision may be
BATCH_NORM = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
PACKAGES = ("lightning_dp", "pytorch_lightning")
# Callbacks of Lightning that change what is sent: which parameters are trained, or how many batches a step has.
CHANGING = ("BackboneFinetuning", "BaseFinetuning", "GradientAccumulationScheduler", "LambdaCallback")


def bytes_per_step(config: dict[str, Any], global_share: float = 0.0) -> float | None:
    """Return the bytes that a rank sends in a training step, the mean over the ranks.

    It counts 32-bit gradients, the features and activations of a sharded head, and the statistics of global batch norm,
    but no running statistics, which DDP sends from rank 0 before a forward. All-reduces are taken to be rings.
    Parameters that the network's constructor has frozen are not counted, but FSDP2 gathers them. A step with several
    batches (``accumulate_grad_batches``) sends what belongs to a batch in each of them.

    None where something else may decide what is sent: a module, callbacks or a strategy of the user's (a network may
    be), other strategies than DDP and those of this package, callbacks of Lightning that freeze parameters or change
    how many batches a step has, plugins, compression, SyncBatchNorm, gradients of 16 or 64 bits; and if the
    configuration does not say how many ranks there were, or for the hybrid how many images.

    Args:
        config: the configuration of a run, resolved.
        global_share: share of the steps in which batch norm's statistics were global.
    """
    trainer = config["trainer"]
    devices, num_nodes = _ranks_per_node(trainer["devices"]), int(trainer["num_nodes"])
    if devices is None:
        return None
    world_size = devices * num_nodes
    if world_size == 1:
        return 0.0
    if not _has_known_parts(config):
        return None
    module, strategy = instantiate(config["model"]), instantiate(config["strategy"])
    if not isinstance(strategy, DDPStrategy | LayeredFSDPStrategy) or not _sends_32_bits(module):
        return None
    if not all(type(each).__module__.partition(".")[0] in PACKAGES for each in (module, strategy)):
        return None
    gradients = mean(
        _gradient_bytes(module, strategy, config, rank, (num_nodes, devices)) for rank in range(world_size)
    )
    if not global_share:
        return gradients
    num_sharing = _ranks_that_share_statistics(config, world_size)
    if num_sharing is None:
        return None
    channels = [layer.num_features for layer in module.modules() if isinstance(layer, BATCH_NORM)]
    # Each rank sends its 2C + 1 numbers in the forward and 2C in the backward to each rank that it shares them with.
    statistics = sum(4 * count + 1 for count in channels) * ELEMENT_BYTES * (num_sharing - 1)
    return gradients + global_share * _batches_per_step(config) * statistics


def _has_known_parts(config: dict[str, Any]) -> bool:
    """Return whether nothing in the configuration, beside module and strategy, sends more or less than is counted."""
    trainer, strategy = config["trainer"], config["strategy"]
    if trainer.get("sync_batchnorm") or trainer.get("plugins") or str(trainer.get("precision")) not in OF_32_BITS:
        return False
    if isinstance(strategy, dict):
        # Compression depends on the parameters' shapes; the strategy counts it while it trains.
        if any(strategy.get(name) is not None for name in ("compression", "ddp_comm_hook", "mixed_precision")):
            return False
        # The hybrid sends features of each image, and for others a batch size may be that of a rank.
        if strategy.get("head") and not _is_of_packages(config["data"]):
            return False
    callbacks = [each for each in (config.get("callbacks") or {}).values() if each is not None]
    return all(_is_of_packages(each) and each["_target_"].rpartition(".")[2] not in CHANGING for each in callbacks)


def _is_of_packages(node: dict[str, Any]) -> bool:
    return node["_target_"].partition(".")[0] in PACKAGES


def _sends_32_bits(module: nn.Module) -> bool:
    synchronizes = any(isinstance(layer, nn.SyncBatchNorm) for layer in module.modules())
    return not synchronizes and all(each.dtype == torch.float32 for each in module.parameters() if each.requires_grad)


def _batches_per_step(config: dict[str, Any]) -> int:
    return config["trainer"].get("accumulate_grad_batches") or 1


def _ranks_that_share_statistics(config: dict[str, Any], world_size: int) -> int | None:
    """Return the size of the groups of `AdaptiveGlobalBatchNorm`; None if statistics are global by something else."""
    for node in (config.get("callbacks") or {}).values():
        if node is not None and node["_target_"].endswith(f".{AdaptiveGlobalBatchNorm.__name__}"):
            return node.get("group_size") or world_size
    return None


def _ranks_per_node(devices: Any) -> int | None:
    """Return how many ranks a node has by this argument of the Trainer; None for "auto" and -1."""
    if isinstance(devices, list):
        return len(devices)
    return int(devices) if str(devices).isdigit() else None


def _gradient_bytes(module: nn.Module, strategy: Any, config: dict[str, Any], rank: int, ranks: tuple[int, int]) -> int:
    """Return what one rank sends. ``ranks``: number of nodes, and of ranks on each."""
    # What callbacks freeze later is counted.
    trained = [each for each in module.parameters() if each.requires_grad or isinstance(strategy, LayeredFSDPStrategy)]
    num_elements = sum(parameter.numel() for parameter in trained)
    world_size = ranks[0] * ranks[1]
    if isinstance(strategy, KrizhevskyHybridStrategy):
        return _hybrid_bytes(module, config, num_elements, world_size, rank)
    if isinstance(strategy, LayeredSGDStrategy):
        topology = strategy.topology_of(*ranks)
        if topology.num_groups > 1:
            size = topology.group_size
            communicator = config["strategy"].get("communicator", "leader")
            return hierarchical_cost(
                num_elements, ELEMENT_BYTES, topology.num_groups, size, communicator, rank % size
            ).bytes_sent
    if isinstance(strategy, LayeredFSDPStrategy):
        topology = strategy.topology_of(*ranks)
        size, sent_by = topology.group_size, rank % topology.group_size
        cost = hierarchical_cost(num_elements, ELEMENT_BYTES, topology.num_groups, size, "sharded", sent_by)
        # Parameters are gathered where gradients would be, and once more for backward.
        is_gathered_again = config["strategy"].get("reshard_after_forward", True)
        again = half_ring_cost(num_elements, ELEMENT_BYTES, size, sent_by).bytes_sent if is_gathered_again else 0
        # Within the group in each batch, between groups once in a step.
        return cost.inter_group_bytes + _batches_per_step(config) * (cost.intra_group_bytes + again)
    return ring_cost(num_elements, ELEMENT_BYTES, world_size, rank).bytes_sent


def _hybrid_bytes(module: nn.Module, config: dict[str, Any], num_elements: int, world_size: int, rank: int) -> int:
    options = config["strategy"]
    head = module.get_submodule(options["head"])
    layers = [layer for layer in head.modules() if isinstance(layer, nn.Linear)]
    trunk_elements = num_elements - sum(each.numel() for each in head.parameters() if each.requires_grad)
    widths = [layers[0].in_features, *(layer.out_features for layer in layers)]
    batch_sizes = [config["data"]["batch_size"] // world_size] * world_size
    num_passes = options.get("num_passes")
    scheme: Any = options.get("scheme") or ("c" if num_passes or options.get("variable_batch") else "a")
    loss: Any = config["model"].get("loss", "cross_entropy") if hasattr(module, "head_step") else "own"
    head_cost = head_traffic(widths, batch_sizes, ELEMENT_BYTES, scheme, loss, rank, num_passes=num_passes)
    trunk_bytes = ring_cost(trunk_elements, ELEMENT_BYTES, world_size, rank).bytes_sent
    return trunk_bytes + _batches_per_step(config) * sum(cost.bytes_sent for cost in head_cost.values())
