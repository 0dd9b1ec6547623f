"""Read where the images of a tar shard are, and their labels, from its headers.

The convention is WebDataset's: the members ``KEY.jpg`` and ``KEY.cls`` of a shard are an image and its label. A key is
the name up to the first dot after the last slash, and the rest is the suffix, in any case of letters.
"""

from __future__ import annotations

import re
import tarfile
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

IMAGE_SUFFIXES = ("jpeg", "jpg", "png")
LABEL_SUFFIX = "cls"
MAX_LABEL_BYTES = 64

_KEY_AND_SUFFIX = re.compile(r"((?:.*/)?[^./]+)\.([^/]*)", re.DOTALL)
_METADATA = re.compile(r"__[^/]*__($|/)")
_BLOCK = 512
# How files begin that are compressed, whatever their names.
_MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ\x00": "xz"}


class Members(NamedTuple):
    """The images of one shard, in the order of the shard. All arrays are (n,) int64.

    Attributes:
        offsets: where the bytes of each image begin in the shard.
        lengths: number of bytes of each image.
        labels: class of each image.
    """

    offsets: NDArray[np.int64]
    lengths: NDArray[np.int64]
    labels: NDArray[np.int64]


class _Scan:
    """What has been found so far: images and labels by their keys, which may come in any order."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.images: dict[str, tuple[int, int]] = {}
        self.labels: dict[str, int] = {}
        self.others: set[str] = set()

    def add(self, member: tarfile.TarInfo, file: BinaryIO) -> None:
        """Take in a member if it is an image or a label."""
        key, suffix = split_name(member.name)
        if member.isdir() or key is None:
            return
        if suffix not in (*IMAGE_SUFFIXES, LABEL_SUFFIX):
            self.others.add(suffix)
            return
        if not member.isreg() or member.issparse():
            raise ValueError(
                f"{member.name} in {self.path} is a link or a sparse file, without bytes of its own; write the shard "
                "again with tar --dereference --hard-dereference"
            )
        found = self.labels if suffix == LABEL_SUFFIX else self.images
        if key in found:
            kind = "labels" if suffix == LABEL_SUFFIX else "images"
            raise ValueError(f"{self.path} has two {kind} {key}; give each image a name of its own within its shard")
        if suffix == LABEL_SUFFIX:
            # Labels are small and lie beside the headers, so reading them here costs little.
            length = min(member.size, MAX_LABEL_BYTES)
            file.seek(member.offset_data)
            text = file.read(length)
            if len(text) < length:
                raise tarfile.ReadError("unexpected end of data")
            self.labels[key] = _parse_label(text, member.name, self.path)
        else:
            self.images[key] = (member.offset_data, member.size)

    def members(self) -> Members:
        """Return all images with their labels, or raise ValueError if one is without the other."""
        image_names = f"KEY.{', KEY.'.join(IMAGE_SUFFIXES)}"
        if not self.images:
            others = f", but .{', .'.join(sorted(self.others)[:5])}" if self.others else ""
            raise ValueError(
                f"{self.path} has no images ({image_names}){others}. A shard is a tar file of images and labels; "
                "unpack the official archives of ImageNet, and use data=imagenet"
            )
        for given, wanted, name in (
            (self.images, self.labels, f"KEY.{LABEL_SUFFIX}"),
            (self.labels, self.images, image_names),
        ):
            alone = [key for key in given if key not in wanted]
            if alone:
                raise ValueError(
                    f"{self.path} has no {name} for {len(alone)} keys, of which {alone[0]} is the first; write it "
                    "again with an image and a label for each key"
                )
        # A dictionary keeps the order of insertion, which is that of the images in the shard.
        places = np.array(list(self.images.values()), dtype=np.int64)
        labels = np.array([self.labels[key] for key in self.images], dtype=np.int64)
        return Members(places[:, 0].copy(), places[:, 1].copy(), labels)


def split_name(name: str) -> tuple[str | None, str]:
    """Return the key and the suffix, or None and the name for hidden files, metadata, and names without a suffix."""
    match = _KEY_AND_SUFFIX.fullmatch(name)
    if match is None or _METADATA.match(name):
        return None, name
    return match.group(1), match.group(2).lower()


def scan_shard(path: Path) -> Members:
    """Return where the images of a shard are, and their labels. Reads its headers and labels, and no image.

    Raises:
        ValueError: it is not a whole, uncompressed tar file in which every image has a label.
    """
    scan = _Scan(path)
    with open(path, "rb") as file, open(path, "rb") as label_file:
        _require_uncompressed(path, file)
        try:
            # "r:" reads uncompressed files only.
            with tarfile.open(fileobj=file, mode="r:") as tar:
                for member in tar:
                    scan.add(member, label_file)
                end = tar.offset
        except tarfile.TarError as error:
            raise _incomplete(path, str(error)) from error
        _require_end(path, file, end)
    return scan.members()


def member_name(path: Path, offset: int) -> str:
    """Return the name of the member whose bytes begin at ``offset``. It reads the headers again: for messages only."""
    try:
        with tarfile.open(path, mode="r:") as tar:
            return next(member.name for member in tar if member.offset_data == offset)
    except (OSError, tarfile.TarError, StopIteration):
        return f"the member at byte {offset}"


def _require_uncompressed(path: Path, file: BinaryIO) -> None:
    begin = file.read(8)
    file.seek(0)
    for magic, name in _MAGIC.items():
        if begin.startswith(magic):
            raise ValueError(
                f"{path} is compressed ({name}), so its images cannot be read one by one; decompress it, or "
                "write it again"
            )


def _require_end(path: Path, file: BinaryIO, end: int) -> None:
    """Raise ValueError unless there are zeros after the last member, and nothing else.

    tarfile takes a damaged header for the end, and does not miss the end either if a download stopped between two
    members. Without this check, images would be missing without a word.
    """
    file.seek(end)
    first = file.read(_BLOCK)
    if len(first) < _BLOCK:
        raise _incomplete(path, "the end-of-archive marker is missing")
    rest = first
    while rest:
        if rest.strip(b"\0"):
            raise _incomplete(path, f"there is something other than members after byte {end}")
        rest = file.read(1 << 20)


def _incomplete(path: Path, reason: str) -> ValueError:
    return ValueError(f"{path} is not a whole tar file: {reason}; download it or write it again")


def _parse_label(text: bytes, name: str, path: Path) -> int:
    label = text.strip()
    if not label.isdigit():
        raise ValueError(
            f"{name} in {path} contains {label[:20]!r}, which is not the number of a class; write numbers from 0, in "
            "the order of the classes' names"
        )
    return int(label)
