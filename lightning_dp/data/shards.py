"""ImageNet (ILSVRC-2012) from tar shards: the data module, the names, headers and index of shards, and the reader."""

from __future__ import annotations

import glob
import logging
import os
import re
import resource
import tarfile
import time
import uuid
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_dp.data.image_files import ImageSource
from lightning_dp.data.imagenet import ImageNet
from lightning_dp.data.module import Split

Patterns = str | Sequence[str] | None


class ImageNetShards(ImageNet):
    """Images in tar shards as WebDataset writes them: the members ``KEY.jpg`` and ``KEY.cls``, the number of its class.

    An index says where each image is, so images are read in the same random order as files are. Batches, crops and
    evaluation are those of `ImageNet`: they do not depend on the number of ranks or workers. The same images in the
    same order give bitwise identical batches, in whatever shards or class folders they are.

    The index is made at the first start, from the headers of all shards, and kept in a file.

    Args:
        root: folder of the shards.
        train_shards: names of the training shards, or patterns such as ``"imagenet-train-{000000..001281}.tar"`` or
            ``"part-?/train-*.tar"``, or a list of these. None for ``*train*.tar`` or ``train/*.tar``.
        val_shards: the same for validation. None for ``*val*.tar``, ``val/*.tar`` or ``validation/*.tar``.
        index_dir: folder of the index file, or None for ``root``.
        **options: see `ImageNet`. There is no ``val_labels``, because labels are in the shards.

    Raises:
        ValueError: an option cannot work.
    """

    def __init__(
        self,
        root: str | Path = "data/imagenet",
        train_shards: Patterns = None,
        val_shards: Patterns = None,
        index_dir: str | Path | None = None,
        **options: Any,
    ) -> None:
        super().__init__(root, **options)
        if self.val_labels is not None:
            raise ValueError(f"val_labels={self.val_labels} has no effect on shards, which have labels; leave it out")
        self.train_shards = train_shards
        self.val_shards = val_shards
        self.index_dir = self.root if index_dir is None else Path(index_dir).expanduser()

    def prepare_data(self) -> None:
        """Make the index if there is none. Called on one rank of each node, while the others wait."""
        self.read_train()

    def read_train(self) -> tuple[Split, Split]:
        """Return images and labels of the training shards and of the validation shards."""
        if self._found is None:
            train = find_shards(self.root, "train", self.train_shards)
            val = find_shards(self.root, "val", self.val_shards)
            require_distinct(self.root, [*train, *val])
            index = index_shards(self.root, [*train, *val], self.index_dir / INDEX_FILE)
            self._found = self._split(train, index[: len(train)]), self._split(val, index[len(train) :])
        return self._found

    def _split(self, names: list[str], index: list[IndexedShard]) -> Split:
        for name, shard in zip(names, index, strict=True):
            largest = int(shard.members.labels.max())
            if largest >= self.num_classes:
                raise ValueError(
                    f"{self.root / name} has the label {largest}, but num_classes={self.num_classes}; labels count "
                    f"from 0, so use num_classes={largest + 1} or more, or write the shards again"
                )
        labels = torch.from_numpy(np.concatenate([shard.members.labels for shard in index]))
        return ImagesInShards(self.root, names, index), labels

    def _source(self, images: Any) -> ImageSource:
        return images


# --- Find the tar shards of a data set by their names, in the ways that people have them.

log = logging.getLogger(__name__)

SPLITS = {"train": ("train",), "val": ("val", "validation")}  # what the names of folders and shards say
MAX_RANGE = 1_000_000  # shards that a pattern may stand for

_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_LAST_NUMBER = re.compile(r"(.*\D|)(\d+)(\D*)", re.DOTALL)


def find_shards(root: Path, split: str, patterns: str | Sequence[str] | None = None) -> list[str]:
    """Return the shards of a split, in order, relative to ``root``.

    Args:
        root: folder of the shards.
        split: ``"train"`` or ``"val"``.
        patterns: names with ``*`` and ``?``, or with ranges such as ``{000000..001281}``. None for ``*train*.tar`` or
            ``train/*.tar``, and for ``*val*.tar``, ``val/*.tar`` or ``validation/*.tar``.

    Raises:
        FileNotFoundError: there is no shard, or one of a range is missing.
        ValueError: a shard is not a local file, or no shard is named.
    """
    if patterns is None:
        found = _default_shards(root, split)
    else:
        patterns = [patterns] if isinstance(patterns, str) else list(patterns)
        found = [name for pattern in patterns for name in _matches(root, pattern, split)]
        if not found:
            raise ValueError(f"{split}_shards={patterns} names no shard; name some, or use null for the usual names")
    _warn_of_gaps(root, found)
    return found


def require_distinct(root: Path, names: Sequence[str]) -> None:
    """Raise ValueError if a shard appears twice, also by different paths."""
    seen: dict[Path, str] = {}
    for name in names:
        path = (root / name).resolve()
        if path in seen:
            raise ValueError(
                f"the shard {root / name} is used twice{'' if seen[path] == name else f', also as {seen[path]}'}; set "
                "train_shards and val_shards so that they name each shard once"
            )
        seen[path] = name


def expand_range(pattern: str) -> list[str]:
    """Return the names that a pattern with ranges such as ``{000..127}`` stands for. Leading zeros are kept."""
    match = _RANGE.search(pattern)
    if match is None:
        return [pattern]
    first, last = match.groups()
    if int(first) > int(last):
        raise ValueError(f"{pattern} has a range that ends before it begins; use {{{last}..{first}}}")
    if int(last) - int(first) >= MAX_RANGE:
        raise ValueError(f"{pattern} stands for over {MAX_RANGE} shards; give a shorter range")
    numbers = (str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))
    return [
        name for number in numbers for name in expand_range(pattern[: match.start()] + number + pattern[match.end() :])
    ]


def _default_shards(root: Path, split: str) -> list[str]:
    """Return the shards of a split in ``root`` itself, or in a folder of the split. Compressed ones are among them."""
    beside = [name for name in _tar_files(root) if any(word in name.lower() for word in SPLITS[split])]
    inside = [f"{folder}/{name}" for folder in SPLITS[split] for name in _tar_files(root / folder)]
    if beside and inside:
        raise ValueError(f"both {root / beside[0]} and {root / inside[0]} look like shards; set {split}_shards")
    if not beside and not inside:
        raise FileNotFoundError(
            f"there are no shards for {split} in {root.absolute()}; set data.root to the folder with *{split}*.tar or "
            f"{split}/*.tar, or set {split}_shards (for class folders, use data=imagenet)"
        )
    return beside or inside


def _tar_files(folder: Path) -> list[str]:
    """Return the names of the tar files in a folder, in order. Compressed ones are refused when they are read."""
    if not folder.is_dir():
        return []
    suffixes = (".tar", ".tgz", ".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst", ".tar.lz4")
    with os.scandir(folder) as entries:
        # Not `is_file`, which would leave out a link to a shard that is missing, without an error when it is read.
        names = [entry.name for entry in entries if not entry.is_dir() and not entry.name.startswith(".")]
    return sorted(name for name in names if name.lower().endswith(suffixes))


def _matches(root: Path, pattern: str, split: str) -> list[str]:
    """Return the shards that one pattern stands for. They are relative to ``root``, unless the pattern is absolute."""
    if "://" in pattern or pattern.startswith("pipe:"):
        raise ValueError(
            f"{split}_shards={pattern} is not a local file, but images are read in random order; copy the shards to "
            "a local disk, and give their names there"
        )
    names = expand_range(pattern)
    if any(character in pattern for character in "*?["):
        names = sorted({path for name in names for path in glob.glob(name, root_dir=root)})
        if not names:
            raise FileNotFoundError(f"{split}_shards={pattern} matches no file in {root.absolute()}; see ls {root}")
    missing = [name for name in names if not (root / name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"{len(missing)} of the {len(names)} shards of {split}_shards={pattern} are missing, of which "
            f"{root / missing[0]} is the first; download them, or name those that are there"
        )
    return names


def _warn_of_gaps(root: Path, names: Sequence[str]) -> None:
    """Warn of numbers that are missing among numbered shards: a download may be incomplete."""
    numbers: dict[tuple[str, str], list[int]] = {}
    for name in names:
        match = _LAST_NUMBER.fullmatch(name)
        if match is not None:
            before, number, after = match.groups()
            numbers.setdefault((before, after), []).append(int(number))
    for (before, after), present in numbers.items():
        missing = max(present) + 1 - min(present) - len(present)
        if 0 < missing < len(present):  # otherwise the numbers are no count of shards
            log.warning(
                "%d shards are missing between the first and the last of %s/%s*%s; is the download complete?",
                missing, root, before, after,
            )  # fmt: skip


# --- Read where the images of a tar shard are, and their labels, from its headers.
#
# The convention is WebDataset's: the members ``KEY.jpg`` and ``KEY.cls`` of a shard are an image and its label. A key
# is the name up to the first dot after the last slash, and the rest is the suffix, in any case of letters.

IMAGE_SUFFIXES = ("jpeg", "jpg", "png")
LABEL_SUFFIX = "cls"
MAX_LABEL_BYTES = 64
MAX_LABEL = 2**31

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
        self.dotted: dict[str, str] = {}  # key -> a member that would be an image, if its key ended at the last dot

    def add(self, member: tarfile.TarInfo, file: BinaryIO) -> None:
        """Take in a member if it is an image or a label."""
        key, suffix = split_name(member.name)
        if member.isdir() or key is None:
            return
        if suffix not in (*IMAGE_SUFFIXES, LABEL_SUFFIX):
            self.others.add(suffix)
            if suffix.rpartition(".")[2] in IMAGE_SUFFIXES:
                self.dotted[key] = member.name
            return
        if not member.isreg() or member.issparse():
            raise ValueError(
                f"{_printable(member.name)} in {self.path} is a link or a sparse file, without bytes of its own; write "
                "the shard again with tar --dereference --hard-dereference"
            )
        found = self.labels if suffix == LABEL_SUFFIX else self.images
        if key in found:
            kind = "labels" if suffix == LABEL_SUFFIX else "images"
            raise ValueError(
                f"{self.path} has two {kind} {_printable(key)}; give each image a name of its own within its shard"
            )
        if suffix == LABEL_SUFFIX:
            # Labels are small and lie beside the headers, so reading them here costs little.
            file.seek(member.offset_data)
            self.labels[key] = _parse_label(file.read(min(member.size, MAX_LABEL_BYTES)), member.name, self.path)
        else:
            self.images[key] = (member.offset_data, member.size)

    def members(self) -> Members:
        """Return all images with their labels, or raise ValueError if one is without the other."""
        image_names = f"KEY.{', KEY.'.join(IMAGE_SUFFIXES)}"
        if not self.images:
            others = _printable(f", but .{', .'.join(sorted(self.others)[:5])}" if self.others else "")
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
                    f"{self.path} has no {name} for {len(alone)} keys, of which {_printable(alone[0])} is the first; "
                    "write it again with an image and a label for each key"
                )
        # KEY.seg.png beside KEY.jpg is no image of its own. Without one, images would be missing without a word.
        lost = [name for key, name in self.dotted.items() if key not in self.images]
        if lost:
            raise ValueError(
                f"{_printable(lost[0])} in {self.path} is no image: a key ends at the first dot of a name; write the "
                "shard again with names that have one dot"
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
    with open(path, "rb") as file:
        _require_uncompressed(path, file)
        try:
            # "r:" reads uncompressed files only.
            with tarfile.open(fileobj=file, mode="r:") as tar:
                members = list(_forward(tar))
                end = tar.offset
        except OSError:
            raise
        except Exception as error:  # a header may claim anything, and tarfile raises errors of any kind
            raise _incomplete(path, str(error) or "a header claims more bytes than there is memory for") from error
        _require_end(path, file, end)
        for member in members:
            scan.add(member, file)
    return scan.members()


def _forward(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Yield the members. With a negative length tarfile goes back, and reads the same headers for ever."""
    last = -1
    for member in tar:
        if member.size < 0 or member.offset <= last:
            raise tarfile.ReadError("a header claims a negative number of bytes")
        last = member.offset
        yield member


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


def _printable(text: str) -> str:
    """Return a name of a file without line breaks and terminal codes, which whoever made an archive may have put in."""
    return repr(text)[1:-1]


def _parse_label(text: bytes, name: str, path: Path) -> int:
    label = text.strip()
    if not label.isdigit() or int(label) > MAX_LABEL:
        raise ValueError(
            f"{_printable(name)} in {path} contains {label[:20]!r}, which is not the number of a class; write numbers "
            "from 0, in the order of the classes' names"
        )
    return int(label)


# --- An index of the images in tar shards, and its file.
#
# Reading all headers of ImageNet takes minutes, so the index is kept in a file beside the shards. The file has arrays
# of numbers only, and nothing in it is ever executed. A shard whose size or time of modification differs is read again.


INDEX_FILE = "shard_index.npz"
VERSION = 1
FIELDS = Members._fields
THREADS = 8  # they wait for the disk; Python's own work is on one core


class Stamp(NamedTuple):
    """What tells that a shard is still the one that was indexed."""

    size: int
    mtime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Stamp:
        """Return the stamp of an open file or a path."""
        return cls(status.st_size, status.st_mtime_ns)


class IndexedShard(NamedTuple):
    """One shard: its state when it was indexed, and its images."""

    stamp: Stamp
    members: Members


def index_shards(root: Path, names: Sequence[str], file: Path) -> list[IndexedShard]:
    """Return the index of shards, in their order.

    Args:
        root: folder that ``names`` are relative to.
        names: the shards.
        file: where the index is kept. If a shard is not in it, or has changed, the headers of that shard are read and
            the file is written again.

    Raises:
        FileNotFoundError: a shard does not exist.
        ValueError: see `scan_shard`.
    """
    known = load_index(file)
    stamps = {name: Stamp.of((root / name).stat()) for name in names}
    new = [name for name in names if name not in known or known[name].stamp != stamps[name]]
    if new:
        start_s = time.perf_counter()
        log.info("reading the headers of %d shards in %s", len(new), root)
        with ThreadPoolExecutor(THREADS) as pool:
            found = pool.map(lambda name: scan_shard(root / name), new)
            known |= {name: IndexedShard(stamps[name], members) for name, members in zip(new, found, strict=True)}
        num_images = sum(len(known[name].members.labels) for name in new)
        log.info("found %d images in %.0f s", num_images, time.perf_counter() - start_s)
        _save_or_warn(file, known)
    return [known[name] for name in names]


def load_index(file: Path) -> dict[str, IndexedShard]:
    """Return what the file of an index has of each shard, by name. A file that is missing or damaged has nothing."""
    if not file.exists():
        return {}
    try:
        # Without pickles: a file in a shared folder could otherwise call any function.
        # Opened here, because np.load leaves a file open that is none of its own.
        with open(file, "rb") as source, np.load(source, allow_pickle=False) as arrays:
            # Ours is not compressed. Megabytes of zeros could stand for more than the memory holds.
            if sum(part.file_size for part in arrays.zip.infolist()) > file.stat().st_size:
                raise ValueError("it is compressed")
            return _checked(arrays)
    except Exception as error:  # parsers of damaged files raise errors of any kind
        log.warning("%s cannot be used, and is made again: %s", file, error)
        return {}


def save_index(file: Path, shards: dict[str, IndexedShard]) -> None:
    """Write the file of an index. Other processes see the old or the new one, and never a part."""
    members = [shard.members for shard in shards.values()]
    columns: dict[str, Any] = {field: np.concatenate([getattr(part, field) for part in members]) for field in FIELDS}
    temporary = file.with_name(f".{file.name}.{uuid.uuid4().hex}")
    try:
        with open(temporary, "xb") as target:
            np.savez(
                target,
                version=np.array(VERSION),
                names=np.array([os.fsencode(name) for name in shards], dtype=np.bytes_),
                stamps=np.array([shard.stamp for shard in shards.values()], dtype=np.int64),
                counts=np.array([len(part.labels) for part in members], dtype=np.int64),
                **columns,
            )
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)


def _save_or_warn(file: Path, shards: dict[str, IndexedShard]) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        save_index(file, shards)
    except OSError as error:
        log.warning(
            "the index of the shards cannot be kept (%s), so every process reads all headers again; set index_dir to a "
            "folder that can be written",
            error,
        )


def _checked(arrays: np.lib.npyio.NpzFile) -> dict[str, IndexedShard]:
    """Return the shards of a file, or raise ValueError if its parts do not fit together."""
    if int(arrays["version"]) != VERSION:
        raise ValueError(f"it is of version {int(arrays['version'])}, not {VERSION}")
    names, stamps, counts = arrays["names"], arrays["stamps"], arrays["counts"]
    columns = [arrays[field] for field in FIELDS]
    if any(column.dtype != np.int64 for column in (stamps, counts, *columns)):
        raise ValueError("its numbers are not int64")
    if stamps.shape != (len(names), 2) or counts.shape != (len(names),) or (counts < 1).any():
        raise ValueError("its shards do not fit together")
    if any(column.shape != (counts.sum(),) for column in columns):
        raise ValueError("its images do not fit its shards")
    offsets, lengths, labels = columns
    if (offsets < 0).any() or (lengths < 0).any() or (labels < 0).any():
        raise ValueError("it has negative numbers")
    sizes = np.repeat(stamps[:, 0], counts)
    if (offsets > sizes).any() or (lengths > sizes - offsets).any():
        raise ValueError("it has images outside of their shards")
    ends = np.cumsum(counts)
    return {
        os.fsdecode(bytes(name)): IndexedShard(
            Stamp(int(size), int(mtime_ns)), Members(*(column[end - count : end] for column in columns))
        )
        for name, (size, mtime_ns), count, end in zip(names, stamps, counts, ends, strict=True)
    }


# --- Images in tar shards, read one by one in any order.

MAX_OPEN = 4096


class ImagesInShards:
    """The images of tar shards, by number: those of the first shard come first, in its order.

    A process keeps shards open, up to half of the files that it may have, because opening one is slow on a network file
    system.

    Args:
        root: folder that ``names`` are relative to.
        names: the shards.
        index: what is in each shard.
    """

    def __init__(self, root: Path, names: Sequence[str], index: Sequence[IndexedShard]) -> None:
        self._open: OrderedDict[int, int] = OrderedDict()  # shard -> file descriptor, the least recently used first
        self._max_open = _max_open_files()
        self.root = root
        self._names = list(names)
        self._stamps = [shard.stamp for shard in index]
        # Arrays and no Python objects, because reading an object in a worker copies the memory that it was forked with.
        self._shard_of = np.repeat(
            np.arange(len(index), dtype=np.int32), [len(shard.members.labels) for shard in index]
        )
        self._offsets = np.concatenate([shard.members.offsets for shard in index])
        self._lengths = np.concatenate([shard.members.lengths for shard in index])

    def __len__(self) -> int:
        return len(self._offsets)

    def read(self, index: int) -> bytes:
        """Return the bytes of an image.

        Raises:
            FileNotFoundError: its shard no longer exists.
            RuntimeError: its shard has changed since it was indexed.
        """
        shard = int(self._shard_of[index])
        length = int(self._lengths[index])
        # Reads at a position, so processes that share an open file do not disturb each other.
        descriptor = self._descriptor(shard)
        data = os.pread(descriptor, length, int(self._offsets[index]))
        # An open shard may have been written over, and another image may be there now.
        if len(data) != length or Stamp.of(os.fstat(descriptor)) != self._stamps[shard]:
            raise self._changed(shard)
        return data

    def name(self, index: int) -> str:
        """Return the name of an image in its shard, and the path of the shard."""
        path = self._path(int(self._shard_of[index]))
        return f"{_printable(member_name(path, int(self._offsets[index])))} in {path}"

    def close(self) -> None:
        """Close all files. The next image opens its shard again."""
        while self._open:
            os.close(self._open.popitem()[1])

    def __del__(self) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": OrderedDict()}  # descriptors mean nothing in another process

    def _descriptor(self, shard: int) -> int:
        """Return the file descriptor of an open shard."""
        if shard in self._open:
            self._open.move_to_end(shard)
            return self._open[shard]
        if len(self._open) >= self._max_open:
            os.close(self._open.popitem(last=False)[1])
        descriptor = os.open(self._path(shard), os.O_RDONLY | os.O_CLOEXEC)
        if Stamp.of(os.fstat(descriptor)) != self._stamps[shard]:
            os.close(descriptor)
            raise self._changed(shard)
        self._open[shard] = descriptor
        return descriptor

    def _path(self, shard: int) -> Path:
        return self.root / self._names[shard]

    def _changed(self, shard: int) -> RuntimeError:
        return RuntimeError(
            f"{self._path(shard)} has changed since the start of this run; leave the shards as they are while a run "
            "reads them, and start it again"
        )


def _max_open_files() -> int:
    """Return half of the files that this process may have open."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_OPEN if limit == resource.RLIM_INFINITY else max(1, min(MAX_OPEN, limit // 2))
