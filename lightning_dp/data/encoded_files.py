"""A dataset of encoded images that are read by the batch, and decoded elsewhere: by DALI, on the device."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from lightning_dp.data.image_sources import ImageSource
from lightning_dp.data.jpeg import Box, BrokenImageError
from lightning_dp.data.loading import BatchSlice, require_slice
from lightning_dp.data.random_crops import Crop, RandomCrops, central_square


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


class EncodedFiles(Dataset[tuple[EncodedImages, Tensor]]):
    """Images in files or tar shards, indexed by the batch. Only their headers are read.

    A file that is neither JPEG in color or gray nor PNG is written as PNG, which loses nothing.

    Args:
        source: the N encoded images.
        labels: (N,) int64.
        image_size: height and width of the images, unless the `BatchSlice` sets another size.
        crop: see `lightning_dp.data.image_files.ImageFiles`; the crops are the same.
        split: a name for these images, which is passed on.
    """

    def __init__(
        self, source: ImageSource, labels: Tensor, image_size: int, crop: Crop | None = None, split: str = ""
    ) -> None:
        self.source = source
        self.split = split
        self.labels = labels
        self.image_size = image_size
        self.crop = crop

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, batch: BatchSlice) -> tuple[EncodedImages, Tensor]:
        """Return the images, and labels (n,) int64."""
        require_slice(batch)
        crops = None
        if self.crop is not None:
            # Drawn for the whole global batch, so that pixels do not depend on the number of ranks.
            crops = RandomCrops(batch.global_batch_size, torch.Generator().manual_seed(batch.seed), self.crop)
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


def plain_file(data: bytes) -> tuple[bytes, int, int]:
    """Return a file that any decoder can read, and the image's height and width.

    Raises:
        BrokenImageError: the bytes are not an image that Pillow knows.
    """
    import PIL.Image

    try:
        image = PIL.Image.open(io.BytesIO(data))
        if image.format not in ("JPEG", "PNG") or image.mode not in ("RGB", "L"):
            buffer = io.BytesIO()
            image.convert("RGB").save(buffer, "PNG", compress_level=1, icc_profile=None)  # nobody reads the profile
            data = buffer.getvalue()
    except Exception as error:  # parsers of broken files raise errors of any kind
        raise BrokenImageError(str(error)) from error
    return data, image.height, image.width
