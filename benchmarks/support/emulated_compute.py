"""Networks of 25.5 MB whose step takes a known time, for benchmarks of data parallelism on emulated hosts.

Emulated compute: the rank sleeps, as one whose device is at work. Two cores can carry four ranks that way. Real
compute: a convolutional network on the cores.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Timing:
    """How long the parts of a step take (s). Forward and backward count with emulated compute only."""

    load_s: float
    forward_s: float
    backward_s: float


class _Sleep(torch.autograd.Function):
    """The identity, which takes a time of its own in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        time.sleep(ctx.backward_s)
        return grads[0], None, None


class TimedLinear(nn.Module):
    """A fully-connected layer, (N, inputs) to (N, outputs), that also takes the time of ``timing``.

    It is no `nn.Linear`, so that a planner that looks for fully-connected layers takes it for a layer of another kind;
    and it sleeps itself, so that a timer of layers sees the time where the parameters are.
    """

    def __init__(self, inputs: int, outputs: int, timing: Timing) -> None:
        super().__init__()
        like = nn.Linear(inputs, outputs)
        self.weight = like.weight
        self.bias = like.bias
        self._timing = timing

    def forward(self, x: Tensor) -> Tensor:
        sleep: Callable[[Tensor, float, float], Tensor] = _Sleep.apply
        return F.linear(sleep(x, self._timing.forward_s, self._timing.backward_s), self.weight, self.bias)


class EmulatedNet(nn.Module):
    """Eight linear layers, (N, 64) to (N, 10), which take no time but the emulated one.

    Args:
        timing: each layer takes an equal part of forward and of backward.
        width: of the hidden layers; 1024 gives 6.4 million parameters.
    """

    def __init__(self, timing: Timing, width: int = 1024) -> None:
        super().__init__()
        sizes = [64, *[width] * 7, 10]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))
        self._timing = timing

    def forward(self, x: Tensor) -> Tensor:
        sleep: Callable[[Tensor, float, float], Tensor] = _Sleep.apply
        num_layers = len(self.layers)
        for layer in self.layers:
            x = sleep(x, self._timing.forward_s / num_layers, self._timing.backward_s / num_layers)
            x = F.relu(layer(x))
        return x


class ConvNet(nn.Sequential):
    """6.4 million parameters, most of the time in the first layers and most of the bytes in the last, as in AlexNet."""

    def __init__(self) -> None:
        def convolution(in_channels: int, out_channels: int) -> list[nn.Module]:
            layer = nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False)
            return [layer, nn.BatchNorm2d(out_channels), nn.ReLU()]

        super().__init__(
            *convolution(3, 32),
            nn.MaxPool2d(2),
            *convolution(32, 64),
            nn.MaxPool2d(2),
            *convolution(64, 128),
            nn.MaxPool2d(2),
            *convolution(128, 256),
            nn.Flatten(),
            nn.Linear(4096, 1024),
            nn.ReLU(),
            nn.Linear(1024, 1024),
            nn.ReLU(),
            nn.Linear(1024, 10),
        )


class TimedModule(pl.LightningModule):
    """One of the two networks, with weights that are alike in every run, and momentum SGD."""

    def __init__(self, compute: str, timing: Timing, width: int = 1024) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net: nn.Module = EmulatedNet(timing, width) if compute == "emulated" else ConvNet()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)


class SlowBatches(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Batches that take a time to load: 8 feature vectors, or 16 images for real compute."""

    def __init__(self, count: int, compute: str, timing: Timing) -> None:
        self._count = count
        self._shape = (8, 64) if compute == "emulated" else (16, 3, 32, 32)
        self._load_s = timing.load_s

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(self._load_s)
        generator = torch.Generator().manual_seed(index)
        return torch.randn(self._shape, generator=generator), torch.randint(10, self._shape[:1], generator=generator)


def slow_loader(num_steps: int, world_size: int, compute: str, timing: Timing) -> torch.utils.data.DataLoader[Any]:
    """Return a loader of ``num_steps`` different batches for each rank; Lightning gives each rank its own."""
    return torch.utils.data.DataLoader(SlowBatches(num_steps * world_size, compute, timing), batch_size=None)
