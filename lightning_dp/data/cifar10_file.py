"""Read the files of CIFAR-10's python version safely.

The files are pickles, and a pickle can name and call any function. This reader accepts only the few names that rebuild
a numpy array. It resolves even these to classes of its own, so a file never calls a function outside this module.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ARCHIVE = "cifar-10-python.tar.gz"


def read_batch_file(path: Path) -> tuple[Tensor, Tensor]:
    """Return the images (N, 3, 32, 32) uint8 and the labels (N,) int64 of one file. N may differ from 10,000.

    Raises:
        ValueError: the file names anything but a numpy array, or does not contain images and labels.
    """
    with open(path, "rb") as file:
        try:
            return _checked(_PlainUnpickler(file, encoding="bytes").load())
        except Exception as error:  # a broken pickle can raise almost any error
            raise ValueError(
                f"{path} is not a file of CIFAR-10's python version: {error}; delete it and unpack {ARCHIVE} again"
            ) from error


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
