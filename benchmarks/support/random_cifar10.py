"""CIFAR-10's data module with random pixels: to measure loading, and for smoke runs of what trains on CIFAR-10."""

from __future__ import annotations

from typing import Any

import torch

from lightning_dp.data import CIFAR10
from lightning_dp.data.module import Split


def random_images(num_images: int) -> Split:
    """Return images (N, 3, 32, 32) uint8 and labels (N,) int64, both random."""
    return torch.randint(0, 256, (num_images, 3, 32, 32), dtype=torch.uint8), torch.randint(0, 10, (num_images,))


class RandomCIFAR10(CIFAR10):
    """The data module itself, with random pixels instead of the files.

    Args:
        num_images: for training, and as many for the test.
        **options: of `CIFAR10`.
    """

    def __init__(self, num_images: int, **options: Any) -> None:
        super().__init__(**options)
        self.num_images = num_images

    def read_train(self) -> tuple[Split, Split]:
        """Return training images, and none for validation."""
        return random_images(self.num_images), random_images(0)

    def read_test(self) -> Split:
        """Return test images."""
        return random_images(self.num_images)
