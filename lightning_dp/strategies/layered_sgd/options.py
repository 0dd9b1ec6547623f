"""The options of layered SGD: their checks, before any process starts, and the communicator that they describe."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import Embedding, EmbeddingBag, Module
from torch.optim import LBFGS, Optimizer

from lightning_dp.collectives.compression.compressors import make_compressor
from lightning_dp.collectives.compression.layout import ParameterTable
from lightning_dp.collectives.compression.options import Compression, PowerSGD, check_compression, has_error_feedback
from lightning_dp.collectives.compression.stages import CompressedAllReduce
from lightning_dp.collectives.groups import OnStage, RankTopology
from lightning_dp.collectives.hierarchical import AllReduce, HierarchicalAllReduce, native_all_reduce
from lightning_dp.collectives.ring import ring_all_reduce
from lightning_dp.strategies.layered_sgd import device_communicator
from lightning_dp.strategies.layered_sgd.device_communicator import DeviceAllReduce, DeviceCommunicator
from lightning_dp.strategies.layered_sgd.gradient_sum import GradientCommunicator
from lightning_dp.strategies.layered_sgd.host_communicator import Communicator, with_background_threads

log = logging.getLogger(__name__)

ALL_REDUCES: dict[str, AllReduce] = {"native": native_all_reduce, "ring": ring_all_reduce}


@dataclass(frozen=True)
class CommunicatorOptions:
    """How gradients are summed; see `LayeredSGDStrategy`.

    Raises:
        ValueError: a value is not known, or two values do not go together.
    """

    communicator: Literal["leader", "sharded"]
    overlap: Literal["load", "step"]
    all_reduce: Literal["native", "ring"]
    device: Literal["auto", "cpu", "gpu"]
    compression: Compression | None

    def __post_init__(self) -> None:
        choices: list[tuple[str, str, Iterable[str]]] = [
            ("communicator", self.communicator, ("leader", "sharded")),
            ("overlap", self.overlap, ("load", "step")),
            ("all_reduce", self.all_reduce, tuple(ALL_REDUCES)),
            ("communicator_device", self.device, ("auto", "cpu", "gpu")),
        ]
        for name, value, allowed in choices:
            if value not in allowed:
                raise ValueError(f"{name}={value!r} is not known; use one of {', '.join(map(repr, allowed))}")
        check_compression(self.compression)
        if self.device == "gpu" and self.all_reduce == "ring":
            raise ValueError(
                "all_reduce='ring' works in host memory, and communicator_device='gpu' sums on GPUs; leave out one"
            )
        if self.compression is None:
            return
        given = f"compression={self.compression!r}"
        if self.device == "gpu":
            raise ValueError(
                f"{given} works in host memory, and communicator_device='gpu' sums on GPUs; leave out "
                "communicator_device"
            )
        if self.all_reduce == "ring":
            raise ValueError(f"{given} has an all-reduce of its own; leave out all_reduce='ring'")
        if isinstance(self.compression, PowerSGD) and self.communicator == "sharded":
            raise ValueError(
                f"{given} approximates whole parameters, and communicator='sharded' cuts them into shards; use "
                "communicator='leader': the factors are small enough for one NIC"
            )

    def check_job(self, devices: Sequence[torch.device], precision_plugin: Any) -> None:
        """Raise ValueError if the options do not fit the job's devices or precision."""
        if self.device == "gpu" and any(device.type == "cpu" for device in devices):
            raise ValueError(
                "communicator_device='gpu' needs gradients on GPUs, but this job trains on CPU; leave out the option"
            )
        if has_error_feedback(self.compression) and getattr(precision_plugin, "scaler", None) is not None:
            raise ValueError(
                f"compression={self.compression!r} adds what a step left out to the next step's gradient, and a "
                "gradient scaler changes the scale of gradients in between; use precision='bf16-mixed', or "
                "compression='fp16' or 'bf16'"
            )

    def prepare_environment(self, devices: Sequence[torch.device], backend: str | None, strategy_name: str) -> None:
        """Set ``NCCL_LAUNCH_ORDER_IMPLICIT`` if NCCL reduces gradients, even if only within a node.

        Args:
            devices: of this node's ranks.
            backend: of the default process group; None if the user leaves the choice to Lightning.
            strategy_name: for messages.
        """
        on_gpus = any(device.type == "cuda" for device in devices)
        uses_nccl = on_gpus and "nccl" in (backend or "nccl")
        if uses_nccl and not device_communicator.request_launch_order():
            log.warning(
                f"{strategy_name}: a process group exists already, so NCCL may not read "
                f"{device_communicator.LAUNCH_ORDER} any more, and ranks may wait for each other for ever; set it to 1 "
                "before the process starts"
            )

    def sums_on_device(self, backend: str | None) -> bool:
        """Return whether gradients are summed where they are, by the default process group's ``backend``."""
        if self.device != "auto":
            return self.device == "gpu"
        return "nccl" in str(backend) and self.compression is None and self.all_reduce == "native"

    def make_communicator(
        self,
        topology: RankTopology,
        rank: int,
        device: torch.device,
        backend: str | None,
        timeout: timedelta,
        on_stage: OnStage,
        module: nn.Module,
        find_unused_parameters: bool,
        strategy_name: str,
        shards: ParameterTable | None = None,
    ) -> GradientCommunicator:
        """Return the communicator of this rank; all ranks of the job must call it.

        Args:
            topology: the groups.
            rank: global rank of this process.
            device: where the gradients are.
            backend: of the default process group.
            timeout: of every collective.
            on_stage: called with name, start and end of each stage.
            module: the module that is trained.
            find_unused_parameters: DDP's option.
            strategy_name: for messages.
            shards: a buffer is this rank's shard of these, and holds the sum over its group already.

        Raises:
            ValueError: a parameter has a type that cannot be compressed.
        """
        prioritized = self.overlap == "step"
        if self.sums_on_device(backend):
            self._warn_of_backend(backend, rank, device, strategy_name)
            on_device = DeviceAllReduce(topology, rank, timeout, shards is not None)
            # Backward fills the buckets of unused parameters at times that differ between ranks. A collective in
            # backward, such as that of a batch norm layer, would come before a bucket on one rank and after it on
            # another.
            early = prioritized and not find_unused_parameters
            return DeviceCommunicator(on_device, early, device, on_stage)

        def on_host() -> Communicator:
            copies = device.type != "cpu"
            host_backend = "gloo" if copies else None
            all_reduce = ALL_REDUCES[self.all_reduce]
            collective = HierarchicalAllReduce(
                topology, rank, self.communicator, timeout, host_backend, all_reduce,
                copies and _may_reduce_on_device(backend, find_unused_parameters),
                of_shards=shards is not None,
            )  # fmt: skip
            compressed = self._compressed(collective, module, shards)
            return Communicator(collective, prioritized, timeout, device, copies, on_stage, compressed)

        # Gloo starts its threads with its groups, the communicator its own.
        return with_background_threads(on_host, device)

    def _compressed(
        self, collective: HierarchicalAllReduce, module: nn.Module, shards: ParameterTable | None
    ) -> CompressedAllReduce | None:
        if self.compression is None:
            return None
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and not parameter.is_floating_point():
                raise ValueError(
                    f"compression={self.compression!r} cannot round {name}, which is {parameter.dtype}; use "
                    "compression=None"
                )
        table = shards or ParameterTable(module.named_parameters())
        return CompressedAllReduce(collective, make_compressor(self.compression), table)

    def _warn_of_backend(self, backend: str | None, rank: int, device: torch.device, strategy_name: str) -> None:
        if "nccl" not in str(backend):
            if device.type != "cpu":
                log.warning(
                    f"{strategy_name}: on GPUs, backend {backend!r} makes the host wait for each sum, so nothing is "
                    "hidden; use communicator_device='cpu'"
                )
        elif rank == 0 and not device_communicator.keeps_launch_order():
            log.warning(
                f"{strategy_name}: ranks may wait for each other for ever, because {device_communicator.LAUNCH_ORDER} "
                "is 0; set it to 1, or use communicator_device='cpu'"
            )


def _may_reduce_on_device(backend: str | None, find_unused_parameters: bool) -> bool:
    """Return whether the communication hook may sum within a node on the GPUs, before the host sums between nodes.

    NCCL must keep the order in which the hook issues the sums, and this order must be the same on all ranks.
    """
    return "nccl" in str(backend) and not find_unused_parameters and device_communicator.keeps_launch_order()


def check_optimizers(optimizers: Iterable[Optimizer], strategy_name: str) -> None:
    """Raise ValueError for an optimizer that cannot work on several ranks, by name."""
    for optimizer in optimizers:
        if isinstance(optimizer, LBFGS):
            raise ValueError(
                f"{strategy_name} cannot run {type(optimizer).__name__}: it calls its closure until this rank's own "
                "loss meets a criterion, so ranks would run different numbers of backward passes and wait for each "
                "other (under DDPStrategy, too); use a first-order optimizer"
            )


def check_layers(module: Module, strategy_name: str) -> None:
    """Raise ValueError for a layer whose gradients cannot be summed in groups, by name."""
    for name, part in module.named_modules():
        if isinstance(part, (Embedding, EmbeddingBag)) and part.sparse and part.weight.requires_grad:
            raise ValueError(f"{strategy_name} cannot sum the sparse gradients of {name!r}; build it with sparse=False")


def check_ddp_options(ddp_kwargs: dict[str, Any]) -> None:
    """Raise ValueError for an option of DDPStrategy and DistributedDataParallel that cannot be given.

    ``gradient_as_bucket_view`` is taken out of ``ddp_kwargs``.
    """
    for name in ("ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper", "model_averaging_period", "mixed_precision"):
        if ddp_kwargs.get(name) is not None:
            raise ValueError(
                f"{name} cannot be given: layered SGD reduces the gradients itself; use DDPStrategy for it"
            )
    for name in ("process_group", "device_mesh"):
        if ddp_kwargs.get(name) is not None:
            raise ValueError(
                f"{name} cannot be given: layered SGD sums the gradients over all ranks of the job; leave it out, or "
                "use DistributedDataParallel for some of the ranks"
            )
    if not ddp_kwargs.pop("gradient_as_bucket_view", True):
        raise ValueError(
            "gradient_as_bucket_view=False cannot work: the gradients must be views of the buckets, which are summed "
            "in place after backward; leave the option out"
        )
