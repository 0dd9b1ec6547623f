"""Tar shards of images and labels, in WebDataset's convention."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from lightning_dp.data.imagenet import Listing, list_train, list_val
from tests.data.jpegs import encoded, picture

Member = tuple[str, bytes]

JPEG = encoded(picture(40, 50))


def write_tar(path: Path, members: Iterable[Member], format: int = tarfile.GNU_FORMAT) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=format) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def sample(key: str, label: int, data: bytes = JPEG, suffix: str = "JPEG") -> list[Member]:
    return [(f"{key}.{suffix}", data), (f"{key}.cls", str(label).encode())]


def write_split(root: Path, listing: Listing, shards: Sequence[str], source: Path) -> None:
    """Write the files of a listing into shards, in order."""
    names, labels = listing
    per_shard = -(-len(names) // len(shards))
    for number, shard in enumerate(shards):
        rows = range(number * per_shard, min(len(names), (number + 1) * per_shard))
        images = [(Path(names[row].decode()), int(labels[row])) for row in rows]
        write_tar(
            root / shard,
            [part for path, label in images for part in sample(path.stem, label, (source / path).read_bytes())],
        )


def write_shards(root: Path, folders: Path) -> Path:
    """Write class folders as three shards for training, and two for validation, with the images in the same order."""
    train, classes = list_train(folders)
    write_split(root, train, [f"imagenet-train-{number:06}.tar" for number in range(3)], folders)
    write_split(root, list_val(folders, classes), [f"imagenet-val-{number:06}.tar" for number in range(2)], folders)
    return root
