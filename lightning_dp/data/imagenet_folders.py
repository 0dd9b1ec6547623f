"""Find the images of ImageNet (ILSVRC-2012) and their labels, in the layouts that people have.

Classes are numbered in the order of their names (WordNet ids, such as n01440764), as everywhere but in the devkit.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Listing = tuple[NDArray[np.bytes_], Tensor]  # names (N,) relative to the root, labels (N,) int64

SUFFIXES = (".jpeg", ".jpg", ".png")
DEVKIT = "ILSVRC2012_devkit_t12/data/ILSVRC2012_validation_ground_truth.txt"
LABEL_FILES = (DEVKIT, "val_labels.txt", "LOC_val_solution.csv")


def list_train(root: Path) -> tuple[Listing, list[str]]:
    """Return the images in ``root/train/CLASS/``, and the names of the classes.

    Raises:
        FileNotFoundError: there is no such folder, or no image in it.
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
        ValueError: a class is not among ``classes``, or the label file does not fit the images.
    """
    folder = root / "val"
    _require_folder(folder, root)
    present = _subfolders(folder)
    if present:
        unknown = sorted(set(present) - set(classes))
        if unknown:
            raise ValueError(f"{folder} has a class {unknown[0]} that {root / 'train'} does not have; move it away")
        return _list_classes(root, folder, present, classes)
    names = _images(folder)
    if label_file is None:
        label_file = next((root / name for name in LABEL_FILES if (root / name).is_file()), None)
    if label_file is None:
        raise FileNotFoundError(
            f"{folder} has no class folders, and there is no file with its labels; put one of "
            f"{', '.join(LABEL_FILES)} into {root}, or set val_labels"
        )
    labels = read_labels(label_file, names, classes)
    return _packed(f"val/{name}" for name in names), torch.tensor(labels)


def read_labels(path: Path, names: Sequence[str], classes: Sequence[str]) -> list[int]:
    """Return the label of each image, from a file in one of these forms.

    - The devkit's ``ILSVRC2012_validation_ground_truth.txt``: one number per line, in the order of the names. They are
      the devkit's own numbers of the classes, which are explained in ``meta.mat`` beside it.
    - One class name per line, in the order of the images' names.
    - A line for each image, in any order, with its name and its class: a name or, counted from 0, a number
      (``ILSVRC2012_val_00000001.JPEG 65``). Kaggle's ``LOC_val_solution.csv`` is of this form.

    Raises:
        ValueError: an image has no label, or a label is not among ``classes``.
    """
    number_of = {name: number for number, name in enumerate(classes)}
    lines = [line.replace(",", " ").split() for line in path.read_text().splitlines() if line.strip()]
    if all(len(line) == 1 for line in lines):
        if len(lines) != len(names):
            raise ValueError(f"{path} has {len(lines)} lines for {len(names)} images")
        found = [line[0] for line in lines]
        if all(text.isdecimal() for text in found):
            name_of = _devkit_classes(path.with_name("meta.mat"))
            found = [name_of.get(int(text), text) for text in found]
    else:
        by_name = {Path(line[0]).stem: line[1] for line in lines if len(line) > 1}
        missing = [name for name in names if Path(name).stem not in by_name]
        if missing:
            raise ValueError(f"{path} has no label for {len(missing)} images, of which {missing[0]} is the first")
        found = [by_name[Path(name).stem] for name in names]
        if all(text.isdecimal() for text in found):
            found = [classes[int(text)] if int(text) < len(classes) else text for text in found]
    unknown = next((text for text in found if text not in number_of), None)
    if unknown is not None:
        raise ValueError(f"{path} has a class {unknown}, which is not one of the {len(classes)} classes in train")
    return [number_of[text] for text in found]


def _devkit_classes(meta: Path) -> dict[int, str]:
    """Return the names of the classes by the devkit's numbers, from 1 to 1000, which have an order of their own."""
    from scipy.io import loadmat

    if not meta.is_file():
        raise FileNotFoundError(f"there is no {meta}; take it from the devkit, it names the classes of the label file")
    synsets = loadmat(str(meta), squeeze_me=True)["synsets"]
    return {int(synset["ILSVRC2012_ID"]): str(synset["WNID"]) for synset in synsets}


def _list_classes(root: Path, folder: Path, present: Sequence[str], classes: Sequence[str]) -> Listing:
    number_of = {name: number for number, name in enumerate(classes)}
    names: list[str] = []
    labels: list[int] = []
    for name in present:
        images = _images(folder / name)
        names += [f"{folder.relative_to(root)}/{name}/{image}" for image in images]
        labels += [number_of[name]] * len(images)
    return _packed(names), torch.tensor(labels, dtype=torch.int64)


def _packed(names: Iterable[str]) -> NDArray[np.bytes_]:
    return np.array([os.fsencode(name) for name in names], dtype=np.bytes_)


def _subfolders(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))


def _images(folder: Path) -> list[str]:
    """Return the names of the images in a folder, in order."""
    with os.scandir(folder) as entries:
        found = sorted(entry.name for entry in entries if entry.name.lower().endswith(SUFFIXES))
    if not found:
        raise FileNotFoundError(
            f"{folder} has no image ({', '.join(SUFFIXES)}); unpack its archive again, or remove it"
        )
    return found


def _require_folder(folder: Path, root: Path) -> None:
    if not folder.is_dir():
        raise FileNotFoundError(
            f"ImageNet is not in {root.absolute()}: there is no folder {folder.name}; set data.root to the folder with "
            "train/CLASS/*.JPEG and val/CLASS/*.JPEG, or val/*.JPEG with a label file (image-net.org has the archives)."
            " For tar shards, use data=imagenet_shards"
        )
