"""CIFAR-10: a safe reader of its files, the data module, and the verified download.

The files are pickles, and a pickle can name and call any function. This reader accepts only the few names that rebuild
a numpy array. It resolves even these to classes of its own, so a file never calls a function outside this module.
"""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import http.client
import os
import pickle
import pickletools
import sys
import tarfile
import tempfile
import urllib.error
import urllib.request
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_dp.data.loading import stratified_holdout
from lightning_dp.data.module import ImageDataModule, Split

MAX_MEMO = 1 << 20  # objects in a pickle that it refers to again; the official ones have a few
ARCHIVE = "cifar-10-python.tar.gz"


def read_batch_file(path: Path) -> tuple[Tensor, Tensor]:
    """Return the images (N, 3, 32, 32) uint8 and the labels (N,) int64 of one file. N may differ from 10,000.

    Raises:
        ValueError: the file names anything but a numpy array, or does not contain images and labels.
    """
    with open(path, "rb") as file:
        try:
            _require_small_memo(file)
            return _checked(_PlainUnpickler(file, encoding="bytes").load())
        except Exception as error:  # a broken pickle can raise almost any error
            reason = str(error) or type(error).__name__
            raise ValueError(
                f"{path} is not a file of CIFAR-10's python version: {reason}; delete it and unpack {ARCHIVE} again"
            ) from error


def _require_small_memo(file: BinaryIO) -> None:
    """Raise UnpicklingError for a place in the memo that the unpickler would allocate gigabytes for."""
    for opcode, place, _ in pickletools.genops(file):
        if opcode.name in ("PUT", "LONG_BINPUT") and place is not None and place > MAX_MEMO:
            raise pickle.UnpicklingError(f"it stores an object at place {place}")
    file.seek(0)


def _checked(batch: Any) -> tuple[Tensor, Tensor]:
    if not isinstance(batch, dict) or not {b"data", b"labels"} <= batch.keys():
        raise ValueError("it is not a dict with the keys b'data' and b'labels'")
    data, labels = batch[b"data"], batch[b"labels"]
    if not isinstance(data, _Array) or data.pixels.ndim != 2 or data.pixels.shape[1] != 3072:
        found = data.pixels.shape if isinstance(data, _Array) else type(data).__name__
        raise ValueError(f"data is {found}, not an array (N, 3072)")
    if not isinstance(labels, list) or not all(type(label) is int and 0 <= label < 10 for label in labels):
        raise ValueError("labels is not a list of integers from 0 to 9")
    if len(labels) != len(data.pixels) or not labels:
        raise ValueError(f"{len(labels)} labels for {len(data.pixels)} images")
    return torch.from_numpy(data.pixels.reshape(-1, 3, 32, 32).copy()), torch.tensor(labels)


class _Dtype:
    """Stands in for ``numpy.dtype``. It accepts unsigned bytes only."""

    def __init__(self, code: str | bytes, *_: Any) -> None:
        if code not in ("u1", b"u1"):
            raise pickle.UnpicklingError(f"it holds an array of type {code!r}, not uint8")

    def __setstate__(self, state: Any) -> None:
        pass  # the state is the byte order, which single bytes do not have


class _Array:
    """Stands in for ``numpy.ndarray``, and for the function that makes an empty array before its state is set."""

    def __init__(self, *_: Any) -> None:
        self.pixels: NDArray[np.uint8] = np.empty(0, np.uint8)

    def __setstate__(self, state: tuple[int, tuple[int, ...], _Dtype, bool, bytes]) -> None:
        _, shape, dtype, fortran_order, raw = state
        if not isinstance(dtype, _Dtype):
            raise pickle.UnpicklingError("it holds an array without a type")
        self.pixels = np.frombuffer(raw, np.uint8).reshape(shape, order="F" if fortran_order else "C")


def _encode(text: str, encoding: str) -> bytes:
    """Return the bytes that Python 3 writes as text in the pickle protocol of Python 2."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"it asks for the encoding {encoding!r}")
    return text.encode("latin1")


ADMITTED = {
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("numpy.core.multiarray", "_reconstruct"): _Array,  # numpy 1
    ("numpy._core.multiarray", "_reconstruct"): _Array,  # numpy 2
    ("_codecs", "encode"): _encode,
}


class _PlainUnpickler(pickle.Unpickler):
    """Accepts what needs no name (dicts, lists, numbers, strings) and numpy arrays of bytes."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        """Return what stands in for a name in the pickle, or raise UnpicklingError."""
        if (module_name, global_name) not in ADMITTED:
            raise pickle.UnpicklingError(
                f"it asks for {module_name}.{global_name}, which such a file does not need (nothing was run)"
            )
        return ADMITTED[module_name, global_name]


# --- CIFAR-10 (Krizhevsky 2009), read from the files of the official python version.

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
        self.root = Path(root).expanduser()  # as torchvision does
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
        if not self.download or self.folder.exists():
            return
        archive = self.root / ARCHIVE
        # The nodes of a run, and the jobs of a sweep, may share the folder.
        with one_at_a_time(self.root / f".{ARCHIVE}.lock"):
            if not self.folder.exists():
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
    if val_size not in range(num_images):
        raise ValueError(
            f"val_size={val_size} cannot be held out of the {num_images} training images in {where}; "
            f"use 0 (no validation) to {num_images - 1}"
        )
    return num_images - val_size


# --- Downloads that resume, are verified before they are used, and never leave a partial file under the final name.

CHUNK_BYTES = 1 << 18
TIMEOUT_S = 30.0  # without any byte


@contextmanager
def one_at_a_time(lock: Path) -> Iterator[None]:
    """Let one process at a time into the context, on all machines that share the folder of the file ``lock``.

    The file is removed at the end. A file system without locks lets all in.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    while True:
        # For writing, which an exclusive lock needs over NFS.
        with open(lock, "w") as file:
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
            if not _is_at(lock, file):  # who held it has removed it, and others may wait for a new one
                continue
            try:
                yield
            finally:
                lock.unlink(missing_ok=True)
            return


def _is_at(path: Path, file: IO[str]) -> bool:
    """Return whether ``path`` is still the name of an open file."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def download(url: str, path: Path, sha256: str) -> None:
    """Download ``url`` to ``path``, unless ``path`` has the right checksum already.

    The data is written to ``path`` + ".part". After an interruption, the next call asks the server for the rest only,
    or for the whole file if the server does not support ranges. Call it in one process at a time.

    Raises:
        ConnectionError: the transfer failed. The ".part" file stays and is resumed by the next call.
        ValueError: the checksum is wrong. The ".part" file is deleted. A file that was at ``path`` before is kept.
    """
    remedy = f"run again, or download {url} by other means and put it at {path}"
    if path.exists():
        found = sha256_of(path)
        if found != sha256:
            raise ValueError(f"{path}: expected sha256 {sha256}, found {found}; delete the file and {remedy}")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    try:
        _receive(url, part)
    except (OSError, http.client.HTTPException) as error:
        kept = f"{part.stat().st_size} bytes are kept in {part}; " if part.exists() else ""
        raise ConnectionError(f"cannot download {url}: {error}; {kept}{remedy}") from error
    found = sha256_of(part)
    if found != sha256:
        part.unlink()
        raise ValueError(f"{url}: expected sha256 {sha256}, found {found}; the download was deleted; {remedy}")
    os.replace(part, path)


def _receive(url: str, part: Path) -> None:
    """Append to ``part`` what is missing of ``url``."""
    if not url.startswith(("http://", "https://")):
        raise OSError("only http and https addresses are downloaded")
    done = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={done}-"} if done else {})
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT_S)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            return  # the server has no more bytes than ``part``; the checksum decides whether it is complete
        raise
    with response:
        resumed = response.status == http.HTTPStatus.PARTIAL_CONTENT
        if not resumed:
            done = 0
        length = response.headers.get("Content-Length")
        total = done + int(length) if length else None
        with open(part, "ab" if resumed else "wb") as file:
            while chunk := response.read(CHUNK_BYTES):
                file.write(chunk)
                before = done
                done += len(chunk)
                if total and 10 * done // total > 10 * before // total:
                    percent = 100 * done // total
                    print(f"{part.stem}: {percent} % of {total / 1e6:.1f} MB", file=sys.stderr, flush=True)
    if total is not None and done != total:
        raise OSError(f"the transfer stopped after {done} of {total} bytes")


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def extract(archive: Path, name: str, root: Path) -> None:
    """Unpack folder ``name`` of a ``.tar.gz`` to ``root/name``, completely or not at all.

    Raises:
        ValueError: the archive is broken, has paths outside of its folder, or does not contain ``name``.
        TypeError: Python is older than 3.11.4, and cannot extract safely (PEP 706).
    """
    with tempfile.TemporaryDirectory(prefix=".unpacking-", dir=root) as temporary:
        try:
            with tarfile.open(archive, "r:gz") as tar:
                tar.extractall(temporary, filter="data")
        except (tarfile.TarError, gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise ValueError(f"{archive} cannot be unpacked: {error}; delete it and download it again") from error
        unpacked = Path(temporary, name)
        if not unpacked.is_dir():
            raise ValueError(f"{archive} contains no folder {name}; delete it and download the official one")
        os.replace(unpacked, root / name)
