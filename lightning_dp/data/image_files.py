"""Datasets of encoded images, read by the batch, and decoded here or elsewhere (DALI)."""

from __future__ import annotations

import io
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

from lightning_dp.data.jpeg import (
    Box,
    BrokenImageError,
    Crop,
    Decoder,
    EncodedImage,
    RandomCrops,
    central_square,
    denominator_for,
    in_rgb,
    open_image,
    opened,
)
from lightning_dp.data.loading import BatchSlice, require_slice


class ImageSource(Protocol):
    """Encoded images, by number. Worker processes have copies, so that they can be pickled.

    Attributes:
        root: folder of the images.
    """

    root: Path

    def __len__(self) -> int:
        """Return the number of images."""

    def read(self, index: int) -> bytes:
        """Return the bytes of an image file. An error here is not about the image, and always ends the run."""

    def name(self, index: int) -> str:
        """Return where an image is, for messages."""


class FilesInFolder:
    """Image files.

    Args:
        root: folder of the files.
        names: (N,) array of file names as bytes, relative to ``root``. One array and not N strings, because reading a
            string in a worker process copies the memory that it was forked with.
    """

    def __init__(self, root: Path, names: NDArray[np.bytes_]) -> None:
        self.root = root
        self.names = names

    def __len__(self) -> int:
        return len(self.names)

    def path(self, index: int) -> Path:
        """Return the file of an image."""
        return self.root / os.fsdecode(bytes(self.names[index]))

    def read(self, index: int) -> bytes:
        """Return the bytes of a file."""
        return self.path(index).read_bytes()

    def name(self, index: int) -> str:
        """Return the path of a file."""
        return str(self.path(index))


# --- A dataset of encoded images, read and decoded by the batch.

log = logging.getLogger(__name__)

MAX_BROKEN_IN_A_ROW = 100  # training images that are tried after a broken one


@dataclass(eq=False, repr=False)
class _Encoded(Dataset[Any]):
    """Encoded images, indexed by the batch. See `ImageFiles` and `EncodedFiles`."""

    source: ImageSource
    labels: Tensor
    image_size: int
    crop: Crop | None = None

    def __len__(self) -> int:
        return len(self.source)


@dataclass(eq=False, repr=False)
class ImageFiles(_Encoded):
    """Images in files or tar shards, cropped and resized to squares, indexed by the batch.

    Training images are decoded at the smallest scale of 1, 1/2 and 1/4 at which the crop still has the required
    number of pixels, and with the decoder's faster arithmetic. Other images are decoded exactly.

    Two tensors are in shared memory, because worker processes write to them: which images are broken, and how fast each
    worker is.

    Args:
        source: the N encoded images.
        labels: (N,) int64.
        image_size: height and width of the images, unless the `BatchSlice` sets another size.
        crop: the random crops of training images, or None for the central square and no flips.
        training: a batch must not become smaller because of a broken file.
        decoder: see `lightning_dp.data.jpeg.open_image`.
        skip_broken: what happens to a file that cannot be decoded. False raises `BrokenImageError` with its name. True
            logs a warning, and marks it in ``broken``. In training the next image of the data set takes its place,
            with its crop, so that batches do not depend on the number of ranks; an evaluation batch has one image less.
        num_workers: of the loader, to measure the speed of each.
    """

    training: bool = False
    decoder: Decoder = "auto"
    skip_broken: bool = False
    num_workers: int = 0

    def __post_init__(self) -> None:
        # A Trainer makes loaders of a test in inference mode, and its tensors cannot change outside of that.
        with torch.inference_mode(False):
            self.broken = torch.zeros(len(self.source), dtype=torch.bool).share_memory_()
            # One row for each worker: images, and seconds spent on them. Only that worker writes to it.
            self._speed = torch.zeros(max(1, self.num_workers), 2, dtype=torch.float64).share_memory_()

    def __getitem__(self, batch: BatchSlice) -> tuple[Tensor, Tensor]:
        """Return images (n, 3, H, W) uint8 in the channels-last memory format, and labels (n,) int64."""
        require_slice(batch)
        start_s = time.perf_counter()
        size = batch.image_size or self.image_size
        images = torch.empty(len(batch.indices), size, size, 3, dtype=torch.uint8)
        crops = crops_of(batch, self.crop)
        intact: list[int] = []
        for place, index in enumerate(batch.indices):
            found = self._intact(index, size, crops, batch.start + place)
            if found is not None:
                images[len(intact)] = found[1]
                intact.append(found[0])
        images = images[: len(intact)]
        labels = self.labels.index_select(0, torch.tensor(intact, dtype=torch.int64))
        self._count(len(batch.indices), time.perf_counter() - start_s)
        return images.permute(0, 3, 1, 2), labels

    def broken_files(self) -> list[str]:
        """Return the images that could not be decoded so far, in any worker of this process."""
        return [self.source.name(index) for index in self.broken.nonzero()[:, 0].tolist()]

    def images_per_s(self) -> float | None:
        """Return the images per second that all workers together can deliver, or None if nothing was read so far.

        Time counts in which a worker reads and decodes, not in which it waits for the training step.
        """
        num_images, seconds = self._speed.clone().unbind(1)
        busy = seconds > 0
        return float((num_images[busy] / seconds[busy]).sum()) if busy.any() else None

    def _intact(self, index: int, size: int, crops: RandomCrops | None, place: int) -> tuple[int, Tensor] | None:
        """Return an image and its number: the next one of the data set for a broken one, or None in evaluation.

        The next one of the batch would depend on which images of it this rank reads.
        """
        tried = 1 + (min(MAX_BROKEN_IN_A_ROW, len(self) - 1) if self.training else 0)
        for number in (n % len(self) for n in range(index, index + tried)):
            try:
                return number, self._read(number, size, crops, place)
            except BrokenImageError as error:
                self._mark_broken(number, error)
        if not self.training:
            return None
        raise BrokenImageError(
            f"{self.source.name(index)} cannot be decoded, nor any of the {tried - 1} images after it; the warnings "
            "say why; check data.root, or replace them"
        )

    def _read(self, index: int, size: int, crops: RandomCrops | None, place: int) -> Tensor:
        """Return one image, (size, size, 3) uint8."""
        encoded = open_image(self.source.read(index), self.decoder)
        if crops is None:
            region = central_square(encoded.height, encoded.width).crop(encoded.decode())
            return resize(region, size)
        return training_image(encoded, size, crops, place)

    def _mark_broken(self, index: int, error: BrokenImageError) -> None:
        """Raise an error that names the image, or count it."""
        message = f"{self.source.name(index)} cannot be decoded: {error}"
        if not self.skip_broken:
            remedy = "replace it, or set on_broken=skip (in a recipe, data.on_broken=skip)"
            raise BrokenImageError(f"{message}; {remedy}") from error
        if not self.broken[index]:
            log.warning("%s; it is skipped", message)
        self.broken[index] = True

    def _count(self, num_images: int, seconds: float) -> None:
        worker = get_worker_info()
        row = 0 if worker is None else worker.id % len(self._speed)
        self._speed[row] += torch.tensor([num_images, seconds], dtype=torch.float64)


def crops_of(batch: BatchSlice, kind: Crop | None) -> RandomCrops | None:
    """Draw crops for the whole global batch, so that pixels do not depend on the number of ranks."""
    if kind is None:
        return None
    return RandomCrops(batch.global_batch_size, torch.Generator().manual_seed(batch.seed), kind)


def training_image(encoded: EncodedImage, size: int, crops: RandomCrops, place: int) -> Tensor:
    """Return a random crop of one image, (size, size, 3) uint8: that of ``crops`` for this place in the batch."""
    box = crops.box(place, encoded.height, encoded.width)
    denominator = denominator_for(box, size)
    image = resize(box.reduced(denominator).crop(encoded.decode(denominator, fast=True)), size)
    return image.flip(1) if crops.flip(place) else image


def resize(pixels: NDArray[np.uint8], size: int) -> Tensor:
    """Return ``pixels``, (H, W, 3) uint8, as a tensor (size, size, 3) uint8, by antialiased bilinear interpolation.

    torch has vector instructions for images in the channels-last memory format. It is faster than Pillow, and equal to
    it but for rounding.
    """
    images = torch.from_numpy(pixels).permute(2, 0, 1)[None]
    if pixels.shape[:2] != (size, size):
        images = F.interpolate(images, (size, size), mode="bilinear", antialias=True)
    return images[0].permute(1, 2, 0)


# --- A dataset of encoded images that are read by the batch, and decoded elsewhere: by DALI, on the device.


class Region(NamedTuple):
    """What is to be made of an image."""

    box: Box
    flip: bool


class EncodedImages:
    """The files of a batch, JPEG in color or gray, or PNG, and what is to be made of each.

    Attributes:
        regions: of each of the n images.
        size: height and width to which they are resized.
        exact: decode as exactly as the decoder can, for evaluation.
        split: whose images these are.
        indices: of the images in the dataset of this split.
    """

    def __init__(
        self, files: list[bytes], regions: list[Region], size: int, exact: bool, split: str, indices: list[int]
    ) -> None:
        self.regions, self.size, self.exact = regions, size, exact
        self.split, self.indices = split, indices
        # One tensor, because that is what workers send through shared memory.
        self._bytes = torch.frombuffer(bytearray(b"".join(files)), dtype=torch.uint8)
        self._ends = np.cumsum([len(file) for file in files])

    def __len__(self) -> int:
        return len(self.regions)

    def files(self) -> Iterator[NDArray[np.uint8]]:
        """Yield the bytes of each file, (its length,)."""
        yield from np.split(self._bytes.numpy(), self._ends[:-1])

    def to(self, *_: object, **__: object) -> Self:
        """Stay in host memory, where decoders read files. Lightning calls this to move a batch to the device."""
        return self


@dataclass(eq=False, repr=False)
class EncodedFiles(_Encoded):
    """Images in files or tar shards, indexed by the batch. Only their headers are read.

    A file that is neither JPEG in color or gray nor PNG is written as PNG, which loses nothing.

    Args:
        source: the N encoded images.
        labels: (N,) int64.
        image_size: height and width of the images, unless the `BatchSlice` sets another size.
        crop: see `lightning_dp.data.image_files.ImageFiles`; the crops are the same.
        split: a name for these images, which is passed on.
    """

    split: str = ""

    def __getitem__(self, batch: BatchSlice) -> tuple[EncodedImages, Tensor]:
        """Return the images, and labels (n,) int64."""
        require_slice(batch)
        crops = crops_of(batch, self.crop)
        files, regions = [], []
        for place, index in enumerate(batch.indices):
            try:
                file, height, width = plain_file(self.source.read(index))
            except BrokenImageError as error:
                raise self.broken(index, error) from error
            files.append(file)
            if crops is None:
                regions.append(Region(central_square(height, width), False))
            else:
                number = batch.start + place
                regions.append(Region(crops.box(number, height, width), crops.flip(number)))
        labels = self.labels.index_select(0, torch.tensor(batch.indices, dtype=torch.int64))
        size = batch.image_size or self.image_size
        return EncodedImages(files, regions, size, self.crop is None, self.split, batch.indices), labels

    def broken(self, index: int, error: Exception) -> BrokenImageError:
        """Return the error for an image that cannot be decoded. Its name is looked up here only: shards take long."""
        where = self.source.name(index)
        return BrokenImageError(
            f"{where} cannot be decoded: {error}; replace it, or use decoder=auto with on_broken=skip"
        )

    def name_the_broken(self, images: EncodedImages) -> None:
        """Raise BrokenImageError for the first file that Pillow cannot decode either, if there is one."""
        for file, index in zip(images.files(), images.indices, strict=True):
            try:
                opened(file.tobytes()).load()
            except Exception as error:
                raise self.broken(index, error) from error


def plain_file(data: bytes) -> tuple[bytes, int, int]:
    """Return a file that any decoder can read, and the image's height and width.

    Raises:
        BrokenImageError: the bytes are not an image that Pillow knows, or `in_rgb` refuses it.
    """
    try:
        image = opened(data)
        if image.format not in ("JPEG", "PNG") or image.mode not in ("RGB", "L"):
            buffer = io.BytesIO()
            in_rgb(image).save(buffer, "PNG", compress_level=1, icc_profile=None)  # nobody reads the profile
            data = buffer.getvalue()
    except Exception as error:  # parsers of broken files raise errors of any kind
        raise BrokenImageError(str(error)) from error
    return data, image.height, image.width
