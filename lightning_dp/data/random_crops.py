"""Which part of an image is used: random crops for training, a central one for evaluation."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from lightning_dp.data.jpeg import Box

Crop = Literal["resized", "square"]
CROPS = ("resized", "square")
CENTRAL_SHARE = 224 / 256  # of the short side: the usual 224 pixels of an image scaled to a short side of 256

_TRIES = 10
_AREA = (0.08, 1.0)
_LOG_RATIO = (math.log(3 / 4), math.log(4 / 3))


class RandomCrops:
    """The crops and flips of a batch, for images of any size.

    - ``"resized"``: a random 8 % to 100 % of the area, with an aspect ratio of 3:4 to 4:3 (Szegedy et al. 2014,
      arXiv 1409.4842, section 6). If ten draws do not fit into an image, the largest central crop of such a ratio.
    - ``"square"``: a random square of 224 / 256 of the short side, within the central square (Krizhevsky et al. 2012:
      random 224x224 patches of 256x256 images).

    Args:
        num_images: number of images in the batch.
        generator: source of the random numbers. All are drawn here, so crops do not depend on who reads the images.
        kind: ``"resized"`` or ``"square"``.
    """

    def __init__(self, num_images: int, generator: torch.Generator, kind: Crop = "resized") -> None:
        self.kind = kind
        self._place = torch.rand(num_images, 2, generator=generator, dtype=torch.float64)
        self._flip = torch.rand(num_images, generator=generator) < 0.5
        self._shape: Tensor | None = None
        if kind == "resized":
            self._shape = torch.rand(num_images, _TRIES, 2, generator=generator, dtype=torch.float64)

    def flip(self, image: int) -> bool:
        """Return whether image number ``image`` of the batch is flipped horizontally."""
        return bool(self._flip[image])

    def box(self, image: int, height: int, width: int) -> Box:
        """Return the crop of image number ``image`` of the batch, which has ``height`` x ``width`` pixels."""
        down, right = self._place[image].tolist()
        if self._shape is None:
            square = min(height, width)
            side = max(1, round(square * CENTRAL_SHARE))
            top = (height - square) // 2 + _pick(down, square - side)
            left = (width - square) // 2 + _pick(right, square - side)
            return Box(top, left, side, side)
        for area, ratio in self._shape[image].tolist():
            wanted = height * width * _between(_AREA, area)
            aspect = math.exp(_between(_LOG_RATIO, ratio))
            crop_width = round(math.sqrt(wanted * aspect))
            crop_height = round(math.sqrt(wanted / aspect))
            if 0 < crop_width <= width and 0 < crop_height <= height:
                return Box(_pick(down, height - crop_height), _pick(right, width - crop_width), crop_height, crop_width)
        return _central(height, width)


def central_square(height: int, width: int) -> Box:
    """Return the central square of 224 / 256 of the short side, for evaluation."""
    side = max(1, round(min(height, width) * CENTRAL_SHARE))
    return Box((height - side) // 2, (width - side) // 2, side, side)


def _central(height: int, width: int) -> Box:
    """Return the largest central crop with an aspect ratio of 3:4 to 4:3."""
    crop_height = min(height, round(width / math.exp(_LOG_RATIO[0])))
    crop_width = min(width, round(height * math.exp(_LOG_RATIO[1])))
    return Box((height - crop_height) // 2, (width - crop_width) // 2, crop_height, crop_width)


def _between(bounds: tuple[float, float], share: float) -> float:
    low, high = bounds
    return low + (high - low) * share


def _pick(share: float, largest: int) -> int:
    """Return an integer from 0 to ``largest``, for ``share`` in [0, 1)."""
    return int(share * (largest + 1))
