"""Images a second of the loaders: of CIFAR-10 from memory or, with a folder, of ImageNet's files.

    python benchmarks/data_loading.py
    python benchmarks/data_loading.py --imagenet DIR     # with DIR/train/CLASS/*.JPEG
    python benchmarks/data_loading.py --imagenet DIR --shards

CIFAR-10: our loader, loaders that work image by image, and a training step of ResNet-20, all on one core, with
augmentation, random pixels (their values do not change the time). A loader must only be much faster than what it feeds.
There is no bound: the ratio shows which share of a step's time loading takes.

ImageNet: one worker process of a DataLoader, random resized crops and flips, 224 pixels. "In full" decodes the whole
image, crops and resizes with Pillow and normalizes image by image, as is usual; "as bytes" leaves normalizing to the
batch, as ours does. From our figure follows how many cores feed a GPU that trains on 2,500 images a second.

With --shards: the same files, written into tar shards first, are read by our two data modules and, if it is installed,
by WebDataset's own pipeline, with the same decoding and one worker process each. Seconds are CPU time,
of the worker and the main process.

The sides run in turn, round after round; a ratio compares two sides of one round, and its spread is the minimum and the
maximum over the rounds. Writes results.json, table.md and images_per_s.png.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support import imagenet_loaders
from support.bars import Bar, draw_bars
from support.command_line import benchmark_parser, output_folder, parse
from support.random_cifar10 import RandomCIFAR10, random_images
from support.report import markdown_table, write_report
from support.spread import alternate, min_max, ratios
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_dp.data import CIFAR10
from lightning_dp.data.jpeg import Decoder, resolve_decoder
from lightning_dp.models import resnet20

OURS = "whole batches (ours)"
TENSORS = "image by image, tensors"
PILLOW = "image by image, Pillow"
STEP = "ResNet-20 training step"
SMOKE = {"batch_size": 16, "images": 64, "images_one_by_one": 32, "steps": 1, "rounds": 2, "imagenet_images": 16}
GPU_IMAGES_PER_S = 2500  # what ResNet-50 trains on, on one of the GPUs that MLPerf's entries use


def parser() -> argparse.ArgumentParser:
    options = benchmark_parser(__doc__, __file__)
    options.add_argument("--batch-size", type=int, default=128)
    options.add_argument("--images", type=int, default=50_000, help="of an epoch of our loader")
    options.add_argument("--images-one-by-one", type=int, default=5_120, help="of an epoch of the other loaders")
    options.add_argument("--steps", type=int, default=8, help="training steps of a round")
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--imagenet", type=Path, metavar="DIR", help="measure ImageNet's loader, with these files")
    options.add_argument("--imagenet-images", type=int, default=512, help="files of an epoch")
    options.add_argument("--shards", action="store_true", help="compare class folders and tar shards of ImageNet")
    options.add_argument("--image-size", type=int, default=224, help="of ImageNet")
    return options


class OneByOne(Dataset[tuple[Tensor, int]]):
    """The usual way: pad, crop, mirror, scale and normalize in ``__getitem__``, image by image."""

    def __init__(self, num_images: int) -> None:
        self.images, self.labels = random_images(num_images)
        self._mean = torch.tensor(CIFAR10.mean).view(3, 1, 1)
        self._std = torch.tensor(CIFAR10.std).view(3, 1, 1)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        top, left = torch.randint(0, 9, (2,)).tolist()
        image = self._augmented(self.images[index], top, left, torch.rand(1).item() < 0.5)
        return image.float().div_(255).sub_(self._mean).div_(self._std), int(self.labels[index])

    def _augmented(self, image: Tensor, top: int, left: int, flip: bool) -> Tensor:
        crop = torch.nn.functional.pad(image, (4, 4, 4, 4))[:, top : top + 32, left : left + 32]
        return crop.flip(-1) if flip else crop


class OneByOnePillow(OneByOne):
    """The same through a Pillow image, as torchvision's CIFAR-10 and its transforms do it by default."""

    def _augmented(self, image: Tensor, top: int, left: int, flip: bool) -> Tensor:
        from PIL import Image, ImageOps

        padded = ImageOps.expand(Image.fromarray(image.permute(1, 2, 0).contiguous().numpy()), 4)
        crop = padded.crop((left, top, left + 32, top + 32))
        if flip:
            crop = crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return torch.from_numpy(np.array(crop)).permute(2, 0, 1).contiguous()


def epoch_s(loader: DataLoader[Any]) -> float:
    """Return the seconds that an epoch of a loader takes."""
    start = time.perf_counter()
    for _ in loader:
        pass
    return time.perf_counter() - start


def make_sides(options: argparse.Namespace) -> dict[str, Callable[[], float]]:
    """Return, for each side, a function that measures its images a second."""
    batch_size: int = options.batch_size
    num_images = options.images // batch_size * batch_size  # whole batches
    num_one_by_one = options.images_one_by_one // batch_size * batch_size
    data = RandomCIFAR10(num_images, batch_size=batch_size, eval_batch_size=min(1000, num_images))
    data.setup("fit")
    ours = data.train_dataloader()
    tensors = DataLoader(OneByOne(num_one_by_one), batch_size, shuffle=True)
    pillow = DataLoader(OneByOnePillow(num_one_by_one), batch_size, shuffle=True)
    model = resnet20(num_classes=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    images = torch.randn(batch_size, 3, 32, 32)
    labels = torch.randint(0, 10, (batch_size,))

    def train() -> float:
        start = time.perf_counter()
        for _ in range(options.steps):
            optimizer.zero_grad()
            torch.autograd.backward(torch.nn.functional.cross_entropy(model(images), labels))
            optimizer.step()
        return int(options.steps) * batch_size / (time.perf_counter() - start)

    return {
        OURS: lambda: num_images / epoch_s(ours),
        TENSORS: lambda: num_one_by_one / epoch_s(tensors),
        PILLOW: lambda: num_one_by_one / epoch_s(pillow),
        STEP: train,
    }


def rate_table(images_per_s: dict[str, list[float]]) -> str:
    """Return medians, and ratios round by round with minimum and maximum."""
    rows = []
    for name, values in images_per_s.items():
        over_step = min_max(ratios(values, images_per_s[STEP]))
        ours_over = min_max(ratios(images_per_s[OURS], values))
        rows.append([name, f"{min_max(values).median:,.0f}", over_step.text(1), ours_over.text(1)])
    share = min_max(ratios(images_per_s[STEP], images_per_s[OURS]))
    header = ["", "images/s", "over the step's (minimum-maximum)", "ours over it (minimum-maximum)"]
    return f"{markdown_table(header, rows)}\n\nOur loader takes {share.text(2, scale=100)} % of a step's time."


def measure_cifar10(arguments: argparse.Namespace, folder: Path) -> None:
    """Measure, report and plot the sides of CIFAR-10."""
    images_per_s = alternate(make_sides(arguments), arguments.rounds)
    title = f"Loading CIFAR-10 on one core, batches of {arguments.batch_size}"
    write_report(folder, arguments, title, rate_table(images_per_s), {"images_per_s": images_per_s})
    # Relative to the step, on an axis from 0, the loaders can be compared; a logarithmic axis would hide how much.
    bars = [Bar(name, min_max(ratios(images_per_s[name], images_per_s[STEP]))) for name in (OURS, TENSORS, PILLOW)]
    draw_bars(
        {"": bars}, folder / "images_per_s.png", title=title, axis="images/s over those of a ResNet-20 training step",
        digits=1, reference=1.0,
    )  # fmt: skip


def installed_decoders() -> list[Decoder]:
    """Return the decoders that can be measured. simplejpeg is an option of the package."""
    found: list[Decoder] = ["pillow"]
    if resolve_decoder("auto") == "simplejpeg":
        found.append("simplejpeg")
    return found


def imagenet_table(images_per_s: dict[str, list[float]], ours: str, unit: str = "images/s") -> str:
    """Return medians with their spread, ratios round by round, and how many cores feed a GPU."""
    rows = []
    for name, values in images_per_s.items():
        ratio = min_max(ratios(images_per_s[ours], values)).text() if name != ours else ""
        rows.append([name, min_max(values).text(0), ratio])
    rate = min_max(images_per_s[ours]).median
    header = ["one worker", f"{unit} (minimum-maximum)", f"{ours}, over it (minimum-maximum)"]
    cores = math.ceil(GPU_IMAGES_PER_S / rate)
    return f"{markdown_table(header, rows)}\n\n{GPU_IMAGES_PER_S:,} images/s for one GPU need {cores} such cores."


def measure_shards(arguments: argparse.Namespace, folder: Path) -> None:
    """Measure, report and plot the sides that read class folders and tar shards."""
    with tempfile.TemporaryDirectory() as shards:
        sides = imagenet_loaders.make_shard_sides(
            arguments.imagenet, Path(shards), arguments.imagenet_images, arguments.batch_size, arguments.image_size
        )
        images_per_s = alternate(sides, arguments.rounds)
    title = f"Loading ImageNet at {arguments.image_size} pixels from tar shards, one worker process"
    table = imagenet_table(images_per_s, imagenet_loaders.SHARDS, "images/s of CPU time")
    write_report(folder, arguments, title, table, {"images_per_cpu_s": images_per_s})
    bars = [Bar(name, min_max(values)) for name, values in images_per_s.items()]
    draw_bars({"": bars}, folder / "images_per_s.png", title=title, axis="images/s of CPU time")


def measure_imagenet(arguments: argparse.Namespace, folder: Path) -> None:
    """Measure, report and plot the sides of ImageNet."""
    decoders = installed_decoders()
    sides = imagenet_loaders.make_sides(
        arguments.imagenet, arguments.imagenet_images, arguments.batch_size, arguments.image_size, decoders
    )
    images_per_s = alternate(sides, arguments.rounds)
    ours = f"{imagenet_loaders.OURS}, {resolve_decoder('auto')}"
    title = f"Loading ImageNet at {arguments.image_size} pixels, one worker process"
    write_report(folder, arguments, title, imagenet_table(images_per_s, ours), {"images_per_s": images_per_s})
    bars = [Bar(name, min_max(values)) for name, values in images_per_s.items()]
    draw_bars({"": bars}, folder / "images_per_s.png", title=title, axis="images/s of one worker")


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(parser(), SMOKE, argv)
    if arguments.shards and arguments.imagenet is None:
        raise SystemExit("--shards needs --imagenet DIR, the files that are written into shards")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    folder = output_folder(arguments)
    if arguments.imagenet is None:
        measure_cifar10(arguments, folder)
    elif arguments.shards:
        measure_shards(arguments, folder)
    else:
        measure_imagenet(arguments, folder)


if __name__ == "__main__":
    main()
