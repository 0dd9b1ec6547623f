"""AlexNet for the hybrid benchmarks: its own parameters, with images small enough for a few processor cores."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_dp.losses import sharded_binary_cross_entropy
from lightning_dp.models import AlexNet, TrunkAndHead

NUM_CLASSES = 1000
IMAGE_SIZE = 64  # not 224: the trunk then computes a tenth to a fifteenth, about as much as the head
FULL_SIZE = "full"
SMALL = "small"


def alexnet(size: str = FULL_SIZE) -> TrunkAndHead:
    """Return AlexNet, 61,838,248 parameters, its last pooling to 6 x 6 whatever the size of the images.

    Args:
        size: "full"; or "small" for smoke runs, the same layers with 1/16 of the filters and of the hidden units.
    """
    if size == FULL_SIZE:
        net: TrunkAndHead = AlexNet(NUM_CLASSES)
    else:
        hidden = 4096 // 16
        trunk = AlexNet(2, filters=(4, 12, 24, 24, 16)).trunk
        head = nn.Sequential(
            nn.Linear(16 * 6 * 6, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(),
            nn.Linear(hidden, NUM_CLASSES),
        )  # fmt: skip
        net = TrunkAndHead(trunk, head)
    assert isinstance(net.trunk, nn.Sequential)
    pools = [place for place, layer in enumerate(net.trunk) if isinstance(layer, nn.MaxPool2d)]
    net.trunk[pools[-1]] = nn.AdaptiveAvgPool2d(6)
    return net


def num_parameters(module: nn.Module) -> int:
    """Return the number of parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


def head_widths(net: TrunkAndHead) -> list[int]:
    """Return what enters each linear layer of the head, and the output."""
    layers = [layer for layer in net.head.modules() if isinstance(layer, nn.Linear)]
    return [*(layer.in_features for layer in layers), layers[-1].out_features]


def logistic_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Return the paper's loss: cross-entropy of a logistic unit for each class, the sum over classes, mean over images.

    logits: (N, C); target: (N,), class indices.
    """
    is_target = F.one_hot(target, logits.shape[1]).to(logits.dtype)
    return F.binary_cross_entropy_with_logits(logits, is_target, reduction="sum") / len(target)


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    """Return the paper's optimizer. Fused, it passes over the memory of each parameter once."""
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, weight_decay=5e-4, fused=True)


class WholeModule(pl.LightningModule):
    """An ordinary module: strategies see a network and a loss."""

    def __init__(self, net: TrunkAndHead) -> None:
        super().__init__()
        self.trunk = net.trunk
        self.head = net.head

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, target = batch
        return logistic_loss(self.head(self.trunk(x)), target)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(self.parameters())


class SplitModule(WholeModule):
    """The same, with the boundary between trunk and head marked by ``head_step``."""

    def head_step(self, features: Tensor, target: Tensor) -> Tensor:
        return sharded_binary_cross_entropy(self.head, features, target, "sum") / len(target)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, target = batch
        return self.head_step(self.trunk(x), target)


class RandomImages(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Batches of the given sizes, one after another, from the same images: they take no time to load."""

    def __init__(self, batch_sizes: list[int], rank: int, image_size: int = IMAGE_SIZE) -> None:
        generator = torch.Generator().manual_seed(rank)
        self.x = torch.randn(max(batch_sizes), 3, image_size, image_size, generator=generator)
        self.target = torch.randint(NUM_CLASSES, (max(batch_sizes),), generator=generator)
        self.batch_sizes = batch_sizes

    def __len__(self) -> int:
        return len(self.batch_sizes)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index >= len(self):
            raise IndexError(index)
        return self.x[: self.batch_sizes[index]], self.target[: self.batch_sizes[index]]

    def loader(self) -> torch.utils.data.DataLoader[Any]:
        """Return a loader of the batches."""
        return torch.utils.data.DataLoader(self, batch_size=None)
