"""Augmentation and normalization of whole batches of uint8 images, without a Python loop over images."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor


class CropAndFlip(NamedTuple):
    """Where each image of a batch is cropped, and whether it is flipped horizontally.

    Attributes:
        top: (N,) int64, first row of the crop in the padded image.
        left: (N,) int64, first column of the crop in the padded image.
        flip: (N,) bool, swap left and right.
        padding: number of zero pixels added on each side before the crop.
    """

    top: Tensor
    left: Tensor
    flip: Tensor
    padding: int

    @classmethod
    def draw(cls, num_images: int, generator: torch.Generator, padding: int = 4) -> CropAndFlip:
        """Draw for ``num_images`` images. All crops are equally likely, and half of the images are flipped."""
        top, left = torch.randint(2 * padding + 1, (2, num_images), generator=generator)
        return cls(top, left, torch.randint(2, (num_images,), generator=generator, dtype=torch.bool), padding)

    def rows(self, start: int, stop: int) -> CropAndFlip:
        """Return the part for images ``start`` to ``stop`` (exclusive) of the batch."""
        return CropAndFlip(self.top[start:stop], self.left[start:stop], self.flip[start:stop], self.padding)


def crop_and_flip(images: Tensor, drawn: CropAndFlip) -> Tensor:
    """Pad with zeros, crop to the original size, and flip, as drawn (He et al., arXiv 1512.03385, section 4.2).

    Args:
        images: (N, C, H, W) of any dtype. Not changed.
        drawn: one crop for each of the N images.

    Returns:
        A new tensor, (N, C, H, W).
    """
    num_images, channels, height, width = images.shape
    padded = torch.nn.functional.pad(images, (drawn.padding,) * 4)
    row = torch.arange(height)
    column = torch.arange(width)
    rows = drawn.top[:, None] + row
    columns = drawn.left[:, None] + torch.where(drawn.flip[:, None], width - 1 - column, column)
    # One gather from the flattened pixels is twice as fast as indexing with row, column and image tensors.
    pixels = (rows[:, :, None] * padded.shape[3] + columns[:, None, :]).view(num_images, 1, height * width)
    return padded.flatten(2).gather(2, pixels.expand(-1, channels, -1)).view(images.shape)


def normalize(images: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Return ``(images / 255 - mean) / std`` for each channel, from uint8 (N, C, H, W) to float32 (N, C, H, W).

    The memory format and the device are those of ``images``.
    """
    scale, shift = _scale_and_shift(mean, std, images.device)
    return images.float().mul_(scale).sub_(shift)


@lru_cache
def _scale_and_shift(mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    # Made once for each device: on a GPU, every copy of a few numbers from the host would make the step wait. Not as
    # tensors of inference mode, if the first call is in a validation, because training uses them too.
    with torch.inference_mode(False):
        deviation = torch.tensor(std, device=device).view(-1, 1, 1)
        return 1 / (255 * deviation), torch.tensor(mean, device=device).view(-1, 1, 1) / deviation
