"""Decode images from bytes: whole, or at a half or a quarter of their size where that is enough.

A JPEG file stores blocks of 8x8 pixels as frequencies. Without the high ones, the decoder makes 4x4 or 2x2 pixels of a
block, for a part of the work. libjpeg-turbo does so in both decoders here, simplejpeg and Pillow. It could also make a
single pixel of a block, but then images differ visibly from those that are decoded in full and resized.
"""

from __future__ import annotations

import importlib
import io
import math
from contextlib import suppress
from functools import lru_cache
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Decoder = Literal["auto", "simplejpeg", "pillow", "dali"]
MODULES = {"simplejpeg": "simplejpeg", "pillow": "PIL.Image", "dali": "nvidia.dali"}
DECODERS = ("auto", *MODULES)
# Of an image: Pillow's own limit. The largest image of ImageNet has a third of it.
MAX_PIXELS = 178_956_970
DENOMINATORS = (4, 2, 1)  # of the scales, all of which libjpeg-turbo has fast code for


class BrokenImageError(RuntimeError):
    """A file cannot be decoded as an image."""


class Box(NamedTuple):
    """A region of an image, in pixels."""

    top: int
    left: int
    height: int
    width: int

    def reduced(self, denominator: int) -> Box:
        """Return the region in the image that is decoded at ``1 / denominator``, rounded down to whole pixels there."""
        return Box(*(number // denominator for number in self))

    def crop(self, pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return the region of ``pixels``, (H, W, 3), as an array of its own."""
        return pixels[self.top : self.top + self.height, self.left : self.left + self.width].copy()


class EncodedImage(Protocol):
    """An image of which only the header has been read."""

    height: int
    width: int

    def decode(self, denominator: int = 1, fast: bool = False) -> NDArray[np.uint8]:
        """Return the pixels, (ceil(height / denominator), ceil(width / denominator), 3), as RGB.

        Args:
            denominator: 1, 2 or 4.
            fast: use the decoder's faster and less exact color upsampling and inverse transform, if it has them.
        """


def denominator_for(box: Box, size: int) -> int:
    """Return the greatest denominator at which a region still has ``size`` pixels or more in both directions."""
    shorter = min(box.height, box.width)
    return next((denominator for denominator in DENOMINATORS if shorter // denominator >= size), 1)


def open_image(data: bytes, decoder: Decoder = "auto") -> EncodedImage:
    """Read the header of an image.

    simplejpeg decodes JPEG files in the usual color spaces. Others (ILSVRC-2012 has a PNG file and 22 CMYK files among
    its training images) go to Pillow.

    Raises:
        BrokenImageError: the bytes are not an image that Pillow knows, or its header claims over `MAX_PIXELS`.
        ModuleNotFoundError: the decoder is not installed.
    """
    if decoder == "dali":
        raise ValueError("decoder='dali' decodes whole batches: use ImageNet(decoder='dali'), or EncodedFiles")
    image: EncodedImage | None = None
    if resolve_decoder(decoder) == "simplejpeg":
        with suppress(ValueError):
            image = _SimpleJpeg(data)
    image = image or _Pillow(data)
    if image.height * image.width > MAX_PIXELS:
        # simplejpeg would allocate all that the header claims: a few hundred bytes can ask for 12 GiB.
        raise BrokenImageError(
            f"the header claims {image.width} x {image.height} pixels, more than {MAX_PIXELS}; the file is damaged or "
            "made to exhaust memory"
        )
    return image


@lru_cache
def resolve_decoder(decoder: Decoder) -> Decoder:
    """Return the decoder's name: for ``"auto"``, ``"simplejpeg"`` or ``"pillow"``, the faster of those installed.

    Raises:
        ModuleNotFoundError: the decoder is not installed.
        ValueError: the name is none of `DECODERS`.
    """
    if decoder not in DECODERS:
        raise ValueError(f"decoder={decoder!r} must be one of {', '.join(map(repr, DECODERS))}")
    names: tuple[Decoder, ...] = ("simplejpeg", "pillow") if decoder == "auto" else (decoder,)
    for name in names:
        with suppress(ModuleNotFoundError):
            importlib.import_module(MODULES[name])
            return name
    package = "nvidia-dali-cuda120" if decoder == "dali" else names[0]
    raise ModuleNotFoundError(f"{' and '.join(names)} is not installed: pip install {package}")


class _SimpleJpeg:
    """An image for simplejpeg.

    Raises:
        ValueError: it is not a JPEG file, or not in color or gray.
    """

    def __init__(self, data: bytes) -> None:
        import simplejpeg

        self.height, self.width, color_space, _ = simplejpeg.decode_jpeg_header(data)
        if color_space.lower() not in ("ycbcr", "rgb", "gray"):
            raise ValueError(f"simplejpeg cannot convert {color_space} to RGB")
        self._data = data
        self._decode: Any = simplejpeg.decode_jpeg

    def decode(self, denominator: int = 1, fast: bool = False) -> NDArray[np.uint8]:
        """Return the pixels. See `EncodedImage`."""
        try:
            return self._decode(
                self._data,
                fastdct=fast,
                fastupsample=fast,
                min_height=-(-self.height // denominator),
                min_width=-(-self.width // denominator),
            )
        except ValueError:
            # Pillow has the last word on a file with errors, so that both decoders accept the same files.
            return _Pillow(self._data).decode(denominator, fast)


def in_rgb(image: Any) -> Any:
    """Return an image of Pillow in RGB, with 8 bits. Pillow itself makes white of every gray value above 255.

    Raises:
        ValueError: its pixels have 32 bits, of which no range is known.
    """
    import PIL.Image

    # Pillow reads a gray PPM file of 16 bits as one of 32.
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PPM"):
        return PIL.Image.fromarray((np.asarray(image) // 256).astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F"):
        raise ValueError("its pixels have 32 bits, of which the range is not known; save it with 8 or 16")
    return image.convert("RGB")


def opened(data: bytes) -> Any:
    """Return the image in a file's bytes, which Pillow decodes when it is asked for pixels.

    Raises:
        BrokenImageError: the bytes are not an image that Pillow knows.
        Exception: of any kind, from Pillow's parsers of broken files.
    """
    import PIL.Image

    try:
        return PIL.Image.open(io.BytesIO(data))
    except PIL.UnidentifiedImageError as error:  # which names the buffer by its address
        raise BrokenImageError("cannot identify image file") from error


class _Pillow:
    """An image for Pillow."""

    def __init__(self, data: bytes) -> None:
        try:
            self._image: Any = opened(data)
        except Exception as error:  # parsers of broken files raise errors of any kind
            raise BrokenImageError(str(error)) from error
        self.width, self.height = self._image.size

    def decode(self, denominator: int = 1, fast: bool = False) -> NDArray[np.uint8]:
        """Return the pixels. See `EncodedImage`."""
        try:
            # Only JPEG files have this. Of others the whole image is decoded, and every n-th block averaged.
            self._image.draft("RGB", (self.width // denominator, self.height // denominator))
            reduced = -(-self.width // denominator), -(-self.height // denominator)
            image = in_rgb(self._image)
            if image.size != reduced:
                image = image.reduce(denominator)
            return np.asarray(image)
        except Exception as error:
            raise BrokenImageError(str(error)) from error


# --- Which part of an image is used: random crops for training, a central one for evaluation.

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
