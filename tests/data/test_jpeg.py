"""Images decoded whole and at reduced scale: which pixels, how exact, and which files are refused."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from statistics import median

import numpy as np
import PIL.Image
import pytest
import torch

from lightning_dp.data import jpeg
from lightning_dp.data.image_files import plain_file, resize, training_image
from lightning_dp.data.jpeg import Box, BrokenImageError, RandomCrops, denominator_for, open_image, resolve_decoder
from tests.data.jpegs import DECODERS, encoded, picture

REAL = Path(__file__).parents[3] / "shared" / "data" / "imagenet-sample-256.tar"

# The bounds of docs/imagenet.md: a training image decoded at reduced scale and fast, against the exact decoder, both
# resized to the same size. In levels of 255: the mean over an image, and the share of values that differ by over 16.
# The worst images are fine textures, such as fur, of which the two ways of reducing keep different parts.
MAX_MEAN_ERROR, MAX_SHARE = 3.0, 0.03
WORST_MEAN_ERROR, WORST_SHARE = 8.0, 0.12


def pillow(data: bytes) -> np.ndarray:
    return np.array(PIL.Image.open(io.BytesIO(data)).convert("RGB"))


def errors(data: bytes, decoder: str, size: int) -> tuple[float, float]:
    """Mean error, and share of large errors, of a whole image that is reduced to ``size`` pixels."""
    image = open_image(data, decoder)
    box = Box(0, 0, image.height, image.width)
    denominator = denominator_for(box, size)
    fast = resize(box.reduced(denominator).crop(image.decode(denominator, fast=True)), size)
    exact = resize(pillow(data), size)
    difference = (fast.float() - exact.float()).abs()
    return difference.mean().item(), (difference > 16).float().mean().item()


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize(("height", "width"), [(80, 104), (61, 47), (9, 300)])
def test_an_image_is_decoded_at_every_scale(decoder, height, width):
    data = encoded(picture(height, width))
    assert (open_image(data, decoder).height, open_image(data, decoder).width) == (height, width)
    for denominator in jpeg.DENOMINATORS:
        pixels = open_image(data, decoder).decode(denominator)
        assert pixels.shape == (-(-height // denominator), -(-width // denominator), 3)
        assert pixels.dtype == np.uint8


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_decoders_agree_on_whole_images_of_any_color_space(decoder, mode):
    data = encoded(picture(64, 96), mode=mode)
    difference = np.abs(open_image(data, decoder).decode().astype(int) - pillow(data))
    assert difference.max() <= 2, "the color conversion rounds"


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("form", ["PNG", "BMP", "PPM", "TIFF"])
@pytest.mark.parametrize("denominator", [1, 2])
def test_a_file_of_another_format_is_decoded(decoder, form, denominator):
    pixels = picture(33, 48)
    decoded = open_image(encoded(pixels, form=form), decoder).decode(denominator)
    assert decoded.shape == (-(-33 // denominator), 48 // denominator, 3)
    assert denominator > 1 or np.array_equal(decoded, pixels)


def encoded_wide(form: str, kind: str) -> tuple[bytes, np.ndarray]:
    """A gray file of wider pixels than eight bits, and their upper eight bits."""
    gray = picture(33, 48)[..., 0]
    buffer = io.BytesIO()
    PIL.Image.fromarray((gray.astype(np.uint32) * 256 + 200).astype(kind)).save(buffer, form)
    return buffer.getvalue(), gray


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("form", ["PNG", "TIFF", "PPM"])
def test_a_file_of_16_bits_is_scaled_to_8(decoder, form):
    """Pillow's conversion makes white of every value above 255."""
    data, expected = encoded_wide(form, "uint16")
    for denominator in (1, 2):
        pixels = open_image(data, decoder).decode(denominator)
        assert pixels.shape == (-(-33 // denominator), 48 // denominator, 3)
        assert denominator > 1 or np.array_equal(pixels, np.stack([expected] * 3, -1))
    plain, height, width = plain_file(data)
    assert (height, width) == (33, 48)
    assert np.array_equal(pillow(plain)[..., 0], expected)


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("kind", ["int32", "float32"])
def test_a_file_of_32_bits_is_refused(decoder, kind):
    data, _ = encoded_wide("TIFF", kind)
    with pytest.raises(BrokenImageError, match="32 bits"):
        open_image(data, decoder).decode()
    with pytest.raises(BrokenImageError, match="32 bits"):
        plain_file(data)


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize(("size", "denominator"), [(200, 1), (100, 2), (96, 2), (57, 4), (50, 4), (25, 4)])
def test_reduced_images_are_within_the_bound(decoder, size, denominator):
    data = encoded(picture(230, 280))
    assert denominator_for(Box(0, 0, 230, 280), size) == denominator
    mean, share = errors(data, decoder, size)
    assert mean <= MAX_MEAN_ERROR
    assert share <= MAX_SHARE


@pytest.mark.parametrize("decoder", DECODERS)
def test_the_bound_detects_a_shift_of_one_pixel(decoder, monkeypatch):
    monkeypatch.setattr(Box, "reduced", lambda box, d: Box(1, 1, box.height // d - 1, box.width // d - 1))
    assert errors(encoded(picture(230, 280)), decoder, 100)[0] > MAX_MEAN_ERROR


@pytest.mark.skipif(not REAL.exists(), reason=f"the real images are not at {REAL.parent}")
@pytest.mark.parametrize("decoder", DECODERS)
def test_reduced_real_images_are_within_the_bounds(decoder):
    with tarfile.open(REAL) as tar:
        members = sorted(tar.getmembers(), key=lambda member: member.name)[:1000:50]
        files = [tar.extractfile(member).read() for member in members]
    for size in (224, 112, 56):
        found = [errors(data, decoder, size) for data in files]
        assert median(mean for mean, _ in found) <= MAX_MEAN_ERROR
        assert median(share for _, share in found) <= MAX_SHARE
        assert max(mean for mean, _ in found) <= WORST_MEAN_ERROR
        assert max(share for _, share in found) <= WORST_SHARE


def test_training_images_are_decoded_with_the_faster_arithmetic():
    pytest.importorskip("simplejpeg")
    image = open_image(encoded(picture(80, 104)), "simplejpeg")
    crops = RandomCrops(1, torch.Generator().manual_seed(0), "square")
    box = crops.box(0, image.height, image.width)

    def crop(fast: bool) -> torch.Tensor:
        pixels = resize(box.crop(image.decode(fast=fast)), 64)
        return pixels.flip(1) if crops.flip(0) else pixels

    trained_with = training_image(image, 64, crops, 0)
    assert torch.equal(trained_with, crop(fast=True))
    assert not torch.equal(trained_with, crop(fast=False))


def test_the_scale_leaves_enough_pixels():
    assert denominator_for(Box(0, 0, 447, 1000), 224) == 1
    assert denominator_for(Box(0, 0, 448, 448), 224) == 2
    assert denominator_for(Box(0, 0, 100, 100), 224) == 1
    for height in range(1, 300, 7):
        denominator = denominator_for(Box(3, 5, height, 200), 24)
        assert denominator == 1 or min(height, 200) // denominator >= 24


def test_resizing_equals_pillows_but_for_rounding():
    pixels = picture(90, 130)
    for size in (32, 90, 150):
        expected = np.asarray(PIL.Image.fromarray(pixels).resize((size, size), PIL.Image.Resampling.BILINEAR), int)
        assert np.abs(resize(pixels, size).numpy() - expected).max() <= 1


def test_a_decoder_that_is_not_installed_is_named_with_the_remedy(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "simplejpeg", None)
    resolve_decoder.cache_clear()
    try:
        assert resolve_decoder("auto") == "pillow"
        with pytest.raises(ModuleNotFoundError, match="simplejpeg is not installed: pip install simplejpeg"):
            resolve_decoder("simplejpeg")
    finally:
        resolve_decoder.cache_clear()


def test_an_unknown_decoder_is_refused():
    with pytest.raises(ValueError, match="decoder='opencv' must be one of 'auto', 'simplejpeg', 'pillow'"):
        resolve_decoder("opencv")


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize(("height", "width"), [(65500, 65500), (65500, 2800)])
def test_a_header_that_claims_too_many_pixels_is_refused_before_memory_is_taken(decoder, height, width):
    data = bytearray(encoded(picture(16, 16)))
    frame = data.index(b"\xff\xc0")  # start of frame: marker, length, precision, height, width
    data[frame + 5 : frame + 9] = height.to_bytes(2, "big") + width.to_bytes(2, "big")
    with pytest.raises(BrokenImageError, match=rf"{width} x {height} pixels, more than|exceeds limit"):
        open_image(bytes(data), decoder)
