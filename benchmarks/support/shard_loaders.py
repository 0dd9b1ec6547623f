"""Tar shards for a benchmark, and WebDataset's own pipeline that reads them."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_dp.data.image_files import training_image
from lightning_dp.data.jpeg import Decoder, RandomCrops, open_image

IMAGES_PER_SHARD = 125


def write_shards(folder: Path, files: Sequence[Path], labels: Tensor) -> list[str]:
    """Write image files with their labels into tar shards, and return the names of the shards."""
    names: list[str] = []
    for start in range(0, len(files), IMAGES_PER_SHARD):
        names.append(f"train-{len(names):06}.tar")
        with tarfile.open(folder / names[-1], "w") as tar:
            for number in range(start, min(len(files), start + IMAGES_PER_SHARD)):
                _add(tar, f"{number:08}.jpg", files[number].read_bytes())
                _add(tar, f"{number:08}.cls", str(int(labels[number])).encode())
    return names


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))


def webdataset_loader(shards: Sequence[Path], batch_size: int, size: int, decoder: Decoder) -> DataLoader[Any]:
    """Return WebDataset's pipeline with our decoding and one worker process.

    It reads shards from begin to end, in random order, and shuffles in a buffer of 1,000 images.
    """
    import webdataset

    def decode(sample: dict[str, Any]) -> tuple[Tensor, int]:
        crops = RandomCrops(1, torch.default_generator)
        image = training_image(open_image(sample["jpg"], decoder), size, crops, 0)
        return image.permute(2, 0, 1), int(sample["cls"])

    dataset = (
        webdataset.WebDataset([str(shard) for shard in shards], shardshuffle=len(shards)).shuffle(1000).map(decode)
    )
    # Whole batches only, as ours.
    return DataLoader(dataset.batched(batch_size, partial=False), None, num_workers=1)


def webdataset_is_installed() -> bool:
    """Return whether WebDataset can be measured. It is no dependency of the package."""
    try:
        import webdataset  # noqa: F401
    except ModuleNotFoundError:
        return False
    return True
