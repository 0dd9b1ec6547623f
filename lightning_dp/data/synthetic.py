"""Synthetic images with classes that can be learned, of any shape and number, for tests and benchmarks."""

from __future__ import annotations

import torch

from lightning_dp.data.loading import derive_seed
from lightning_dp.data.module import ImageDataModule, Split


class Synthetic(ImageDataModule):
    """A smooth pattern for each class, with added noise.

    The images are the same for every ``seed``. The seed changes only their order.

    Args:
        shape: shape of an image, (C, H, W).
        num_classes: number of classes. All are equally frequent.
        num_train: number of training images.
        num_test: number of test images.
        num_val: number of validation images. 0 means no validation.
        batch_size: see `ImageDataModule`.
        eval_batch_size: see `ImageDataModule`.
        seed: see `ImageDataModule`.
        num_workers: see `ImageDataModule`.
        drop_last: see `ImageDataModule`.
    """

    def __init__(
        self,
        shape: tuple[int, int, int] = (3, 32, 32),
        num_classes: int = 10,
        num_train: int = 1024,
        num_test: int = 256,
        num_val: int = 256,
        batch_size: int = 128,
        eval_batch_size: int = 1000,
        seed: int = 0,
        num_workers: int = 0,
        drop_last: bool = True,
    ) -> None:
        super().__init__(batch_size, eval_batch_size, seed, num_workers, drop_last)
        channels, height, width = shape
        self.image_shape = (channels, height, width)
        self.num_classes = num_classes
        self.num_train = num_train
        self.num_val = num_val
        self.num_test = num_test
        self.mean = (0.5,) * channels
        self.std = (0.25,) * channels

    def read_train(self) -> tuple[Split, Split]:
        """Return the training and the validation images."""
        return self._make(self.num_train, 1), self._make(self.num_val, 2)

    def read_test(self) -> Split:
        """Return the test images."""
        return self._make(self.num_test, 3)

    def sizes(self) -> dict[str, int]:
        """Return the number of images in each split."""
        return {"train": self.num_train, "val": self.num_val, "test": self.num_test}

    def _make(self, num_images: int, split: int) -> Split:
        generator = torch.Generator().manual_seed(derive_seed(0))  # the same patterns in every split
        coarse = torch.rand(self.num_classes, self.image_shape[0], 4, 4, generator=generator)
        patterns = torch.nn.functional.interpolate(coarse, size=self.image_shape[1:], mode="bilinear")
        labels = torch.arange(num_images) % self.num_classes
        noise = torch.randn(num_images, *self.image_shape, generator=generator.manual_seed(derive_seed(split)))
        images = noise.mul_(0.15).add_(patterns[labels]).mul_(255).round_().clamp_(0, 255).to(torch.uint8)
        return images, labels
