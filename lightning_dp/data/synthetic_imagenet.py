"""Synthetic images in the place of ImageNet, to see how fast training is without reading and decoding files."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_dp.data.imagenet import ImageNet
from lightning_dp.data.loading import BatchSlice, derive_seed, require_slice
from lightning_dp.data.module import Split


class SyntheticImageNet(ImageNet):
    """The same random pixels in every batch, with as many images as ImageNet has.

    The images cannot be learned. Every other option is that of `ImageNet`; those that concern files have no effect.

    Args:
        num_train: number of training images.
        num_val: number of validation images, which are the test images, too.
        **options: see `ImageNet`.
    """

    def __init__(self, num_train: int = 1_281_167, num_val: int = 50_000, **options: Any) -> None:
        super().__init__(**options)
        self.num_train = num_train
        self.num_val = num_val

    def check(self, world_size: int) -> None:
        """Check the batch sizes. See `ImageDataModule.check`."""
        self._check_batch_sizes(world_size)
        self._check_sizes(world_size, self.sizes())

    def sizes(self) -> dict[str, int]:
        """Return the number of images in each split."""
        return {"train": self.num_train, "val": self.num_val, "test": self.num_val}

    def read_train(self) -> tuple[Split, Split]:
        """Return the labels of training and validation images. There are no images yet."""
        train, val = (torch.arange(size) % self.num_classes for size in (self.num_train, self.num_val))
        return (None, train), (None, val)

    def _dataset(self, split: str, augment: bool) -> Dataset[Any]:
        return RepeatedPixels(self._splits[split][1], self.image_size if split == "train" else self.eval_image_size)


class RepeatedPixels(Dataset[tuple[Tensor, Tensor]]):
    """Batches that share their pixels, so that making one takes almost no time.

    Args:
        labels: (N,) int64.
        image_size: height and width of the images, unless the `BatchSlice` sets another size.
    """

    def __init__(self, labels: Tensor, image_size: int) -> None:
        self.labels = labels
        self.image_size = image_size
        self._pixels = torch.empty(0, 3, 0, 0, dtype=torch.uint8)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, batch: BatchSlice) -> tuple[Tensor, Tensor]:
        """Return images (n, 3, H, W) uint8 in the channels-last memory format, and labels (n,) int64."""
        require_slice(batch)
        size = batch.image_size or self.image_size
        num_images = len(batch.indices)
        if self._pixels.shape[2] != size or len(self._pixels) < num_images:
            generator = torch.Generator().manual_seed(derive_seed(size))
            pixels = torch.randint(256, (num_images, size, size, 3), dtype=torch.uint8, generator=generator)
            self._pixels = pixels.permute(0, 3, 1, 2)
        return self._pixels[:num_images], self.labels.index_select(0, torch.tensor(batch.indices, dtype=torch.int64))
