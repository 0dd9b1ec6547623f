"""Images in tar shards, read one by one in any order."""

from __future__ import annotations

import os
import resource
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lightning_dp.data.shard_index import IndexedShard, Stamp
from lightning_dp.data.shard_scan import member_name

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
        data = os.pread(self._descriptor(shard), length, int(self._offsets[index]))
        if len(data) != length:
            raise self._changed(shard)
        return data

    def name(self, index: int) -> str:
        """Return the name of an image in its shard, and the path of the shard."""
        path = self._path(int(self._shard_of[index]))
        return f"{member_name(path, int(self._offsets[index]))} in {path}"

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
