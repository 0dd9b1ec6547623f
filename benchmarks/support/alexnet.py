"""AlexNet for the hybrid benchmarks: its own parameters, with images small enough for a few processor cores."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_dp.models import AlexNet

NUM_CLASSES = 1000
IMAGE_SIZE = 64  # of 224: the trunk computes a tenth to a fifteenth then, about as much as the head
WIDTHS = (9216, 4096, 4096, NUM_CLASSES)  # of the head: what enters each layer, and the output


def alexnet() -> AlexNet:
    """AlexNet, its last pooling to 6 x 6 places whatever the image: parameters and head are those of the original."""
    net = AlexNet(NUM_CLASSES)
    places = [place for place, layer in enumerate(net.trunk) if isinstance(layer, nn.MaxPool2d)]
    net.trunk[places[-1]] = nn.AdaptiveAvgPool2d(6)
    return net


def trunk_and_head(prototype: AlexNet) -> tuple[int, int]:
    """Parameters of the trunk and of the head."""
    trunk, head = (sum(p.numel() for p in part.parameters()) for part in (prototype.trunk, prototype.head))
    return trunk, head


def cost(logits: Tensor, target: Tensor) -> Tensor:
    """The paper's: a logistic unit a class, the sum of their cross-entropies, the mean over examples."""
    is_target = F.one_hot(target, NUM_CLASSES).to(logits.dtype)
    return F.binary_cross_entropy_with_logits(logits, is_target, reduction="sum") / len(target)


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    """The paper's, in one pass over memory a parameter."""
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, weight_decay=5e-4, fused=True)


class Whole(pl.LightningModule):
    """An ordinary module: strategies see a network and a loss."""

    def __init__(self, net: AlexNet) -> None:
        super().__init__()
        self.trunk, self.head = net.trunk, net.head

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, target = batch
        return cost(self.head(self.trunk(x)), target)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer_of(self.parameters())


class Marked(Whole):
    """The same, with the boundary between trunk and head marked."""

    def head_step(self, features: Tensor, target: Tensor) -> Tensor:
        return cost(self.head(features), target)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, target = batch
        return self.head_step(self.trunk(x), target)


class Images(torch.utils.data.Dataset):
    """Batches of the given sizes, one after another, the same images for each: they take no time to load."""

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
