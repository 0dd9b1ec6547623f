"""What global_batch_norm_throughput measures: training steps and single layers, with statistics of each kind."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_dp._private.torch_names import ignore_in_ddp
from lightning_dp.layers import GlobalBatchNorm2d, apply_global_batch_norm, batch_statistics, global_batch_norm_layers
from lightning_dp.models import resnet20
from support.spread import alternate

RESNET50_SHAPES = [(64, 112), (256, 56), (512, 28), (1024, 14), (2048, 7)]  # channels, height and width


class Training:
    """ResNet-20 in training, whose layers' statistics are global or local from step to step.

    All sides of a comparison use one model: where a model lies in memory makes several percent of difference.
    """

    def __init__(self, local_batch_size: int, distributed: bool) -> None:
        torch.manual_seed(0)
        self._model: nn.Module = resnet20()
        apply_global_batch_norm(self._model)
        self.layers: list[Any] = list(global_batch_norm_layers(self._model))
        if distributed:
            # Without broadcasts of running statistics, as the callback does it.
            ignore_in_ddp(self._model, [name for name, _ in self._model.named_buffers()])
            self._model = DistributedDataParallel(self._model)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01, momentum=0.9)
        self._x = torch.randn(local_batch_size, 3, 32, 32)
        self._y = torch.randint(10, (local_batch_size,))

    def step(self, is_global: bool) -> None:
        """Do one training step."""
        for layer in self.layers:
            layer.is_global = is_global
        self._optimizer.zero_grad()
        torch.autograd.backward(F.cross_entropy(self._model(self._x), self._y))
        self._optimizer.step()

    def step_s(self, global_steps: Sequence[bool]) -> float:
        """Return the seconds a step, of steps with statistics as given."""
        start = time.perf_counter()
        for is_global in global_steps:
            self.step(is_global)
        if dist.is_initialized():
            dist.barrier()
        return (time.perf_counter() - start) / len(global_steps)


def count_collectives(training: Training, is_global: bool) -> dict[str, int]:
    """Return what batch norm's collectives of one step hand over on this rank; DDP's own do not pass here."""
    counts = {"collectives": 0, "bytes": 0}
    module: Any = batch_statistics
    gather = module.small_all_gather

    def counted(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
        counts["collectives"] += 1
        counts["bytes"] += tensor.numel() * tensor.element_size()
        gathered: Tensor = gather(tensor, group)
        return gathered

    module.small_all_gather = counted
    try:
        training.step(is_global)
    finally:
        module.small_all_gather = gather
    return counts


def in_group(part: Callable[..., Any], *arguments: Any) -> Any:
    """Call ``part`` on each rank. Its models are gone when the group goes: DDP must not be the last to hold it."""
    dist.init_process_group("gloo")
    try:
        return part(*arguments)
    finally:
        dist.destroy_process_group()


def give_own_cores() -> None:
    """Give each rank cores of its own, as far as they go: a message must not wait for another rank's computation."""
    cores = os.cpu_count() or 1
    rank = dist.get_rank()
    share = max(1, cores // dist.get_world_size())
    torch.set_num_threads(share)
    if cores >= dist.get_world_size() and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, range(rank * share, (rank + 1) * share))


def throughput(local_batch_size: int, num_steps: int, rounds: int) -> dict[str, Any]:
    """Train with each kind of statistics in turn, on each rank; return the seconds a step, and what is communicated."""
    give_own_cores()
    training = Training(local_batch_size, distributed=True)
    sides = {
        "local": [False] * num_steps,
        "global": [True] * num_steps,
        "adaptive": [index < num_steps / 2 for index in range(num_steps)],
    }
    times = alternate({name: partial(training.step_s, steps) for name, steps in sides.items()}, rounds)
    counts = {name: count_collectives(training, name == "global") for name in ("local", "global")}
    return {"times": times, "counts": counts}


def local_phase(local_batch_size: int, num_pairs: int) -> dict[str, list[float]]:
    """Do single steps with torch's layers and with local statistics in turn; return the seconds of each."""
    torch.set_num_threads(1)
    training = Training(local_batch_size, distributed=False)

    def step_s(kind: type[nn.BatchNorm2d]) -> float:
        for layer in training.layers:
            layer.__class__ = kind  # the same memory for both
        return training.step_s([False])

    kinds: dict[str, type[nn.BatchNorm2d]] = {"torch": nn.BatchNorm2d, "local": GlobalBatchNorm2d}
    return alternate({name: partial(step_s, kind) for name, kind in kinds.items()}, num_pairs)


def on_gpu(num_steps: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Compare with SyncBatchNorm on each of two ranks of one GPU; return the seconds of each shape."""
    results = {}
    for channels, size in RESNET50_SHAPES:
        x = torch.randn(32, channels, size, size, device="cuda", requires_grad=True)
        dy = torch.randn_like(x)

        def step_s(layer: nn.Module, x: Tensor = x, dy: Tensor = dy) -> float:
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(num_steps):
                torch.autograd.grad(layer(x), [x, *layer.parameters()], dy)
            torch.cuda.synchronize()
            return (time.perf_counter() - start) / num_steps

        layers = {"sync": nn.SyncBatchNorm(channels).cuda(), "global": GlobalBatchNorm2d(channels).cuda()}
        sides = {name: partial(step_s, layer) for name, layer in layers.items()}
        results[f"32 x {channels} x {size} x {size}"] = alternate(sides, rounds)
    return results
