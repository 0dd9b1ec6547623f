"""Accuracy with global and with local batch norm statistics at small batches (the paper's Figure 4).

    python benchmarks/global_batch_norm_accuracy.py --root DIR   # DIR holds cifar-10-batches-py; 51 runs on one core
    python benchmarks/global_batch_norm_accuracy.py --root DIR --seeds 1 --batch-sizes 8 128
    python benchmarks/global_batch_norm_accuracy.py              # no new runs: table and plot of those that there are

ResNet-20 on CIFAR-10, global batches of 8 to 128 images on 4 and on 8 devices, at every batch size the same images, as
often, and a learning rate in proportion to the batch. One device does the work of all, exactly: global statistics are
those of plain batch norm on the whole batch, whatever the number of devices, and local ones those of the batch's slices
(`sliced_batch_norm`; ``tests/layers/test_sliced_batch_norm.py`` proves it on real ranks). The last part compares the
values of ``global_phase`` at one small batch.

Not the paper's size: 4,096 training images seen 5 times, where it has 50,000 and 50 epochs. All settings have their
first seed before any has its second. A gain is the difference of two runs with the same seed; its spread is the
standard error over the seeds. The paper's gains stand in the plot. Each run ends as a line of results.jsonl; a run
that is there is not done again. Writes results.json, table.md and accuracy.png, too.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from support.cifar10_runs import accuracy, add_data_options, cifar10, finished_runs, linear_sgd, machines
from support.command_line import benchmark_parser, output_folder, parse
from support.global_batch_norm_tables import draw, figure_4, figure_4_table, phases, phases_table
from support.report import write_report
from support.sliced_batch_norm import SlicedBatchNorm2d, slice_batch_norm

from lightning_dp.callbacks.adaptive_global_batch_norm import GlobalPhase, in_global_phase
from lightning_dp.callbacks.convergence import Plateau
from lightning_dp.data import CIFAR10
from lightning_dp.models import resnet20

SMOKE = {
    "seeds": 2, "batch_sizes": [8, 16], "devices": [4], "epochs": 1, "train_images": 16, "test_images": 16,
}  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """What all runs have in common."""

    epochs: int
    train_images: int  # a multiple of every batch size: all see the same images
    test_images: int
    lr_at_128: float = 0.1  # in proportion to the batch, as in Goyal et al. 2017; falls linearly to 0
    plateau_min_delta: float = 0.15  # of the training loss, patience 1 epoch


class Run(NamedTuple):
    """One training run. ``phase`` is a ``global_phase``, or "never": local statistics throughout."""

    batch_size: int
    num_devices: int  # 1 where statistics are always global: their number then makes no difference
    phase: str
    seed: int


def parser() -> argparse.ArgumentParser:
    options = benchmark_parser(__doc__, __file__)
    add_data_options(options)
    options.add_argument("--batch-sizes", type=int, nargs="+", default=[8, 16, 32, 64, 128])
    options.add_argument("--devices", type=int, nargs="+", default=[4, 8])
    options.add_argument("--phase-cell", type=int, nargs=2, default=[8, 4], help="batch and devices of the last part")
    return options


def train(run: Run, settings: Settings, root: str | None) -> dict[str, Any]:
    """Train and test; return accuracies in percent, and the share of epochs with global statistics."""
    torch.manual_seed(run.seed)
    data = cifar10(root, settings.train_images, settings.test_images, run.batch_size, run.seed)
    loader: Any = data.train_dataloader()
    model: Any = resnet20()
    layers = slice_batch_norm(model)
    model = model.to(memory_format=torch.channels_last)
    lr = settings.lr_at_128 * run.batch_size / 128
    optimizer, decay = linear_sgd(model, lr, settings.epochs * len(loader))
    criterion = Plateau("train_loss", patience=1, min_delta=settings.plateau_min_delta)
    global_epochs = 0
    train_accuracy = 0.0
    losses: list[float] = []
    for epoch in range(settings.epochs):
        is_global = run.phase != "never" and in_global_phase(cast(GlobalPhase, run.phase), criterion.converged)
        for layer in layers:
            layer.num_slices = 1 if is_global else run.num_devices
        loader.sampler.set_epoch(epoch)
        loss, train_accuracy = train_epoch(model, loader, optimizer, decay)
        global_epochs += is_global
        losses.append(loss)
        criterion.update({"train_loss": loss})
    return {
        **test_accuracies(model, layers, data),
        "train": 100 * train_accuracy,  # in the last epoch, augmented, with the statistics of training
        "losses": losses,
        "global_share": global_epochs / settings.epochs,
    }


def train_epoch(model: Any, loader: Any, optimizer: Any, decay: Any) -> tuple[float, float]:
    """Train for one epoch; return the mean loss and the share of images that were classified correctly."""
    loss_sum = 0.0
    num_correct = 0.0
    num_images = 0
    for x, y in loader:
        logits = model(x.contiguous(memory_format=torch.channels_last))
        loss = F.cross_entropy(logits, y)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        decay.step()
        loss_sum += loss.item() * len(y)
        num_correct += (logits.argmax(1) == y).sum().item()
        num_images += len(y)
    return loss_sum / num_images, num_correct / num_images


def test_accuracies(model: Any, layers: list[SlicedBatchNorm2d], data: CIFAR10) -> dict[str, float]:
    """Return test accuracies with two kinds of running statistics; leaves the second kind in ``model``."""
    averaged = accuracy(model, data.test_dataloader())
    for layer in layers:
        layer.running_var = layer.whole_var
    return {
        "test": 100 * averaged,  # running statistics averaged over the devices, as the callback does it
        "test_whole_var": 100 * accuracy(model, data.test_dataloader()),  # with the variance between devices, too
    }


def plan(arguments: argparse.Namespace) -> list[Run]:
    """Return all runs, seed by seed."""
    runs = []
    for seed in range(1, arguments.seeds + 1):
        for batch_size in arguments.batch_sizes:
            runs.append(Run(batch_size, 1, "always", seed))
            runs += [Run(batch_size, devices, "never", seed) for devices in arguments.devices]
        batch_size, devices = arguments.phase_cell
        runs += [Run(batch_size, devices, phase, seed) for phase in ("until_converged", "after_converged")]
    return runs


def describe(run: Run, result: dict[str, Any]) -> str:
    """Return a line about a finished run."""
    what = f"batch {run.batch_size}, {run.num_devices} devices, {run.phase}, seed {run.seed}"
    return f"{what}: test {result['test']:.1f} % ({result['test_whole_var']:.1f}), train {result['train']:.1f} %"


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(parser(), SMOKE, argv)
    settings = Settings(arguments.epochs, arguments.train_images, arguments.test_images)
    runs = plan(arguments)
    done = finished_runs(arguments, runs, settings, train, describe)
    if not done:
        return
    rows = figure_4(done, arguments.batch_sizes, arguments.devices)
    batch_size, devices = arguments.phase_cell
    table = "\n\n".join([
        figure_4_table(done, arguments.batch_sizes, arguments.devices),
        phases_table(done, batch_size, devices),
    ])  # fmt: skip
    results = {
        "settings": asdict(settings),
        "machines": machines(done),
        "figure 4": rows,
        "phases": phases(done, batch_size, devices),
    }
    title = f"ResNet-20 on CIFAR-10, {len(done)} of {len(runs)} runs, {settings}"
    folder = output_folder(arguments)
    write_report(folder, arguments, title, table, results)
    if rows:
        draw(rows, folder / "accuracy.png")


if __name__ == "__main__":
    main()
