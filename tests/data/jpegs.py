"""Small JPEG files, and folders of them as people have ImageNet."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import PIL.Image
import pytest

from lightning_dp.data.jpeg import resolve_decoder

CLASSES = ("n01440764", "n01443537", "n02105855")


def installed(decoder: str) -> bool:
    try:
        resolve_decoder(decoder)
    except ModuleNotFoundError:
        return False
    return True


# Every decoder. One that is not installed is skipped: `make test` installs both.
DECODERS = [
    pytest.param(name, marks=pytest.mark.skipif(not installed(name), reason=f"{name} is not installed"))
    for name in ("simplejpeg", "pillow")
]


def picture(height: int, width: int, seed: int = 0) -> np.ndarray:
    """Smooth colors with edges and some noise, (height, width, 3) uint8: as hard for a decoder as a photograph."""
    generator = np.random.default_rng(seed)
    coarse = generator.integers(0, 256, (6, 8, 3), np.uint8)
    smooth = np.asarray(PIL.Image.fromarray(coarse).resize((width, height), PIL.Image.Resampling.BICUBIC), np.int16)
    smooth = smooth + generator.normal(0, 6, (height, width, 1))
    smooth[height // 3 : height // 2, width // 4 : width // 2] += 60
    return smooth.clip(0, 255).astype(np.uint8)


def encoded(pixels: np.ndarray, form: str = "JPEG", mode: str = "RGB", quality: int = 90) -> bytes:
    """The bytes of an image file."""
    buffer = io.BytesIO()
    options = {"quality": quality} if form == "JPEG" else {}
    PIL.Image.fromarray(pixels).convert(mode).save(buffer, form, **options)
    return buffer.getvalue()


def write_class_folders(folder: Path, num_images: int, seed: int = 0) -> None:
    """Write ``folder/CLASS/CLASS_NUMBER.JPEG``, each of another size and with pixels of its own."""
    for number, name in enumerate(CLASSES):
        (folder / name).mkdir(parents=True)
        for image in range(num_images):
            pixels = picture(40 + 7 * image, 60 + 5 * number, seed + 100 * number + image)
            (folder / name / f"{name}_{image}.JPEG").write_bytes(encoded(pixels))


def write_imagenet(root: Path, num_train: int = 8, num_val: int = 3) -> Path:
    """Write so many images of each of the three `CLASSES`, in class folders."""
    write_class_folders(root / "train", num_train)
    write_class_folders(root / "val", num_val, seed=1000)
    return root


def flatten_val(root: Path) -> list[tuple[str, str]]:
    """Move all validation images into ``val`` itself, in mixed order, and return (name, class) in order of names."""
    images = sorted((root / "val").rglob("*.JPEG"), key=lambda path: path.name[::-1])
    found = []
    for number, path in enumerate(images, 1):
        name = f"ILSVRC2012_val_{number:08}.JPEG"
        found.append((name, path.parent.name))
        path.rename(root / "val" / name)
    for name in CLASSES:
        (root / "val" / name).rmdir()
    return found
