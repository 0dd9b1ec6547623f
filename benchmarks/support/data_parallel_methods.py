"""Data-parallel methods to compare: what each one is, whether it is exact, and the bytes that it must communicate."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.strategies import DDPStrategy
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as post_local
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

from lightning_dp.collectives import CompressionState, compression_hook
from lightning_dp.collectives.compression.compressors import FLOAT_BYTES, message_bytes
from lightning_dp.strategies import LayeredFSDPStrategy, LayeredSGDStrategy, PowerSGD
from support.comm_hooks import POWER_SGD_BUCKET_MB, POWER_SGD_RANK, HookedDDPStrategy, bf16_hook, power_sgd_state
from support.dear import DeARStrategy
from support.finalized_later import HAS_MANUAL_END, FinalizedAfterLoading
from support.sharded_strategies import ShardedStrategy
from support.training import make_trainer

LOCAL_STEPS = 4  # of post-local SGD between two averages of the parameters
ACCUMULATED_STEPS = 4  # batches between two updates
REFERENCE = "DDP"

Shapes = Sequence[Sequence[int]]  # of all parameters


@dataclass(frozen=True)
class Method:
    """One row of the table.

    Attributes:
        make: returns the strategy.
        payload_bytes: bytes a step that an all-reduce over all ranks must combine, for parameters of these shapes.
        departs: what it computes instead of synchronous SGD; empty where it is exact, up to the order of sums.
        trainer_options: options of the Trainer.
    """

    make: Callable[[], Any]
    payload_bytes: Callable[[Shapes], float]
    departs: str = ""
    trainer_options: Mapping[str, Any] = field(default_factory=dict)


def method_trainer(
    method: Method, num_hosts: int, per_host: int, num_steps: int, *callbacks: pl.Callback, **options: Any
) -> pl.Trainer:
    """Return a Trainer that trains with a method for ``num_steps`` batches; ``options`` are the Trainer's."""
    settings = {"max_steps": num_steps, **options, **method.trainer_options, "callbacks": list(callbacks)}
    return make_trainer(method.make(), per_host=per_host, num_hosts=num_hosts, **settings)


class PostLocalSGD(DDPStrategy):
    """Averages gradients inside a host only, and parameters over all ranks every `LOCAL_STEPS` steps.

    PyTorch's hook and averager. Lightning's own option for them drops the hook off CUDA, silently.
    """

    def __init__(self) -> None:
        super().__init__(gradient_as_bucket_view=True)
        self._averager: PeriodicModelAverager | None = None

    def configure_ddp(self) -> None:
        super().configure_ddp()
        assert isinstance(self.model, DistributedDataParallel)
        per_host = self.num_processes
        hosts = [dist.new_group(list(range(first, first + per_host))) for first in range(0, self.world_size, per_host)]
        own_host = hosts[self.global_rank // per_host]
        make_state: Any = post_local.PostLocalSGDState  # without annotations in torch
        state = make_state(None, own_host, start_localSGD_iter=0)
        self.model.register_comm_hook(state, post_local.post_localSGD_hook)
        self._averager = PeriodicModelAverager(period=LOCAL_STEPS, warmup_steps=0)

    def optimizer_step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        output = super().optimizer_step(optimizer, *args, **kwargs)
        assert self._averager is not None
        self._averager.average_parameters([p for group in optimizer.param_groups for p in group["params"]])
        return output


def full_bytes(shapes: Shapes) -> float:
    """Return the bytes of float32 gradients."""
    return float(message_bytes(shapes, None))


def power_sgd_bytes(shapes: Shapes, rank: int = POWER_SGD_RANK, min_compression_rate: float = 2.0) -> float:
    """Return the bytes that PowerSGD (arXiv 1905.13727, Algorithm 1) all-reduces in a step.

    A gradient, viewed as an n x m matrix, becomes P (n x rank) and Q (m x rank). As in torch, it stays whole where that
    saves less than ``min_compression_rate``, and so do all vectors.
    """
    elements = 0
    for shape in shapes:
        rows = shape[0]
        columns = math.prod(shape[1:])
        low_rank = (rows + columns) * min(rows, columns, rank)
        is_compressed = low_rank * min_compression_rate < rows * columns
        elements += low_rank if is_compressed else rows * columns
    return float(FLOAT_BYTES * elements)


def half_bytes(shapes: Shapes) -> float:
    """Return the bytes of 16-bit gradients."""
    return float(message_bytes(shapes, "bf16"))


def int8_bytes(shapes: Shapes) -> float:
    """Return the bytes of 8-bit gradients, with a float32 scale for each block of each parameter."""
    return float(message_bytes(shapes, "int8"))


def _layered(overlap: Any, communicator: Any, compression: Any = None) -> Callable[[], Any]:
    return lambda: LayeredSGDStrategy(overlap=overlap, communicator=communicator, compression=compression)


def _layered_fsdp(overlap: Any, compression: Any = None) -> Callable[[], Any]:
    # Every layer with parameters is a unit, and stays gathered until its backward, as with HSDP.
    def has_own_parameters(part: nn.Module) -> bool:
        return next(part.parameters(recurse=False), None) is not None

    return lambda: LayeredFSDPStrategy(
        overlap=overlap, compression=compression, wrap=has_own_parameters, reshard_after_forward=False
    )


BF16_DEPARTS = "gradients and their sums rounded to bfloat16"
INT8_DEPARTS = "gradients and their sums rounded to 8 bits, with error feedback"
POWER_SGD_DEPARTS = f"gradients approximated by rank {POWER_SGD_RANK}, with error feedback"


def methods(per_host: int) -> dict[str, Method]:
    """Return the methods by name; the first one is the reference of the others.

    Args:
        per_host: ranks on a host. With one rank, leader and sharded communicators are the same, and stand once; and
            HSDP is FSDP2 with nothing sharded.
    """
    communicators = ("leader", "sharded") if per_host > 1 else ("leader",)
    rows = _rivals()
    if HAS_MANUAL_END:
        rows["DDP 2.15, finalized after loading"] = Method(FinalizedAfterLoading, full_bytes)
    if per_host > 1:
        rows["HSDP"] = Method(lambda: ShardedStrategy(shards_inside_hosts=True), full_bytes)
        rows["layered FSDP load"] = Method(_layered_fsdp("load"), full_bytes)
        rows["layered FSDP step"] = Method(_layered_fsdp("step"), full_bytes)
        rows["layered FSDP step, bf16"] = Method(_layered_fsdp("step", "bf16"), half_bytes, BF16_DEPARTS)
        rows["layered FSDP step, int8"] = Method(_layered_fsdp("step", "int8"), int8_bytes, INT8_DEPARTS)
    for overlap in ("load", "step"):
        for communicator in communicators:
            name = f"layered SGD {overlap}, {communicator}" if per_host > 1 else f"layered SGD {overlap}"
            rows[name] = Method(_layered(overlap, communicator), full_bytes)
    for communicator in communicators:
        name = f"layered SGD step, {communicator}" if per_host > 1 else "layered SGD step"
        rows[f"{name}, bf16"] = Method(_layered("step", communicator, "bf16"), half_bytes, BF16_DEPARTS)
        rows[f"{name}, int8"] = Method(_layered("step", communicator, "int8"), int8_bytes, INT8_DEPARTS)
    name = "layered SGD step, leader" if per_host > 1 else "layered SGD step"
    rows[f"{name}, PowerSGD rank {POWER_SGD_RANK}"] = Method(
        _layered("step", "leader", PowerSGD(POWER_SGD_RANK)), power_sgd_bytes, POWER_SGD_DEPARTS
    )
    return rows


# Long because it is a table.
def _rivals() -> dict[str, Method]:
    return {
        REFERENCE: Method(lambda: DDPStrategy(gradient_as_bucket_view=True), full_bytes),
        "DDP + bf16 hook": Method(
            lambda: HookedDDPStrategy(bf16_hook, gradient_as_bucket_view=True), half_bytes, BF16_DEPARTS
        ),
        "DDP + int8 hook": Method(
            # Torch has no such hook. This is the compressor of layered SGD, between all ranks.
            lambda: HookedDDPStrategy(compression_hook, lambda: CompressionState("int8"), gradient_as_bucket_view=True),
            int8_bytes,
            INT8_DEPARTS,
        ),
        f"DDP + PowerSGD rank {POWER_SGD_RANK}": Method(
            lambda: HookedDDPStrategy(
                powerSGD_hook.powerSGD_hook,
                power_sgd_state,
                gradient_as_bucket_view=True,
                bucket_cap_mb=POWER_SGD_BUCKET_MB,
            ),
            power_sgd_bytes,
            POWER_SGD_DEPARTS,
        ),
        f"DDP, {ACCUMULATED_STEPS} batches a step": Method(
            lambda: DDPStrategy(gradient_as_bucket_view=True),
            lambda shapes: full_bytes(shapes) / ACCUMULATED_STEPS,
            f"one update for {ACCUMULATED_STEPS} batches",
            # Lightning counts updates in max_steps: here the loader's end is the run's.
            {"accumulate_grad_batches": ACCUMULATED_STEPS, "max_steps": -1, "max_epochs": 1},
        ),
        "post-local SGD": Method(
            PostLocalSGD,
            lambda shapes: full_bytes(shapes) / LOCAL_STEPS,
            f"gradients averaged inside a host only, parameters over all ranks every {LOCAL_STEPS} steps",
        ),
        # What a step takes on these cores if the network takes no time at all.
        "DDP, nothing sent": Method(
            lambda: HookedDDPStrategy(debugging_hooks.noop_hook, gradient_as_bucket_view=True),
            lambda shapes: 0.0,
            "each rank trains on its own",
        ),
        "FSDP2": Method(ShardedStrategy, full_bytes),
        "DeAR's order": Method(DeARStrategy, full_bytes),
    }


def inter_host_bytes(payload_bytes: float, num_hosts: int) -> float:
    """Return the bytes that must leave a host, and enter it, in an all-reduce of ``payload_bytes`` over all hosts.

    2 (G-1)/G of the payload for G hosts: the bound of any all-reduce, which a ring over the hosts reaches. A ring over
    all ranks, as gloo's, sends more.
    """
    return payload_bytes * 2 * (num_hosts - 1) / num_hosts


def all_reduce_s(payload_bytes: float, rates_bytes_per_s: Sequence[float]) -> float:
    """Return the least time of an all-reduce of ``payload_bytes`` between hosts whose links have these rates (s).

    Every host must send all bytes once, its own or a sum of them, so the slowest link takes at least ``payload_bytes``
    over its rate. And all hosts together send 2 (G-1) times the payload, at most at the sum of their rates; for equal
    rates that is the time of `inter_host_bytes`. A ring ignores which link is slow, and sends 2 (G-1)/G over each.
    """
    num_hosts = len(rates_bytes_per_s)
    if num_hosts == 1:
        return 0.0
    together = 2 * (num_hosts - 1) * payload_bytes / sum(rates_bytes_per_s)
    return max(payload_bytes / min(rates_bytes_per_s), together)
