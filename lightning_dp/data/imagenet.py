"""ImageNet (ILSVRC-2012), read from class folders."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_dp.data.dali import BrokenFileError, DaliDecoder
from lightning_dp.data.encoded_files import EncodedFiles, EncodedImages
from lightning_dp.data.image_files import ImageFiles
from lightning_dp.data.image_sources import FilesInFolder, ImageSource
from lightning_dp.data.imagenet_folders import list_train, list_val
from lightning_dp.data.jpeg import Decoder, resolve_decoder
from lightning_dp.data.module import ByteImageDataModule, Split
from lightning_dp.data.random_crops import CROPS, Crop

MEAN = (0.485, 0.456, 0.406)  # of the training images, as everywhere
STD = (0.229, 0.224, 0.225)
MAX_AUTO_WORKERS = 16


class ImageNet(ByteImageDataModule):
    """Images in ``root/train/CLASS/`` and ``root/val/``, cropped and flipped at random for training.

    The official validation images are used for validation and for the test, as in the literature: the labels of the
    official test images are not public. They are decoded exactly, each once on any number of ranks.

    Args:
        root: folder with ``train/CLASS/*.JPEG`` and with ``val/CLASS/*.JPEG``, or ``val/*.JPEG`` and a label file.
        num_classes: number of classes of the model. There may be fewer class folders.
        image_size: height and width of the training images. At the end of training, if they grow.
        start_image_size: height and width of the training images in the first epochs (progressive resizing), or None
            for ``image_size``. In between, sizes are multiples of 32.
        resize_between: when training images grow, as fractions of all epochs.
        eval_image_size: height and width for validation and test, or None for ``image_size``.
        crop: random crops of training images, ``"resized"`` or ``"square"``: see
            `lightning_dp.data.random_crops.RandomCrops`. None for the central square, without flips.
        on_broken: ``"raise"`` an error that names a file that cannot be decoded, or ``"skip"`` it, with a warning: see
            `broken_files`.
        decoder: ``"simplejpeg"``, ``"pillow"``, or ``"auto"`` for the faster one of these that is installed.
            ``"dali"``: the loader's batches are `EncodedImages`, and the Trainer decodes them on its device.
        val_labels: file with the labels of ``val/*.JPEG``: see `lightning_dp.data.imagenet_folders.read_labels`.
        batch_size: see `ImageDataModule`.
        eval_batch_size: see `ImageDataModule`.
        seed: see `ImageDataModule`.
        num_workers: number of worker processes of each loader, or None for one per CPU core, divided among the ranks of
            the node, and at most 16.
        drop_last: see `ImageDataModule`.

    Raises:
        ValueError: an option cannot work.
    """

    mean = MEAN
    std = STD

    def __init__(
        self,
        root: str | Path = "data/imagenet",
        num_classes: int = 1000,
        image_size: int = 224,
        start_image_size: int | None = None,
        resize_between: tuple[float, float] = (0.7, 0.8),
        eval_image_size: int | None = None,
        crop: Crop | None = "resized",
        on_broken: Literal["raise", "skip"] = "raise",
        decoder: Decoder = "auto",
        val_labels: str | Path | None = None,
        batch_size: int = 256,
        eval_batch_size: int = 1000,
        seed: int = 0,
        num_workers: int | None = None,
        drop_last: bool = True,
    ) -> None:
        super().__init__(batch_size, eval_batch_size, seed, _workers(num_workers), drop_last)
        if crop is not None and crop not in CROPS:
            raise ValueError(f"crop={crop!r} must be one of {', '.join(map(repr, CROPS))}, or null for no augmentation")
        if on_broken not in ("raise", "skip"):
            raise ValueError(f"on_broken={on_broken!r} must be 'raise' or 'skip'")
        if decoder == "dali" and on_broken == "skip":
            raise ValueError("on_broken='skip' needs decoder='auto': DALI decodes a whole batch or none of it")
        begin, end = resize_between
        if not 0 <= begin <= end <= 1:
            raise ValueError(
                f"resize_between={resize_between} must be two fractions of the epochs, the first not greater"
            )
        self.root = Path(root)
        self.num_classes = num_classes
        self.image_size = image_size
        self.start_image_size = image_size if start_image_size is None else start_image_size
        self.resize_between = (begin, end)
        self.eval_image_size = image_size if eval_image_size is None else eval_image_size
        self.image_shape = (3, image_size, image_size)
        self.crop = crop
        self.on_broken = on_broken
        self.decoder = decoder
        self.val_labels = None if val_labels is None else Path(val_labels)
        self._found: tuple[Split, Split] | None = None
        self._datasets: dict[str, ImageFiles | EncodedFiles] = {}
        # By process and device. The parent's stays here after a fork: freeing it would wait for threads that are gone.
        self._dali: dict[tuple[int, torch.device], DaliDecoder] = {}

    def check(self, world_size: int) -> None:
        """Check also that there is a decoder. See `ImageDataModule.check`."""
        resolve_decoder(self.decoder)
        super().check(world_size)

    def read_train(self) -> tuple[Split, Split]:
        """Return names and labels of the training images and of the official validation images."""
        if self._found is None:
            train, classes = list_train(self.root)
            if len(classes) > self.num_classes:
                raise ValueError(
                    f"{self.root / 'train'} has {len(classes)} class folders, but num_classes={self.num_classes}; "
                    f"use num_classes={len(classes)} or more"
                )
            self._found = train, list_val(self.root, classes, self.val_labels)
        return self._found

    def read_test(self) -> Split:
        """Return names and labels of the official validation images."""
        return self.read_train()[1]

    def image_size_of(self) -> Callable[[int], int] | None:
        """Return a function from an epoch to the size of its training images, or None if it never changes.

        Raises:
            ValueError: the size changes, and the Trainer has no number of epochs.
        """
        if self.start_image_size == self.image_size:
            return None
        epochs = None if self.trainer is None else self.trainer.max_epochs
        if epochs is None or epochs < 1:
            raise ValueError(
                f"start_image_size={self.start_image_size} needs to know the number of epochs, but "
                f"max_epochs={epochs}; set trainer.max_epochs, or start_image_size=null"
            )
        first, last = (share * epochs for share in self.resize_between)
        return lambda epoch: image_size_at(epoch, first, last, self.start_image_size, self.image_size)

    def broken_files(self) -> list[str]:
        """Return the files that were skipped so far, because they cannot be decoded. Of this rank only."""
        datasets = [dataset for dataset in self._datasets.values() if isinstance(dataset, ImageFiles)]
        return sorted({name for dataset in datasets for name in dataset.broken_files()})

    def loader_images_per_s(self) -> float | None:
        """Return the training images per second that the workers of this rank can deliver.

        None before there are any, and with ``decoder="dali"``, where workers only read files.
        """
        train = self._datasets.get("train")
        return train.images_per_s() if isinstance(train, ImageFiles) else None

    def on_after_batch_transfer(self, batch: tuple[Any, Tensor], dataloader_idx: int) -> tuple[Tensor, Tensor]:
        """Return normalized images and the labels. Lightning calls this when the batch is on the device."""
        images, labels = batch
        if isinstance(images, EncodedImages):
            images = self._decode(images, labels.device)
        return super().on_after_batch_transfer((images, labels), dataloader_idx)

    def _decode(self, images: EncodedImages, device: torch.device) -> Tensor:
        """Return what DALI makes of the images, in a decoder of this process: its threads do not survive a fork."""
        key = os.getpid(), device
        if key not in self._dali:
            self._dali[key] = DaliDecoder(device, _workers(None))
        try:
            return self._dali[key](images)
        except BrokenFileError as error:
            dataset = self._datasets[images.split]
            assert isinstance(dataset, EncodedFiles)
            raise dataset.broken(error.index, error) from error

    def _source(self, images: Any) -> ImageSource:
        """Return the encoded images of a split, from the first part of what `read_train` returns for it."""
        return FilesInFolder(self.root, images)

    def _dataset(self, split: str, augment: bool) -> Dataset[Any]:
        if split not in self._datasets:
            training = split == "train"
            images, labels = self._splits[split]
            size = self.image_size if training else self.eval_image_size
            crop = self.crop if training else None
            decoder = resolve_decoder(self.decoder)
            if decoder == "dali":
                self._datasets[split] = EncodedFiles(self._source(images), labels, size, crop, split)
                return self._datasets[split]
            self._datasets[split] = ImageFiles(
                self._source(images),
                labels,
                size,
                crop=crop,
                training=training,
                decoder=decoder,
                skip_broken=self.on_broken == "skip",
                num_workers=self.num_workers,
            )
        return self._datasets[split]


def image_size_at(epoch: int, first: float, last: float, start_size: int, end_size: int) -> int:
    """Return the image size of an epoch: ``start_size`` up to epoch ``first``, ``end_size`` from epoch ``last`` on.

    In between it grows linearly, rounded to a multiple of 32, which is the total stride of a ResNet.
    """
    if epoch <= first:
        return start_size
    if epoch >= last:
        return end_size
    share = (epoch - first) / (last - first)
    return round((start_size + (end_size - start_size) * share) / 32) * 32


def _workers(num_workers: int | None) -> int:
    """Return the number of workers: as given, or a fair share of this machine's cores, at least 1."""
    if num_workers is not None:
        return num_workers
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return max(1, min(MAX_AUTO_WORKERS, len(os.sched_getaffinity(0)) // ranks))
