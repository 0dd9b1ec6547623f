"""CIFAR-10 (Krizhevsky 2009), read from the files of the official python version."""

from __future__ import annotations

from pathlib import Path

import torch

from lightning_dp.data.cifar10_file import ARCHIVE, read_batch_file
from lightning_dp.data.download import download, extract
from lightning_dp.data.loading import stratified_holdout
from lightning_dp.data.module import ImageDataModule, Split

FOLDER = "cifar-10-batches-py"
URL = "https://www.cs.toronto.edu/~kriz/" + ARCHIVE
SHA256 = "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce"
TRAIN_FILES = tuple(f"data_batch_{number}" for number in range(1, 6))
TEST_FILE = "test_batch"
OFFICIAL_TRAIN_SIZE, OFFICIAL_TEST_SIZE = 50_000, 10_000
SPLIT_SEED = 2009


class CIFAR10(ImageDataModule):
    """50,000 training and 10,000 test images of 10 classes, 3x32x32.

    Training images are padded, cropped and flipped as in He et al. (arXiv 1512.03385, section 4.2). They are normalized
    by channel, where the paper subtracts a mean image. Validation images are taken from the training images, by a fixed
    stratified choice. The test images are used for the final test only.

    Args:
        root: the folder that contains, or will contain, the folder ``cifar-10-batches-py``.
        download: download the data (170 MB, verified) if ``root`` does not have it. The archive stays in ``root``.
        augment: crop and flip the training images at random.
        val_size: number of training images that are set aside for validation. 0 trains on all 50,000 images, as the
            paper does for its final figures, and there is no validation loader.
        train_limit: maximum number of training images, without validation images. All classes stay equally frequent.
        test_limit: maximum number of test images. All classes stay equally frequent.
        batch_size: see `ImageDataModule`.
        eval_batch_size: see `ImageDataModule`.
        seed: see `ImageDataModule`.
        num_workers: see `ImageDataModule`.
        drop_last: see `ImageDataModule`.
        url: address of the archive.
        sha256: checksum of the archive.
    """

    num_classes = 10
    image_shape = (3, 32, 32)
    mean = (0.4914, 0.4822, 0.4465)  # of the training images
    std = (0.2470, 0.2435, 0.2616)

    def __init__(
        self,
        root: str | Path = "data",
        download: bool = False,
        augment: bool = True,
        val_size: int = 5000,
        train_limit: int | None = None,
        test_limit: int | None = None,
        batch_size: int = 128,
        eval_batch_size: int = 1000,
        seed: int = 0,
        num_workers: int = 0,
        drop_last: bool = True,
        url: str = URL,
        sha256: str = SHA256,
    ) -> None:
        super().__init__(batch_size, eval_batch_size, seed, num_workers, drop_last)
        self.root = Path(root)
        self.folder = self.root / FOLDER
        self.download = download
        self.augment = augment
        self.val_size = val_size
        self.train_limit = train_limit
        self.test_limit = test_limit
        self.url = url
        self.sha256 = sha256

    def prepare_data(self) -> None:
        """Download and unpack the data if it is missing and ``download`` is set. Called on one rank of each node."""
        if self.download and not self.folder.exists():
            archive = self.root / ARCHIVE
            download(self.url, archive, self.sha256)
            extract(archive, FOLDER, self.root)

    def sizes(self) -> dict[str, int]:
        """Return the number of images in each split. Data that is not downloaded yet counts as the official data."""
        if self.download and not self.folder.exists():
            kept = _check_val_size(self.val_size, OFFICIAL_TRAIN_SIZE, self.url)
            train, test = _limited(kept, self.train_limit), _limited(OFFICIAL_TEST_SIZE, self.test_limit)
            return {"train": train, "val": self.val_size, "test": test}
        return super().sizes()

    def read_train(self) -> tuple[Split, Split]:
        """Return the training images, up to ``train_limit``, and the validation images."""
        self._require(*TRAIN_FILES)
        parts = zip(*(read_batch_file(self.folder / name) for name in TRAIN_FILES), strict=True)
        images, labels = map(torch.cat, parts)
        _check_val_size(self.val_size, len(labels), self.folder)
        rest, val = stratified_holdout(labels, self.val_size, SPLIT_SEED)
        _, train = stratified_holdout(labels[rest], _limited(len(rest), self.train_limit), SPLIT_SEED)
        train = rest[train]
        return (images[train], labels[train]), (images[val], labels[val])

    def read_test(self) -> Split:
        """Return the test images, up to ``test_limit``."""
        self._require(TEST_FILE)
        images, labels = read_batch_file(self.folder / TEST_FILE)
        _, test = stratified_holdout(labels, _limited(len(labels), self.test_limit), SPLIT_SEED)
        return images[test], labels[test]

    def _require(self, *names: str) -> None:
        """Raise FileNotFoundError unless the folder contains these files."""
        missing = [name for name in names if not (self.folder / name).is_file()]
        if not missing:
            return
        where = self.folder.absolute()
        if where.exists():
            raise FileNotFoundError(
                f"{where} lacks {', '.join(missing)}; delete that folder, and set download=true (in a recipe, "
                f"data.download=true) or unpack {ARCHIVE} again"
            )
        raise FileNotFoundError(
            f"CIFAR-10 is not in {where} (root={self.root}); set download=true (in a recipe, data.download=true) to "
            f"download it (170 MB), or unpack {ARCHIVE} from {URL} into root yourself, so that it contains "
            f"{FOLDER}/{TRAIN_FILES[0]} to {TRAIN_FILES[-1]} and {FOLDER}/{TEST_FILE}"
        )


def _limited(size: int, limit: int | None) -> int:
    if limit is not None and limit < 1:
        raise ValueError(f"a limit of {limit} images leaves no image; use 1 or more, or null for no limit")
    return size if limit is None else min(size, limit)


def _check_val_size(val_size: int, num_images: int, where: object) -> int:
    """Return the number of images that remain for training, or raise ValueError."""
    if not 0 <= val_size < num_images:
        raise ValueError(
            f"val_size={val_size} cannot be held out of the {num_images} training images in {where}; "
            f"use 0 (no validation) to {num_images - 1}"
        )
    return num_images - val_size
