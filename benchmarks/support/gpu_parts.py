"""What gpu_check measures. Each part also runs on a CPU, in small, to see that it works."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from pytorch_lightning.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn.modules.batchnorm import sync_batch_norm  # type: ignore[attr-defined]  # the function of SyncBatchNorm
from torch.torch_version import TorchVersion

from lightning_dp import KrizhevskyHybridStrategy, LayeredSGDStrategy
from lightning_dp.layers import GlobalBatchNorm2d
from lightning_dp.layers.fused_batch_norm import FusedGlobalBatchNormFunction
from lightning_dp.models import ResNet50, resnet20
from support.gpu_profile import cuda_activities, summarize
from support.spread import alternate
from support.training import make_trainer, quiet

Times = dict[str, list[float]]
SYNC, GLOBAL, LOCAL = "SyncBatchNorm", "global batch norm", "local statistics"
# Channels, height and width of activations of ResNet-50.
SHAPES = [(64, 112), (256, 56), (512, 28), (1024, 14), (2048, 7)]
STRATEGIES: dict[str, Callable[..., Any]] = {
    "DDP": partial(DDPStrategy, gradient_as_bucket_view=True),
    "layered SGD, load": partial(LayeredSGDStrategy, 1, overlap="load"),
    "layered SGD, step": partial(LayeredSGDStrategy, 1, overlap="step"),
    "hybrid": partial(KrizhevskyHybridStrategy, head="net.head"),
}


def nccl_engines(torch_version: str) -> dict[str, dict[str, str]]:
    """Return the engines of the backend nccl, each with the environment that chooses it. The default is the first.

    They are the backends that torch calls ``nccl`` and ``nccl-legacy``: there are two from torch 2.15 on.
    """
    has_two = TorchVersion(torch_version) >= "2.15"
    return {"nccl": {}, "nccl-legacy": {"TORCH_DIST_USE_NCCL2": "0"}} if has_two else {"nccl": {}}


def device_type() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def wait() -> None:
    """Wait until the GPU has run all kernels."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


# --- batch norm ---


class InOneRank(nn.BatchNorm2d):
    """The function of several ranks in a group of one, where the layers would take torch's own batch norm."""

    def __init__(self, num_channels: int, function: Any) -> None:
        super().__init__(num_channels)
        self._function = function

    def forward(self, input: Tensor) -> Tensor:
        statistics = (self.running_mean, self.running_var, self.eps, self.momentum)
        group = (dist.group.WORLD, 1) if self._function is sync_batch_norm else (None,)
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        return self._function.apply(input, self.weight, self.bias, *statistics, *group)


def layers_of(num_channels: int, world_size: int) -> dict[str, nn.Module]:
    """Return the sides of the comparison. SyncBatchNorm needs a GPU."""
    layers: dict[str, nn.Module] = {LOCAL: nn.BatchNorm2d(num_channels)}
    if world_size > 1:
        layers[GLOBAL] = GlobalBatchNorm2d(num_channels)
        if torch.cuda.is_available():
            layers[SYNC] = nn.SyncBatchNorm(num_channels)
    elif torch.cuda.is_available():
        layers[GLOBAL] = InOneRank(num_channels, FusedGlobalBatchNormFunction)
        layers[SYNC] = InOneRank(num_channels, sync_batch_norm)
    return layers


def batch_norm(backend: str, dtype: torch.dtype, batch_size: int, num_steps: int, rounds: int) -> dict[str, Times]:
    """Return for each shape the seconds of forward and backward of a layer, one value a round, on rank 0."""
    quiet()
    own_node()
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    device = device_type()
    results = {}
    for channels, size in SHAPES:
        x = torch.randn(batch_size, channels, size, size, device=device, dtype=dtype)
        x = x.contiguous(memory_format=torch.channels_last).requires_grad_()
        dy = torch.randn_like(x)

        def step_s(layer: nn.Module, x: Tensor = x, dy: Tensor = dy) -> float:
            wait()
            start = time.perf_counter()
            for _ in range(num_steps):
                torch.autograd.grad(layer(x), [x, *layer.parameters()], dy)
            wait()
            return (time.perf_counter() - start) / num_steps

        layers = layers_of(channels, dist.get_world_size())
        sides = {name: partial(step_s, layer.to(device)) for name, layer in layers.items()}
        results[f"{batch_size} x {channels} x {size} x {size}"] = alternate(sides, rounds)
    dist.destroy_process_group()
    return results


# --- training ---


class Fixed(pl.LightningModule):
    """Trains a network on one batch that lies on the device: nothing is loaded."""

    def __init__(self, net: nn.Module, batch_size: int, image_size: int, num_classes: int, num_steps: int) -> None:
        super().__init__()
        self.net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._shape = (batch_size, 3, image_size, image_size)
        self._num_classes = num_classes
        self._num_steps = num_steps
        self._batch: tuple[Tensor, Tensor] | None = None

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self._batch is None:
            images = torch.randn(self._shape, device=self.device).contiguous(memory_format=torch.channels_last)
            self._batch = images, torch.randint(self._num_classes, (self._shape[0],), device=self.device)
        images, labels = self._batch
        return F.cross_entropy(self.net(images), labels)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(range(self._num_steps), batch_size=1)  # type: ignore[arg-type]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)


class Clock(pl.Callback):
    """Measures the seconds a step, after ``warm_up`` steps. It waits for the GPU at both ends only."""

    def __init__(self, warm_up: int, num_steps: int) -> None:
        self._warm_up, self._last = warm_up, num_steps
        self._start_s = 0.0
        self.step_s = 0.0

    def on_train_batch_end(self, *_: Any) -> None:
        place = int(_[-1]) + 1
        if place in (self._warm_up, self._last):
            wait()
            now_s = time.perf_counter()
            self.step_s = (now_s - self._start_s) / (self._last - self._warm_up)
            self._start_s = now_s


def images_per_s(
    network: str,
    strategies: list[str],
    backend: str,
    precision: Any,
    shape: tuple[int, int],
    num_steps: int,
    rounds: int,
) -> Times:
    """Return the images a second that all ranks train together: for each strategy, one value a round.

    The strategies take turns in the same processes, so that a slow spell hits all of them, and so that only the first
    round pays for cuDNN's search.

    Args:
        network: ``"ResNet-50"`` or ``"ResNet-20"``.
        strategies: keys of ``STRATEGIES``.
        backend: of the process group.
        precision: that of the Trainer.
        shape: images of a rank in a step, and their height and width.
        num_steps: of each training. The second half is timed.
        rounds: trainings of each strategy.
    """
    quiet()
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")
    world_size = own_node()

    def rate(strategy: str) -> float:
        clock = Clock(num_steps // 2, num_steps)
        trainer = fixed_trainer(strategy, backend, world_size, precision=precision, callbacks=[clock])
        trainer.fit(fixed(network, *shape, num_steps))
        return world_size * shape[0] / clock.step_s

    rates = alternate({name: partial(rate, name) for name in strategies}, rounds)
    dist.destroy_process_group()  # of all strategies: torch cannot make it again under the launcher
    return rates


def fixed(network: str, batch_size: int, image_size: int, num_steps: int) -> Fixed:
    torch.manual_seed(0)
    net, num_classes = (ResNet50(), 1000) if network == "ResNet-50" else (resnet20(), 10)
    return Fixed(net, batch_size, image_size, num_classes, num_steps)


def fixed_trainer(strategy: str, backend: str, world_size: int, **options: Any) -> pl.Trainer:
    """Return a Trainer. Ranks that share the GPU are nodes of one rank each."""
    made = STRATEGIES[strategy](process_group_backend=backend)
    on_gpu = torch.cuda.is_available()
    options = {"accelerator": "gpu" if on_gpu else "cpu", "max_epochs": 1, "use_distributed_sampler": False, **options}
    num_hosts = world_size if on_gpu else 1
    return make_trainer(made, per_host=world_size // num_hosts, num_hosts=num_hosts, **options)


def own_node() -> int:
    """Make this rank a node of its own, so that ranks can share the GPU. Return the number of ranks."""
    if torch.cuda.is_available() and "RANK" in os.environ:
        os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", GROUP_RANK=os.environ["RANK"])
    return int(os.environ.get("WORLD_SIZE", "1"))


class Profile(pl.Callback):
    """Profiles the steps ``first`` to ``last``, the last one left out."""

    def __init__(self, first: int, last: int) -> None:
        self._first, self._last = first, last
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            kinds = [torch.profiler.ProfilerActivity.CUDA]
        self.profile = torch.profiler.profile(activities=kinds)

    def on_train_batch_start(self, *_: Any) -> None:
        if _[-1] == self._first:
            wait()
            self.profile.start()
        elif _[-1] == self._last:
            wait()
            self.profile.stop()


def overlap(strategy: str, backend: str, batch_size: int, image_size: int) -> dict[str, Any]:
    """Return how much of the copies and messages of three steps lies under kernels that compute, on rank 0."""
    quiet()
    profile = Profile(first=4, last=7)
    world_size = own_node()
    trainer = fixed_trainer(strategy, backend, world_size, precision="32-true", callbacks=[profile])
    trainer.fit(fixed("ResNet-50", batch_size, image_size, 9))
    dist.destroy_process_group()
    return summarize(cuda_activities(profile.profile))
