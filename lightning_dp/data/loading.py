"""Which rank gets which images. Global batches do not depend on the number of ranks, and evaluation is exact.

A sampler yields batches of indices and a dataset returns batches of images, so a DataLoader over them has
``batch_size=None``. Both samplers are DistributedSamplers. This tells Lightning that they divide the data among the
ranks themselves, and it calls their ``set_epoch``.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset, DistributedSampler


class BatchSlice(NamedTuple):
    """One rank's slice of a global batch, with all that a worker process of a loader needs to know about it.

    Attributes:
        indices: indices of the images in this slice, in order.
        start: position of the first of them in the global batch.
        global_batch_size: number of images in the global batch, over all ranks.
        seed: seed of the augmentation of the global batch. It is the same on every rank.
        image_size: height and width of the images in pixels, or 0 for the dataset's own.
    """

    indices: list[int]
    start: int
    global_batch_size: int
    seed: int
    image_size: int = 0


def require_slice(batch: object) -> None:
    """Raise TypeError if a dataset of this package is indexed by anything but a `BatchSlice`."""
    if not isinstance(batch, BatchSlice):
        raise TypeError(
            f"got index {batch!r}, but this dataset is indexed by whole batches: keep the data module's own "
            "sampler (Trainer(overfit_batches=...) replaces it; use limit_train_batches, or fewer training images)"
        )


def slice_bounds(total: int, part: int, num_parts: int) -> tuple[int, int]:
    """Return start and stop of contiguous part ``part`` of ``num_parts``. The sizes differ by at most one."""
    return total * part // num_parts, total * (part + 1) // num_parts


def derive_seed(*numbers: int) -> int:
    """Return a 63-bit seed for a sequence of numbers. (1, 2), (2, 1) and (3,) give unrelated seeds."""
    # NumPy writes its integers in another way, and the seed 3 would be two.
    text = repr(tuple(number.item() if hasattr(number, "item") else number for number in numbers))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def stratified_holdout(labels: Tensor, size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Hold out ``size`` images, with the class proportions of all of them.

    Args:
        labels: (N,) int64.
        size: number of images to hold out, 0 to N.
        seed: determines which images are held out.

    Returns:
        The indices that are kept, (N - size,), and those that are held out, (size,). Both are ascending.
    """
    shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(derive_seed(seed)))
    by_class = shuffled[labels[shuffled].argsort(stable=True)]
    # Evenly spaced places in a list that is sorted by class hit each class in its proportion.
    places = (2 * torch.arange(size) + 1) * len(labels) // max(1, 2 * size)
    held = torch.zeros(len(labels), dtype=torch.bool)
    held[by_class[places]] = True
    return (~held).nonzero()[:, 0], held.nonzero()[:, 0]


class ImageDataset(Dataset[tuple[Tensor, Tensor]]):
    """Images and labels in memory, indexed by the batch.

    Args:
        images: (N, C, H, W) uint8.
        labels: (N,) int64.
        mean: mean of each channel, for pixels from 0 to 1.
        std: standard deviation of each channel, for pixels from 0 to 1.
        augment: crop and flip at random (`crop_and_flip`).

    Raises:
        ValueError: the images are not a tensor of uint8, or not as many as the labels.
    """

    def __init__(
        self, images: Tensor, labels: Tensor, mean: Sequence[float], std: Sequence[float], augment: bool = False
    ) -> None:
        if images.dtype != torch.uint8 or len(images) != len(labels):
            raise ValueError(
                f"{len(images)} images, a {type(images).__name__} of {images.dtype}, with {len(labels)} labels must be "
                "a tensor of torch.uint8, 0 to 255, with a label each; make it one in read_train and read_test"
            )
        self.images = images
        self.labels = labels
        self.mean = mean
        self.std = std
        self.augment = augment

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, batch: BatchSlice) -> tuple[Tensor, Tensor]:
        """Return normalized images (n, C, H, W) float32 and labels (n,) int64."""
        require_slice(batch)
        indices = torch.tensor(batch.indices, dtype=torch.int64)
        images = self.images.index_select(0, indices)
        if self.augment:
            # Drawn for the whole global batch and then sliced, so that pixels do not depend on the number of ranks.
            generator = torch.Generator().manual_seed(batch.seed)
            drawn = CropAndFlip.draw(batch.global_batch_size, generator)
            images = crop_and_flip(images, drawn.rows(batch.start, batch.start + len(indices)))
        return normalize(images, self.mean, self.std), self.labels.index_select(0, indices)


class TrainingSampler(DistributedSampler[BatchSlice]):
    """Shuffle all images with (seed, epoch), divide them into global batches, and yield this rank's slice of each.

    Args:
        dataset: anything with a length.
        batch_size: number of images in a global batch, over all ranks.
        rank: this rank.
        world_size: number of ranks.
        seed: seed of the order and of the augmentation, the same on every rank.
        drop_last: leave out the images that do not fill a whole batch, different ones in each epoch. Otherwise the last
            batch is smaller, and its slices may differ by one image.
        image_size_of: maps an epoch to the size of its images, or None for the dataset's own size.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        drop_last: bool = True,
        image_size_of: Callable[[int], int] | None = None,
    ) -> None:
        super().__init__(dataset, num_replicas=world_size, rank=rank, seed=seed, drop_last=drop_last)
        self.batch_size = batch_size
        self.image_size_of = image_size_of

    def __len__(self) -> int:
        num_images = len(self.dataset)  # type: ignore[arg-type]
        return num_images // self.batch_size if self.drop_last else math.ceil(num_images / self.batch_size)

    def __iter__(self) -> Iterator[BatchSlice]:
        # Worker processes have copies of this object that never see `set_epoch`. The slices carry the epoch, as seeds.
        epoch = self.epoch
        num_images = len(self.dataset)  # type: ignore[arg-type]
        generator = torch.Generator().manual_seed(derive_seed(self.seed, epoch))
        order = torch.randperm(num_images, generator=generator).tolist()
        image_size = 0 if self.image_size_of is None else self.image_size_of(epoch)
        for number in range(len(self)):
            batch = order[number * self.batch_size : (number + 1) * self.batch_size]
            start, stop = slice_bounds(len(batch), self.rank, self.num_replicas)
            seed = derive_seed(self.seed, epoch, number)
            yield BatchSlice(batch[start:stop], start, len(batch), seed, image_size)


class EvaluationSampler(DistributedSampler[BatchSlice]):
    """Yield every image exactly once, in order, with the same number of batches on every rank.

    The number of batches must be the same because DistributedDataParallel broadcasts buffers in every forward. The
    images are divided evenly into global batches, and each global batch evenly among the ranks. All slices of all ranks
    differ by at most one image, and none is empty. If a batch would have fewer images than there are ranks
    (``batch_size`` near ``world_size``), there are fewer batches, and a slice may have one image more than
    ``batch_size`` allows.

    Args:
        dataset: anything with a length of at least ``world_size``.
        batch_size: number of images in a global batch, over all ranks. At least ``world_size``.
        rank: this rank.
        world_size: number of ranks.
    """

    def __init__(self, dataset: Dataset[Any], batch_size: int, rank: int = 0, world_size: int = 1) -> None:
        super().__init__(dataset, num_replicas=world_size, rank=rank, shuffle=False)
        num_images = len(dataset)  # type: ignore[arg-type]
        self.num_batches = min(math.ceil(num_images / batch_size), num_images // world_size)

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[BatchSlice]:
        for number in range(self.num_batches):
            first, last = slice_bounds(len(self.dataset), number, self.num_batches)  # type: ignore[arg-type]
            start, stop = slice_bounds(last - first, self.rank, self.num_replicas)
            yield BatchSlice(list(range(first + start, first + stop)), start, last - first, seed=0)


# --- Augmentation and normalization of whole batches of uint8 images, without a Python loop over images.


class CropAndFlip(NamedTuple):
    """Where each image of a batch is cropped, and whether it is flipped horizontally.

    Attributes:
        top: (N,) int64, first row of the crop in the padded image.
        left: (N,) int64, first column of the crop in the padded image.
        flip: (N,) bool, swap left and right.
        padding: number of zero pixels added on each side before the crop.
    """

    top: Tensor
    left: Tensor
    flip: Tensor
    padding: int

    @classmethod
    def draw(cls, num_images: int, generator: torch.Generator, padding: int = 4) -> CropAndFlip:
        """Draw for ``num_images`` images. All crops are equally likely, and half of the images are flipped."""
        top, left = torch.randint(2 * padding + 1, (2, num_images), generator=generator)
        return cls(top, left, torch.randint(2, (num_images,), generator=generator, dtype=torch.bool), padding)

    def rows(self, start: int, stop: int) -> CropAndFlip:
        """Return the part for images ``start`` to ``stop`` (exclusive) of the batch."""
        return CropAndFlip(self.top[start:stop], self.left[start:stop], self.flip[start:stop], self.padding)


def crop_and_flip(images: Tensor, drawn: CropAndFlip) -> Tensor:
    """Pad with zeros, crop to the original size, and flip, as drawn (He et al., arXiv 1512.03385, section 4.2).

    Args:
        images: (N, C, H, W) of any dtype. Not changed.
        drawn: one crop for each of the N images.

    Returns:
        A new tensor, (N, C, H, W).
    """
    num_images, channels, height, width = images.shape
    padded = torch.nn.functional.pad(images, (drawn.padding,) * 4)
    row = torch.arange(height)
    column = torch.arange(width)
    rows = drawn.top[:, None] + row
    columns = drawn.left[:, None] + torch.where(drawn.flip[:, None], width - 1 - column, column)
    # One gather from the flattened pixels is twice as fast as indexing with row, column and image tensors.
    pixels = (rows[:, :, None] * padded.shape[3] + columns[:, None, :]).view(num_images, 1, height * width)
    return padded.flatten(2).gather(2, pixels.expand(-1, channels, -1)).view(images.shape)


def normalize(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Return ``(images / 255 - mean) / std`` for each channel, from uint8 (N, C, H, W) to float32 (N, C, H, W).

    The memory format and the device are those of ``images``.
    """
    scale, shift = _scale_and_shift(tuple(mean), tuple(std), images.device)  # a subclass may have lists
    return images.float().mul_(scale).sub_(shift)


@lru_cache
def _scale_and_shift(mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    # Made once for each device: on a GPU, every copy of a few numbers from the host would make the step wait. Not as
    # tensors of inference mode, if the first call is in a validation, because training uses them too. Nor in the
    # default dtype, which is bfloat16 in a step with "bf16-true".
    with torch.inference_mode(False):
        deviation = torch.tensor(std, dtype=torch.float32, device=device).view(-1, 1, 1)
        center = torch.tensor(mean, dtype=torch.float32, device=device).view(-1, 1, 1)
        return 1 / (255 * deviation), center / deviation
