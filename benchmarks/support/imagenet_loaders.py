"""Loaders of ImageNet's files that take turns in a benchmark: this package's, and the usual ones, image by image."""

from __future__ import annotations

import io
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_dp.data import ImageNet
from lightning_dp.data.image_files import FilesInFolder, ImageFiles, ImageSource
from lightning_dp.data.imagenet import list_train
from lightning_dp.data.jpeg import Decoder, RandomCrops, resolve_decoder
from lightning_dp.data.loading import TrainingSampler, normalize
from lightning_dp.data.shards import INDEX_FILE, ImagesInShards, index_shards
from support import shard_loaders

OURS = "ours"
FULL = "in full"
FULL_BYTES = "in full, as bytes"
SHARDS = "ours, tar shards"
FOLDERS = "ours, class folders"
WEBDATASET = "WebDataset, same decoding"


class OneByOne(Dataset[tuple[Tensor, int]]):
    """The usual way: decode the whole image, crop and resize with Pillow, image by image.

    Args:
        files: the images.
        size: height and width of the result.
        decoder: ``"simplejpeg"`` or ``"pillow"``.
        as_bytes: return uint8 images, to be normalized by the batch; else float32, normalized here.
    """

    def __init__(self, files: list[Path], size: int, decoder: Decoder, as_bytes: bool) -> None:
        self.files = files
        self.size = size
        self.decoder = decoder
        self.as_bytes = as_bytes
        self._mean = torch.tensor(ImageNet.mean).view(3, 1, 1)
        self._std = torch.tensor(ImageNet.std).view(3, 1, 1)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        from PIL import Image

        image = self._decode(self.files[index].read_bytes())
        drawn = RandomCrops(1, torch.default_generator)
        top, left, height, width = drawn.box(0, image.height, image.width)
        crop = image.crop((left, top, left + width, top + height))
        crop = crop.resize((self.size, self.size), Image.Resampling.BILINEAR)
        if drawn.flip(0):
            crop = crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = torch.from_numpy(np.array(crop)).permute(2, 0, 1).contiguous()
        return (pixels if self.as_bytes else pixels.float().div_(255).sub_(self._mean).div_(self._std)), index

    def _decode(self, data: bytes) -> Any:
        from PIL import Image

        if self.decoder == "pillow":
            return Image.open(io.BytesIO(data)).convert("RGB")
        import simplejpeg

        return Image.fromarray(simplejpeg.decode_jpeg(data))


def our_loader(
    source: ImageSource, labels: Tensor, batch_size: int, size: int, decoder: Decoder, persistent: bool = False
) -> DataLoader[Any]:
    """Return this package's loader of training images, with one worker process."""
    dataset = ImageFiles(source, labels, size, crop="resized", decoder=decoder, num_workers=1)
    sampler = TrainingSampler(dataset, batch_size)
    return DataLoader(dataset, None, sampler=sampler, num_workers=1, persistent_workers=persistent)


def make_sides(
    root: Path, num_images: int, batch_size: int, size: int, decoders: list[Decoder]
) -> dict[str, Callable[[], float]]:
    """Return, for each side, a function that measures its images a second, with one worker process.

    A side that normalizes by the batch does so in the main process, which counts.
    """
    sides: dict[str, Callable[[], float]] = {}
    (names, labels), _ = list_train(root)
    names = names[:num_images]
    labels = labels[:num_images]
    files = [root / name.decode() for name in names]
    for decoder in decoders:
        ours = our_loader(FilesInFolder(root, names), labels, batch_size, size, decoder, persistent=True)
        sides[f"{OURS}, {decoder}"] = _epochs(ours, normalized_later=True)
        for label, as_bytes in ((FULL, False), (FULL_BYTES, True)):
            loader = DataLoader(
                OneByOne(files, size, decoder, as_bytes),
                batch_size,
                num_workers=1,
                persistent_workers=True,
                shuffle=True,
            )
            sides[f"{decoder} {label}"] = _epochs(loader, normalized_later=as_bytes)
    return sides


def make_shard_sides(
    root: Path, folder: Path, num_images: int, batch_size: int, size: int
) -> dict[str, Callable[[], float]]:
    """Return, for each side, a function that measures its images per second of CPU time, with one worker process.

    All decode in the same way; they differ in where the bytes come from. That is a small part of the time, which other
    programs on the machine would hide, and CPU time is hardly changed by them.

    Args:
        root: folder of the class folders.
        folder: an empty folder, into which the images are written as shards.
        num_images: number of images.
        batch_size: number of images in a batch.
        size: height and width of the images.
    """
    (names, labels), _ = list_train(root)
    files = FilesInFolder(root, names[:num_images])
    shards = shard_loaders.write_shards(folder, [files.path(index) for index in range(len(files))], labels)
    index = index_shards(folder, shards, folder / INDEX_FILE)
    in_shards = ImagesInShards(folder, shards, index)
    options = batch_size, size, resolve_decoder("auto")
    sides = {
        SHARDS: our_loader(in_shards, torch.from_numpy(np.concatenate([s.members.labels for s in index])), *options),
        FOLDERS: our_loader(files, labels[:num_images], *options),
    }
    if shard_loaders.webdataset_is_installed():
        sides[WEBDATASET] = shard_loaders.webdataset_loader([folder / name for name in shards], *options)
    return {name: _epochs_of_cpu_time(loader) for name, loader in sides.items()}


def _epochs_of_cpu_time(loader: DataLoader[Any]) -> Callable[[], float]:
    def cpu_s() -> float:
        usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(part.ru_utime + part.ru_stime for part in usage)

    def images_per_cpu_s() -> float:
        start_s = cpu_s()
        # The workers end with the loop, and only then their time is known.
        num_images = sum(len(labels) for _, labels in loader)
        return num_images / (cpu_s() - start_s)

    return images_per_cpu_s


def _epochs(loader: DataLoader[Any], normalized_later: bool) -> Callable[[], float]:
    def images_per_s() -> float:
        start = time.perf_counter()
        num_images = 0
        for images, labels in loader:
            num_images += len(labels)
            if normalized_later:
                normalize(images, ImageNet.mean, ImageNet.std)
        return num_images / (time.perf_counter() - start)

    return images_per_s
