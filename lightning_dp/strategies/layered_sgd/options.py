"""The options of layered SGD: their checks, before any process starts, and the communicator that they describe."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import nn

from lightning_dp.collectives.compression.choice import make_compressor
from lightning_dp.collectives.compression.options import Compression, PowerSGD, check_compression, has_error_feedback
from lightning_dp.collectives.compression.parameters import ParameterTable
from lightning_dp.collectives.compression.stages import CompressedAllReduce
from lightning_dp.collectives.hierarchical import AllReduce, HierarchicalAllReduce, native_all_reduce
from lightning_dp.collectives.ring import ring_all_reduce
from lightning_dp.collectives.topology import RankTopology
from lightning_dp.collectives.tracing import OnStage
from lightning_dp.strategies.layered_sgd.communicator import Communicator
from lightning_dp.strategies.layered_sgd.policy import check_options

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
    device: Literal["cpu", "gpu"]
    compression: Compression | None

    def __post_init__(self) -> None:
        choices: dict[str, tuple[str, Iterable[str]]] = {
            "communicator": (self.communicator, ("leader", "sharded")),
            "overlap": (self.overlap, ("load", "step")),
            "all_reduce": (self.all_reduce, tuple(ALL_REDUCES)),
            "communicator_device": (self.device, ("cpu", "gpu")),
        }
        check_options(**choices)
        check_compression(self.compression)
        if self.compression is None:
            return
        given = f"compression={self.compression!r}"
        if self.device == "gpu":
            raise ValueError(
                f"{given} works in host memory, and communicator_device='gpu' sums on GPUs; use "
                "communicator_device='cpu', the default"
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
                "communicator_device='gpu' needs gradients on GPUs, but this job trains on CPU; remove the option"
            )
        if has_error_feedback(self.compression) and getattr(precision_plugin, "scaler", None) is not None:
            raise ValueError(
                f"compression={self.compression!r} adds what a step left out to the next step's gradient, and a "
                "gradient scaler changes the scale of gradients in between; use precision='bf16-mixed', or "
                "compression='fp16' or 'bf16'"
            )

    def make_communicator(
        self,
        topology: RankTopology,
        rank: int,
        device: torch.device,
        backend: str | None,
        timeout: timedelta,
        on_stage: OnStage,
        module: nn.Module,
        strategy_name: str,
    ) -> Communicator:
        """Return the communicator of this rank; all ranks of the job must call it.

        Args:
            topology: the groups.
            rank: global rank of this process.
            device: where the gradients are.
            backend: of the default process group.
            timeout: of every collective.
            on_stage: called with name, start and end of each stage.
            module: the module that is trained.
            strategy_name: for messages.

        Raises:
            ValueError: a parameter has a type that cannot be compressed.
        """
        on_host = self.device == "cpu" and device.type != "cpu"
        if not on_host and "nccl" in str(backend):
            log.warning(
                f"{strategy_name}(communicator_device='gpu'): NCCL may deadlock, because the communicator and "
                "DDP issue collectives in an order that differs between ranks; use communicator_device='cpu', the "
                "default, which does not use NCCL"
            )
        collective = HierarchicalAllReduce(
            topology, rank, self.communicator, timeout, "gloo" if on_host else None, ALL_REDUCES[self.all_reduce]
        )
        compressed = None
        if self.compression is not None:
            compressor = make_compressor(self.compression)
            compressed = CompressedAllReduce(collective, compressor, _compressible(module, self.compression))
        prioritized = self.overlap == "step"
        return Communicator(collective, prioritized, timeout, device, on_host, on_stage, compressed)


def _compressible(module: nn.Module, compression: Compression) -> ParameterTable:
    for name, parameter in module.named_parameters():
        if not parameter.is_floating_point():
            raise ValueError(
                f"compression={compression!r} cannot round {name}, which is {parameter.dtype}; use compression=None"
            )
    return ParameterTable(module.named_parameters())
