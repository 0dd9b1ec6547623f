"""ImageNet (ILSVRC-2012) from class folders: the data module, and how its files and labels are found."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from copy import copy
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from lightning_dp.data.dali import DaliDecoder
from lightning_dp.data.image_files import EncodedFiles, EncodedImages, FilesInFolder, ImageFiles, ImageSource
from lightning_dp.data.jpeg import CROPS, Crop, Decoder, resolve_decoder
from lightning_dp.data.loading import normalize
from lightning_dp.data.module import ImageDataModule, Split

log = logging.getLogger(__name__)

MAX_AUTO_WORKERS = 16


class ImageNet(ImageDataModule):
    """Images in ``root/train/CLASS/`` and ``root/val/``, cropped and flipped at random for training.

    The official validation images are used for validation and for the test, as in the literature: the labels of the
    official test images are not public. They are decoded exactly, each once on any number of ranks.

    A loader's batch is (n, 3, H, W) uint8, and images are normalized on the device: workers then send a quarter of the
    bytes, and do not convert them. The training step of a Trainer with this data module gets float32.

    A callback may set ``image_size``, ``eval_image_size`` and ``crop``. Loaders that are made afterwards have them.

    Args:
        root: folder with ``train/CLASS/*.JPEG`` and with ``val/CLASS/*.JPEG``, or ``val/*.JPEG`` and a label file. A
            class may have folders within it.
        num_classes: number of classes of the model. There may be fewer class folders.
        image_size: height and width of the training images. At the end of training, if they grow.
        start_image_size: height and width of the training images in the first epochs (progressive resizing), or None
            for ``image_size``. In between, sizes are multiples of 32.
        resize_between: when training images grow, as fractions of all epochs.
        eval_image_size: height and width for validation and test, or None for ``image_size``.
        crop: random crops of training images, ``"resized"`` or ``"square"``: see
            `lightning_dp.data.jpeg.RandomCrops`. None for the central square, without flips.
        on_broken: ``"raise"`` an error that names a file that cannot be decoded, or ``"skip"`` it, with a warning: see
            `broken_files`.
        decoder: ``"simplejpeg"``, ``"pillow"``, or ``"auto"`` for the faster one of these that is installed.
            ``"dali"``: the loader's batches are `EncodedImages`, and the Trainer decodes them on its device.
        val_labels: file with the labels of ``val/*.JPEG``: see `lightning_dp.data.imagenet.read_labels`.
        batch_size: see `ImageDataModule`.
        eval_batch_size: see `ImageDataModule`.
        seed: see `ImageDataModule`.
        num_workers: number of worker processes of each loader, or None for one per CPU core, divided among the ranks of
            the node, and at most 16.
        drop_last: see `ImageDataModule`.

    Raises:
        ValueError: an option cannot work.
    """

    mean = (0.485, 0.456, 0.406)  # of the training images, as everywhere
    std = (0.229, 0.224, 0.225)
    _class_names: Sequence[str] = ()  # in the order of their labels; none where the data has numbers alone

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
        workers = _cores_of_rank(None) if num_workers is None else num_workers
        super().__init__(batch_size, eval_batch_size, seed, workers, drop_last)
        self._shares_cores = num_workers is None
        if crop is not None and crop not in CROPS:
            raise ValueError(f"crop={crop!r} must be one of {', '.join(map(repr, CROPS))}, or null for no augmentation")
        if on_broken not in ("raise", "skip"):
            raise ValueError(f"on_broken={on_broken!r} must be 'raise' or 'skip'")
        if decoder == "dali" and on_broken == "skip":
            raise ValueError("on_broken='skip' needs decoder='auto': DALI decodes a whole batch or none of it")
        _require_pixels(image_size=image_size, start_image_size=start_image_size, eval_image_size=eval_image_size)
        begin, end = resize_between
        if not 0 <= begin <= end <= 1:
            raise ValueError(f"resize_between={resize_between} must be two fractions of the epochs, in ascending order")
        self.root = Path(root).expanduser()  # as torchvision does
        self.num_classes = num_classes
        self.image_size, self.start_image_size = image_size, start_image_size
        self.resize_between = (begin, end)
        self.eval_image_size = eval_image_size
        self.image_shape = (3, image_size, image_size)
        self.crop = crop
        self.on_broken = on_broken
        self.decoder = decoder
        self.val_labels = None if val_labels is None else Path(val_labels).expanduser()
        self._found: tuple[Split, Split] | None = None
        self._datasets: dict[str, ImageFiles | EncodedFiles] = {}
        # By process and device. The parent's stays here after a fork: freeing it would wait for threads that are gone.
        self._dali: dict[tuple[int, torch.device], DaliDecoder] = {}

    def setup(self, stage: str | None = None) -> None:
        """Divide the cores among the Trainer's ranks, if ``num_workers`` is None. See `ImageDataModule.setup`."""
        if self._shares_cores:
            self.num_workers = _cores_of_rank(self.trainer)
        super().setup(stage)

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
            self._class_names = classes
        return self._found

    def state_dict(self) -> dict[str, Any]:
        """Return the names of the classes for a checkpoint."""
        return {"class_names": list(self._class_names)} if self._class_names else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Log a warning if a label stands for another class than where the checkpoint was made."""
        both = enumerate(zip(state_dict.get("class_names", ()), self._class_names, strict=False))
        moved = next(((label, *names) for label, names in both if len(set(names)) > 1), None)
        if moved is not None and (self.trainer is None or self.trainer.is_global_zero):
            label, theirs, ours = moved
            log.warning(
                f"label {label} is {ours!r} in {self.root / 'train'}, and was {theirs!r} where the checkpoint was made "
                "(the model takes one class for another); put the class folders back, or train from the beginning"
            )

    def read_test(self) -> Split:
        """Return names and labels of the official validation images."""
        return self.read_train()[1]

    def image_size_of(self) -> Callable[[int], int] | None:
        """Return a function from an epoch to the size of its training images, or None if it never changes.

        Raises:
            ValueError: the size changes, and the Trainer has no number of epochs.
        """
        start, end = self.start_image_size, self.image_size
        if start is None or start == end:
            return None
        epochs = None if self.trainer is None else self.trainer.max_epochs
        if epochs is None or epochs < 1:
            raise ValueError(
                f"start_image_size={start} needs to know the number of epochs, but "
                f"max_epochs={epochs}; set trainer.max_epochs, or start_image_size=null"
            )
        first, last = (share * epochs for share in self.resize_between)
        return lambda epoch: image_size_at(epoch, first, last, start, end)

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
        """Return normalized images and the labels. Lightning calls this when the batch is on the device.

        Floating-point images are normalized already: those of a loader that a subclass has of its own.
        """
        images, labels = batch
        if isinstance(images, EncodedImages):
            images = self._decode(images, labels.device)
        if not images.is_floating_point():
            images = normalize(images, self.mean, self.std)
        if self.trainer is not None:  # it has converted the batch before, when images were integers
            images = self.trainer.precision_plugin.convert_input(images)
        return images, labels

    def _decode(self, images: EncodedImages, device: torch.device) -> Tensor:
        """Return what DALI makes of the images, in a decoder of this process: its threads do not survive a fork."""
        key = os.getpid(), device
        if key not in self._dali:
            self._dali[key] = DaliDecoder(device, _cores_of_rank(self.trainer))
        try:
            return self._dali[key](images)
        except RuntimeError:
            dataset = self._datasets[images.split]
            assert isinstance(dataset, EncodedFiles)
            dataset.name_the_broken(images)
            raise

    def _source(self, images: Any) -> ImageSource:
        """Return the encoded images of a split, from the first part of what `read_train` returns for it."""
        return FilesInFolder(self.root, images)

    def _size_of(self, split: str) -> int:
        """Return the size of images, at the end of training if they grow."""
        return self.image_size if split == "train" else self.eval_image_size or self.image_size

    def _dataset(self, split: str, augment: bool) -> Dataset[Any]:
        training = split == "train"
        size, crop = self._size_of(split), self.crop if training else None
        images, labels = self._splits[split]
        # A subclass may have read other images since, as for another fold of a cross-validation.
        if split not in self._datasets or self._datasets[split].labels is not labels:
            encoded = (self._source(images), labels, size, crop)
            decoder = resolve_decoder(self.decoder)
            if decoder == "dali":
                self._datasets[split] = EncodedFiles(*encoded, split)
            else:
                skips = self.on_broken == "skip"
                self._datasets[split] = ImageFiles(*encoded, training, decoder, skips, self.num_workers)
        # Kept for what it counts. A callback may have set other options since, and older loaders keep theirs. The copy
        # has the same names, labels and counters: it takes no memory for each image.
        dataset = self._datasets[split] = copy(self._datasets[split])
        dataset.image_size, dataset.crop = size, crop
        return dataset


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


def _cores_of_rank(trainer: Any) -> int:
    """Return a fair share of this machine's cores, at least 1 and at most `MAX_AUTO_WORKERS`."""
    # Lightning's own launcher does not set the variable that torchrun sets.
    ranks = max(int(os.environ.get("LOCAL_WORLD_SIZE", 1)), 1 if trainer is None else trainer.num_devices)
    return max(1, min(MAX_AUTO_WORKERS, len(os.sched_getaffinity(0)) // ranks))


# --- Find the images of ImageNet (ILSVRC-2012) and their labels, in the layouts that people have.
#
# Classes are numbered in the order of their names (WordNet ids, such as n01440764), as everywhere but in the devkit.

Listing = tuple[NDArray[np.bytes_], Tensor]  # names (N,) relative to the root, labels (N,) int64

SUFFIXES = (".jpeg", ".jpg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")  # torchvision's
DEVKIT = "ILSVRC2012_devkit_t12/data/ILSVRC2012_validation_ground_truth.txt"
LABEL_FILES = (DEVKIT, "val_labels.txt", "LOC_val_solution.csv")


def list_train(root: Path) -> tuple[Listing, list[str]]:
    """Return the images in ``root/train/CLASS/`` and folders within it, and the names of the classes.

    Raises:
        FileNotFoundError: there is no such folder, or no image in it.
        ValueError: images are beside class folders.
    """
    folder = root / "train"
    _require_folder(folder, root)
    classes = _subfolders(folder)
    return _list_classes(root, folder, classes, classes), classes


def list_val(root: Path, classes: Sequence[str], label_file: Path | None = None) -> Listing:
    """Return the images in ``root/val/CLASS/``, or in ``root/val/`` with the labels in a file.

    Args:
        root: the folder that contains ``val``.
        classes: names of all classes, in the order of their labels.
        label_file: see `read_labels`. None looks for each of `LABEL_FILES` in ``root``.

    Raises:
        FileNotFoundError: there is no such folder, no image in it, or no label file for images without class folders.
        ValueError: a class is not among ``classes``, images are beside class folders, a label file is given for class
            folders, or it does not fit the images.
    """
    folder = root / "val"
    _require_folder(folder, root)
    present = _subfolders(folder)
    if present:
        unknown = sorted(set(present) - set(classes))
        if unknown:
            raise ValueError(f"{folder} has a class {unknown[0]} that {root / 'train'} does not have; move it away")
        if label_file is not None:
            raise ValueError(
                f"val_labels={label_file} has no effect on class folders, which {folder} has; leave it out, or put the "
                "images into one folder"
            )
        return _list_classes(root, folder, present, classes)
    names = _images(folder)
    if label_file is None:
        label_file = next((root / name for name in LABEL_FILES if (root / name).is_file()), None)
    if label_file is None:
        raise FileNotFoundError(
            f"{folder} has no class folders, and there is no file with its labels; put one of "
            f"{', '.join(LABEL_FILES)} into {root}, or set val_labels"
        )
    if not label_file.is_file():
        raise FileNotFoundError(f"val_labels={label_file} is no file; name the one with the labels of {folder}")
    labels = read_labels(label_file, names, classes)
    return _packed(f"val/{name}" for name in names), torch.tensor(labels)


def read_labels(path: Path, names: Sequence[str], classes: Sequence[str]) -> list[int]:
    """Return the label of each image, from a file in one of these forms.

    - The devkit's ``ILSVRC2012_validation_ground_truth.txt``: one number per line, in the order of the names. They are
      the devkit's own numbers of the classes, which are explained in ``meta.mat`` beside it.
    - One class name per line, in the order of the images' names.
    - A line for each image, in any order, with its name and its class: a name or, counted from 0, a number
      (``ILSVRC2012_val_00000001.JPEG 65``). Kaggle's ``LOC_val_solution.csv`` is of this form.

    Numbers are names of classes if the file has no others. The name of a class may have spaces.

    Raises:
        ValueError: an image has no label, or a label is not among ``classes``.
    """
    number_of = {name: number for number, name in enumerate(classes)}
    try:
        text = path.read_text("utf-8-sig")  # spreadsheets write a mark at the beginning
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a text file with labels ({error}); replace it, or set val_labels") from error
    lines = [_words(line, number_of) for line in text.splitlines() if line.strip()]
    in_order = all(len(line) == 1 for line in lines)
    if in_order:
        if len(lines) != len(names):
            raise ValueError(f"{path} has {len(lines)} lines for {len(names)} images")
        found = [line[0] for line in lines]
    else:
        by_name = {_stem(line[0]): line[1] for line in lines if len(line) > 1}
        twice = next((line for line in lines if len(line) > 1 and by_name[_stem(line[0])] != line[1]), None)
        if twice is not None:
            raise ValueError(f"{path} has two labels for {twice[0]}, {twice[1]} and another one; leave one out")
        missing = [name for name in names if _stem(name) not in by_name]
        if missing:
            raise ValueError(f"{path} has no label for {len(missing)} images, of which {missing[0]} is the first")
        found = [by_name[_stem(name)] for name in names]
    # Folders may have numbers as names. Class 10 is then before class 2, in the order of the names.
    if all(text.isdecimal() for text in found) and not number_of.keys() >= set(found):
        name_of = _devkit_classes(path.with_name("meta.mat")) if in_order else dict(enumerate(classes))
        found = [name_of.get(int(text), text) for text in found]
    unknown = next((text for text in found if text not in number_of), None)
    if unknown is not None:
        raise ValueError(f"{path} has a class {unknown}, which is not one of the {len(classes)} classes in train")
    return [number_of[text] for text in found]


def _stem(name: str) -> str:
    """Return the name of an image without folder and suffix, which a label file may leave out. It may have dots."""
    path = Path(name)
    return path.stem if _is_image(path.name) else path.name


def _words(line: str, classes: Container[str]) -> list[str]:
    """Return the words of a line of a label file.

    The name of a class is one word, also with spaces in it, and so is what stands before the first comma.
    """
    first, comma, others = line.partition(",")
    words = [first.strip(), *others.replace(",", " ").split()] if comma else line.split()
    if " ".join(words) in classes:
        return [" ".join(words)]
    rest = " ".join(words[1:])
    return [words[0], rest] if rest in classes else words


def _devkit_classes(meta: Path) -> dict[int, str]:
    """Return the names of the classes by the devkit's numbers, from 1 to 1000, which have an order of their own."""
    from scipy.io import loadmat

    if not meta.is_file():
        raise FileNotFoundError(f"there is no {meta}; take it from the devkit, it names the classes of the label file")
    try:
        synsets = loadmat(str(meta), squeeze_me=True)["synsets"]
        return {int(synset["ILSVRC2012_ID"]): str(synset["WNID"]) for synset in synsets}
    except Exception as error:  # parsers of damaged files raise errors of any kind
        raise ValueError(f"{meta} is damaged ({error}); take it from the devkit again") from error


def _list_classes(root: Path, folder: Path, present: Sequence[str], classes: Sequence[str]) -> Listing:
    loose = min(filter(_is_image, os.listdir(folder)), default=None)
    if loose is not None:  # a script that sorts images by class may have stopped halfway
        raise ValueError(f"{folder / loose} is beside the class folders, and would be left out; move it into its class")
    number_of = {name: number for number, name in enumerate(classes)}
    names: list[str] = []
    labels: list[int] = []
    for name in present:
        images = _images(folder / name)
        names += [f"{folder.relative_to(root)}/{name}/{image}" for image in images]
        labels += [number_of[name]] * len(images)
    return _packed(names), torch.tensor(labels, dtype=torch.int64)


def _require_pixels(**sizes: int | None) -> None:
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise ValueError(f"{name}={size} must be 1 or more pixels")


def _packed(names: Iterable[str]) -> NDArray[np.bytes_]:
    return np.array([os.fsencode(name) for name in names], dtype=np.bytes_)


def _subfolders(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if _is_folder(entry))


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a folder that is not hidden, or raise FileNotFoundError for a link to nothing."""
    if entry.name.startswith("."):
        return False
    if entry.is_symlink() and not _is_image(entry.name) and not os.path.exists(entry.path):
        # Its class may be on a disk that is not mounted. Left out, it would be missing, and other classes renumbered.
        raise FileNotFoundError(
            f"{entry.path} is a link to {os.readlink(entry.path)}, which is missing; mount its disk, or remove the link"
        )
    return entry.is_dir()


def _is_image(name: str) -> bool:
    """Return whether a file is an image, by its name. macOS puts ``._1.JPEG``, which is none, beside ``1.JPEG``."""
    return name.lower().endswith(SUFFIXES) and not name.startswith(".")


def _images(folder: Path) -> list[str]:
    """Return the images in a folder and in those within it, as torchvision's ImageFolder does, in order of paths."""
    found = sorted(_walk(folder))
    if not found:
        raise FileNotFoundError(
            f"{folder} has no image ({', '.join(SUFFIXES)}); unpack its archive again, or remove it"
        )
    return found


def _walk(folder: str | Path, prefix: str = "") -> Iterator[str]:
    """Yield the images. `os.walk` would leave out a folder that cannot be read."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if _is_folder(entry):
                yield from _walk(entry.path, f"{prefix}{entry.name}/")
            elif _is_image(entry.name):
                yield prefix + entry.name


def _require_folder(folder: Path, root: Path) -> None:
    if not folder.is_dir():
        raise FileNotFoundError(
            f"ImageNet is not in {root.absolute()}: there is no folder {folder.name}; set data.root to the folder with "
            "train/CLASS/*.JPEG and val/CLASS/*.JPEG, or val/*.JPEG with a label file (image-net.org has the archives)."
            " For tar shards, use data=imagenet_shards"
        )
