"""ImageNet (ILSVRC-2012), read from tar shards."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lightning_dp.data.image_sources import ImageSource
from lightning_dp.data.imagenet import ImageNet
from lightning_dp.data.module import Split
from lightning_dp.data.shard_index import INDEX_FILE, IndexedShard, index_shards
from lightning_dp.data.shard_names import find_shards, require_distinct
from lightning_dp.data.shard_source import ImagesInShards

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
        self.index_dir = self.root if index_dir is None else Path(index_dir)

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
