"""How many images a second the CIFAR-10 loader gives, beside loaders that work image by image and a training step.

    python benchmarks/loading.py

All on one core, augmentation on, pixels at random (their values cost nothing). The sides take turns, so that a
machine that slows down slows all of them. Prints a table; writes ``loading.json`` and ``loading.png``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support.report import describe_machine, output_folder
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_dp.data import CIFAR10
from lightning_dp.data.module import Split

OURS, TENSORS, PICTURES = "whole batches (ours)", "image by image, tensors", "image by image, Pillow"
STEP = "ResNet-20 training step"


def random_images(num_images: int) -> Split:
    return torch.randint(0, 256, (num_images, 3, 32, 32), dtype=torch.uint8), torch.randint(0, 10, (num_images,))


class RandomCIFAR10(CIFAR10):
    """The data module itself, with random pixels in place of the files."""

    def __init__(self, num_images: int, **options: Any) -> None:
        super().__init__(**options)
        self.num_images = num_images

    def read_train(self) -> tuple[Split, Split]:
        """Return training images, and none for validation."""
        return random_images(self.num_images), random_images(0)


class OneByOne(Dataset[tuple[Tensor, int]]):
    """The usual way: pad, crop, mirror, scale and normalise in ``__getitem__``, image by image."""

    def __init__(self, num_images: int) -> None:
        self.images, self.labels = random_images(num_images)
        self.mean, self.std = torch.tensor(CIFAR10.mean).view(3, 1, 1), torch.tensor(CIFAR10.std).view(3, 1, 1)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        top, left = torch.randint(0, 9, (2,)).tolist()
        image = self._augmented(self.images[index], top, left, torch.rand(1).item() < 0.5)
        return image.float().div_(255).sub_(self.mean).div_(self.std), int(self.labels[index])

    def _augmented(self, image: Tensor, top: int, left: int, flip: bool) -> Tensor:
        crop = torch.nn.functional.pad(image, (4, 4, 4, 4))[:, top : top + 32, left : left + 32]
        return crop.flip(-1) if flip else crop


class OneByOnePillow(OneByOne):
    """The same through a Pillow image, as torchvision's CIFAR-10 and its transforms do it by default."""

    def _augmented(self, image: Tensor, top: int, left: int, flip: bool) -> Tensor:
        from PIL import Image, ImageOps

        picture = ImageOps.expand(Image.fromarray(image.permute(1, 2, 0).contiguous().numpy()), 4)
        picture = picture.crop((left, top, left + 32, top + 32))
        if flip:
            picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return torch.from_numpy(np.array(picture)).permute(2, 0, 1).contiguous()


def seconds(loader: DataLoader[Any]) -> float:
    start = time.perf_counter()
    for _ in loader:
        pass
    return time.perf_counter() - start


def sides(options: argparse.Namespace) -> dict[str, tuple[int, Callable[[], float]]]:
    """For each side: the images that a measurement takes, and a function that returns its seconds."""
    from lightning_dp.models import resnet20

    batch_size = options.batch_size
    num_images, num_one_by_one = (n // batch_size * batch_size for n in (options.images, options.images_one_by_one))
    data = RandomCIFAR10(num_images, batch_size=batch_size)
    data.setup("fit")
    ours = data.train_dataloader()
    tensors, pictures = (
        DataLoader(kind(num_one_by_one), batch_size, shuffle=True) for kind in (OneByOne, OneByOnePillow)
    )
    model = resnet20(num_classes=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    images, labels = torch.randn(batch_size, 3, 32, 32), torch.randint(0, 10, (batch_size,))

    def train() -> float:
        start = time.perf_counter()
        for _ in range(options.steps):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
        return time.perf_counter() - start

    return {
        OURS: (num_images, lambda: seconds(ours)),
        TENSORS: (num_one_by_one, lambda: seconds(tensors)),
        PICTURES: (num_one_by_one, lambda: seconds(pictures)),
        STEP: (options.steps * batch_size, train),
    }


def measure(options: argparse.Namespace) -> dict[str, list[float]]:
    """Images a second of each side, one figure for each turn; a first turn is not counted."""
    measured = sides(options)
    rates: dict[str, list[float]] = {name: [] for name in measured}
    for turn in range(options.repeats + 1):
        for name, (num_images, run) in measured.items():
            rate = num_images / run()
            if turn:
                rates[name].append(rate)
    return rates


def print_table(rates: dict[str, list[float]], medians: dict[str, float]) -> None:
    print(f"{'':26}{'images/s':>10}{'min':>10}{'max':>10}{'times the step':>16}")
    for name, values in rates.items():
        times = medians[name] / medians[STEP]
        print(f"{name:26}{medians[name]:10,.0f}{min(values):10,.0f}{max(values):10,.0f}{times:16.1f}")
    faster = " and ".join(f"{medians[OURS] / medians[name]:.1f}x" for name in (TENSORS, PICTURES))
    share = medians[STEP] / medians[OURS]
    print(f"loading takes {100 * share:.2f} % of a step's time; it is {faster} faster than image by image")


def picture(medians: dict[str, float], rates: dict[str, list[float]], title: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 3), layout="constrained")
    names = list(medians)[::-1]
    errors = [[medians[n] - min(rates[n]) for n in names], [max(rates[n]) - medians[n] for n in names]]
    bars = axes.barh(
        names,
        [medians[n] for n in names],
        xerr=errors,
        color=["0.6", "tab:orange", "tab:orange", "tab:blue"],
        capsize=3,
    )
    axes.bar_label(bars, [f"{medians[n]:,.0f}" for n in names], padding=8)
    axes.set(xscale="log", xlabel="images per second on one core (median and range; logarithmic)")
    axes.set_title(title, fontsize=9)
    axes.margins(x=0.25)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--images", type=int, default=50_000, help="of an epoch of our loader")
    parser.add_argument("--images-one-by-one", type=int, default=5_120)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, default=output_folder("loading"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rates = measure(options)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    print(f"one of {describe_machine()}; batch size {options.batch_size}")
    print_table(rates, medians)
    options.out.mkdir(parents=True, exist_ok=True)
    settings = {name: value for name, value in vars(options).items() if name != "out"}
    report = {
        "machine": describe_machine(),
        "settings": settings,
        "images_per_s": rates,
        "median_images_per_s": medians,
    }
    (options.out / "loading.json").write_text(json.dumps(report, indent=2) + "\n")
    picture(medians, rates, describe_machine(), options.out / "loading.png")
    print(f"written to {options.out}")


if __name__ == "__main__":
    main()
