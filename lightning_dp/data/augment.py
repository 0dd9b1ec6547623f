"""Augmentation and normalisation of whole batches of uint8 images: no Python for each image."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class CropAndFlip(NamedTuple):
    """Where each image of a batch is cropped, and whether it is mirrored.

    Attributes:
        top: (N,) int64, first row of the crop in the padded image.
        left: (N,) int64, first column of the crop in the padded image.
        flip: (N,) bool, mirror left to right.
        padding: zero pixels put on each side before the crop.
    """

    top: Tensor
    left: Tensor
    flip: Tensor
    padding: int

    @classmethod
    def draw(cls, num_images: int, generator: torch.Generator, padding: int = 4) -> CropAndFlip:
        """Draw for ``num_images`` images: every crop equally likely, one image in two mirrored."""
        top, left = torch.randint(2 * padding + 1, (2, num_images), generator=generator)
        return cls(top, left, torch.randint(2, (num_images,), generator=generator, dtype=torch.bool), padding)

    def rows(self, start: int, stop: int) -> CropAndFlip:
        """The part for images ``start`` to ``stop`` (exclusive) of the batch."""
        return CropAndFlip(self.top[start:stop], self.left[start:stop], self.flip[start:stop], self.padding)


def crop_and_flip(images: Tensor, drawn: CropAndFlip) -> Tensor:
    """Pad with zeros, crop to the old size at random, mirror at random (He et al., arXiv 1512.03385, section 4.2).

    Args:
        images: (N, C, H, W), any type; not changed.
        drawn: one crop for each of the N images.

    Returns:
        (N, C, H, W), a new tensor.
    """
    num_images, channels, height, width = images.shape
    padded = torch.nn.functional.pad(images, (drawn.padding,) * 4)
    row, column = torch.arange(height), torch.arange(width)
    rows = drawn.top[:, None] + row
    columns = drawn.left[:, None] + torch.where(drawn.flip[:, None], width - 1 - column, column)
    # One gather from the flattened pixels: twice as fast as indexing with a row, a column and an image tensor.
    pixels = (rows[:, :, None] * padded.shape[3] + columns[:, None, :]).view(num_images, 1, height * width)
    return padded.flatten(2).gather(2, pixels.expand(-1, channels, -1)).view(images.shape)


def normalize(images: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Return ``(images / 255 - mean) / std`` for each channel: uint8 (N, C, H, W) to float32 (N, C, H, W)."""
    scale = 1 / (255 * torch.tensor(std).view(-1, 1, 1))
    shift = torch.tensor(mean).view(-1, 1, 1) / torch.tensor(std).view(-1, 1, 1)
    return images.float().mul_(scale).sub_(shift)
