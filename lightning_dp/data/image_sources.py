"""Where the bytes of encoded images come from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class ImageSource(Protocol):
    """Encoded images, by number. Worker processes have copies, so that they can be pickled.

    Attributes:
        root: folder of the images.
    """

    root: Path

    def __len__(self) -> int:
        """Return the number of images."""

    def read(self, index: int) -> bytes:
        """Return the bytes of an image file. An error here is not about the image, and always ends the run."""

    def name(self, index: int) -> str:
        """Return where an image is, for messages."""


class FilesInFolder:
    """Image files.

    Args:
        root: folder of the files.
        names: (N,) array of file names as bytes, relative to ``root``. One array and not N strings, because reading a
            string in a worker process copies the memory that it was forked with.
    """

    def __init__(self, root: Path, names: NDArray[np.bytes_]) -> None:
        self.root = root
        self.names = names

    def __len__(self) -> int:
        return len(self.names)

    def path(self, index: int) -> Path:
        """Return the file of an image."""
        return self.root / os.fsdecode(bytes(self.names[index]))

    def read(self, index: int) -> bytes:
        """Return the bytes of a file."""
        return self.path(index).read_bytes()

    def name(self, index: int) -> str:
        """Return the path of a file."""
        return str(self.path(index))
