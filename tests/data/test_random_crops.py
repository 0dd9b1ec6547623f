"""Random crops: within the image, of the documented sizes, and the same for every rank."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_dp.data.jpeg import Box, RandomCrops, central_square


def crops(num_images: int, kind: str = "resized", seed: int = 0) -> RandomCrops:
    return RandomCrops(num_images, torch.Generator().manual_seed(seed), kind)


@pytest.mark.parametrize("kind", ["resized", "square"])
@pytest.mark.parametrize(("height", "width"), [(375, 500), (500, 375), (1, 1), (3, 900), (900, 3), (256, 256)])
def test_a_crop_lies_within_the_image(kind, height, width):
    drawn = crops(200, kind)
    for image in range(200):
        box = drawn.box(image, height, width)
        assert min(box.height, box.width) >= 1
        assert 0 <= box.top <= height - box.height
        assert 0 <= box.left <= width - box.width


def test_a_resized_crop_has_the_published_area_and_aspect_ratio():
    drawn = crops(2000)
    boxes = [drawn.box(image, 1000, 1000) for image in range(2000)]
    areas = [box.height * box.width / 1e6 for box in boxes]
    ratios = [box.width / box.height for box in boxes]
    assert 0.079 < min(areas) < 0.1
    assert 0.95 < max(areas) <= 1
    assert 0.745 < min(ratios) < 0.77
    assert 1.3 < max(ratios) < 1.34
    # Both are uniform, the ratio on a logarithmic scale, but for large crops that do not fit.
    assert sum(areas) / 2000 == pytest.approx(0.5, abs=0.04)
    assert sum(map(math.log, ratios)) / 2000 == pytest.approx(0, abs=0.02)


def test_an_image_that_is_too_long_for_every_draw_is_cropped_in_its_center():
    assert crops(1).box(0, 10, 1000) == Box(0, 493, 10, 13)
    assert crops(1).box(0, 1000, 10) == Box(493, 0, 13, 10)


def test_a_square_crop_is_seven_eighths_of_the_short_side_in_the_central_square():
    drawn = crops(500, "square")
    boxes = [drawn.box(image, 256, 356) for image in range(500)]
    assert {(box.height, box.width) for box in boxes} == {(224, 224)}
    assert {box.top for box in boxes} == set(range(33))
    assert {box.left for box in boxes} == set(range(50, 83))


def test_half_of_the_images_are_flipped():
    drawn = crops(2000)
    assert sum(drawn.flip(image) for image in range(2000)) == pytest.approx(1000, abs=100)


def test_a_batch_is_determined_by_its_seed():
    boxes = [[crops(5, seed=seed).box(image, 300, 400) for image in range(5)] for seed in (1, 1, 2)]
    assert boxes[0] == boxes[1] != boxes[2]
    assert len(set(boxes[0])) == 5


def test_evaluation_uses_the_central_square():
    assert central_square(256, 356) == Box(16, 66, 224, 224)
    assert central_square(1, 1) == Box(0, 0, 1, 1)
