"""An index of the images in tar shards, and its file.

Reading all headers of ImageNet takes minutes, so the index is kept in a file beside the shards. The file has arrays of
numbers only, and nothing in it is ever executed. A shard whose size or time of modification differs is read again.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lightning_dp.data.shard_scan import Members, scan_shard

log = logging.getLogger(__name__)

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
    if (offsets + lengths > np.repeat(stamps[:, 0], counts)).any():
        raise ValueError("it has images outside of their shards")
    ends = np.cumsum(counts)
    return {
        os.fsdecode(bytes(name)): IndexedShard(
            Stamp(int(size), int(mtime_ns)), Members(*(column[end - count : end] for column in columns))
        )
        for name, (size, mtime_ns), count, end in zip(names, stamps, counts, ends, strict=True)
    }
