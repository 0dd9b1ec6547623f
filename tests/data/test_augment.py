"""Crop, mirror and normalize whole batches: against one image at a time."""

from __future__ import annotations

import pytest
import torch

from lightning_dp.data.loading import CropAndFlip, crop_and_flip, normalize


def one_by_one(images: torch.Tensor, drawn: CropAndFlip) -> torch.Tensor:
    channels, height, width = images.shape[1:]
    out = []
    for image, top, left, flip in zip(images, drawn.top, drawn.left, drawn.flip, strict=True):
        padded = torch.zeros(channels, height + 2 * drawn.padding, width + 2 * drawn.padding, dtype=images.dtype)
        padded[:, drawn.padding : drawn.padding + height, drawn.padding : drawn.padding + width] = image
        crop = padded[:, top : top + height, left : left + width]
        out.append(crop.flip(-1) if flip else crop)
    return torch.stack(out)


@pytest.mark.parametrize(("shape", "padding"), [((50, 3, 32, 32), 4), ((20, 1, 7, 5), 2), ((6, 2, 4, 9), 0)])
def test_a_batch_equals_one_image_at_a_time(shape, padding):
    images = torch.randint(0, 256, shape, dtype=torch.uint8)
    before = images.clone()
    drawn = CropAndFlip.draw(shape[0], torch.Generator().manual_seed(1), padding)
    assert torch.equal(crop_and_flip(images, drawn), one_by_one(images, drawn))
    assert torch.equal(images, before)


def test_every_crop_and_flip_is_drawn():
    drawn = CropAndFlip.draw(8100, torch.Generator().manual_seed(0))
    counts = torch.bincount((drawn.top * 9 + drawn.left) * 2 + drawn.flip, minlength=162)
    assert counts.min() >= 20
    assert len(counts) == 162


def test_rows_are_those_of_the_whole_batch():
    images = torch.randint(0, 256, (10, 3, 8, 8), dtype=torch.uint8)
    drawn = CropAndFlip.draw(10, torch.Generator().manual_seed(2))
    parts = [crop_and_flip(images[a:b], drawn.rows(a, b)) for a, b in ((0, 3), (3, 4), (4, 10))]
    assert torch.equal(torch.cat(parts), crop_and_flip(images, drawn))


def test_normalize_equals_its_formula():
    images = torch.randint(0, 256, (4, 2, 3, 3), dtype=torch.uint8)
    mean, std = torch.tensor([0.25, 0.5]).view(2, 1, 1), torch.tensor([0.5, 0.2]).view(2, 1, 1)
    expected = (images.double() / 255 - mean) / std
    result = normalize(images, (0.25, 0.5), (0.5, 0.2))
    assert result.dtype == torch.float32
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(normalize(images, [0.25, 0.5], [0.5, 0.2]), result), "as a subclass of a user may have them"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_dtype_is_not_that_of_mean_and_deviation(dtype):
    """It is bfloat16 within a step with "bf16-true". What the first call computes is kept for all later ones."""
    images = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(-1, 2, -1, -1)
    mean, std = (0.4, 0.5 + dtype.itemsize / 100), (0.3, 0.7)  # of no other call
    torch.set_default_dtype(dtype)
    try:
        first = normalize(images, mean, std)
    finally:
        torch.set_default_dtype(torch.float32)
    expected = (images.double() / 255 - torch.tensor(mean).view(2, 1, 1)) / torch.tensor(std).view(2, 1, 1)
    torch.testing.assert_close(first.double(), expected.double(), rtol=1e-5, atol=1e-5)
    assert first.dtype == torch.float32
