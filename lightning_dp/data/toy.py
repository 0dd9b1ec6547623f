"""Data that needs no download: scikit-learn's handwritten digits, and synthetic images of any shape."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_dp.data.imagenet import ImageNet
from lightning_dp.data.loading import BatchSlice, derive_seed, require_slice, stratified_holdout
from lightning_dp.data.module import ImageDataModule, Split

TEST_SIZE, VAL_SIZE = 360, 180
SPLIT_SEED = 2015


class Digits(ImageDataModule):
    """1797 digits (Alpaydin and Kaynak, UCI 1998), 8x8 pixels scaled to 3x32x32: 1257 train, 180 val, 360 test.

    The split is stratified and fixed. It depends neither on ``seed`` nor on the version of scikit-learn. The images are
    not augmented, because a flipped digit is a different sign. The arguments are those of `ImageDataModule`.
    """

    num_classes = 10
    image_shape = (3, 32, 32)
    mean = (0.3049,) * 3  # of the training images
    std = (0.3236,) * 3

    def read_train(self) -> tuple[Split, Split]:
        """Return the 1257 training and the 180 validation images."""
        images, labels = read_digits()
        rest, _ = stratified_holdout(labels, TEST_SIZE, SPLIT_SEED)
        train, val = (rest[part] for part in stratified_holdout(labels[rest], VAL_SIZE, SPLIT_SEED))
        return (images[train], labels[train]), (images[val], labels[val])

    def read_test(self) -> Split:
        """Return the 360 test images."""
        images, labels = read_digits()
        _, test = stratified_holdout(labels, TEST_SIZE, SPLIT_SEED)
        return images[test], labels[test]


def read_digits() -> Split:
    """Return all images, (1797, 3, 32, 32) uint8, and labels.

    Raises:
        ModuleNotFoundError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "the digits are part of scikit-learn, which is not installed: pip install scikit-learn"
        ) from error
    digits = load_digits()
    images = torch.from_numpy(digits.images).float()[:, None]  # 0 to 16
    images = torch.nn.functional.interpolate(images, size=(32, 32), mode="bilinear", align_corners=False)
    images = images.mul_(255 / 16).round_().to(torch.uint8)
    return images.repeat(1, 3, 1, 1), torch.from_numpy(digits.target).long()


# --- Synthetic images with classes that can be learned, of any shape and number, for tests and benchmarks.


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
        for name, value, least in (("num_classes", num_classes, 1), ("num_val", num_val, 0), ("num_test", num_test, 0)):
            if value < least:
                raise ValueError(f"{name}={value} must be {least} or more")
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


# --- Synthetic images in the place of ImageNet, to see how fast training is without reading and decoding files.


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
        """Check what does not concern files. See `ImageDataModule.check`."""
        ImageDataModule.check(self, world_size)

    def read_train(self) -> tuple[Split, Split]:
        """Return the labels of training and validation images. There are no images yet."""
        train, val = (torch.arange(size) % self.num_classes for size in (self.num_train, self.num_val))
        return (None, train), (None, val)

    def _dataset(self, split: str, augment: bool) -> Dataset[Any]:
        return RepeatedPixels(self._splits[split][1], self._size_of(split))


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


# --- A few synthetic images in the place of any data, to run every part of an experiment in seconds.


def smoke_data(num_classes: int, image_size: int = 32, batch_size: int = 4, seed: int = 0, **ignored: Any) -> Synthetic:
    """Return two batches of images for training, and one each for validation and test.

    Args:
        num_classes: number of classes of the model.
        image_size: height and width of the images.
        batch_size: number of images in a global batch, over all ranks.
        seed: seed of the order of the images.
        **ignored: all other options of the data that it stands in for. An experiment sets some of them.
    """
    return Synthetic(
        shape=(3, image_size, image_size),
        num_classes=num_classes,
        num_train=2 * batch_size,
        num_val=batch_size,
        num_test=batch_size,
        batch_size=batch_size,
        eval_batch_size=batch_size,
        seed=seed,
    )
