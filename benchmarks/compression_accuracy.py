"""Accuracy with compressed sums between groups, beside exact sums: ResNet-20 on CIFAR-10, groups played on one device.

    python benchmarks/compression_accuracy.py --root DIR   # DIR holds cifar-10-batches-py; 63 runs on one core
    python benchmarks/compression_accuracy.py --root DIR --seeds 1 --groups 4 --choices exact int8
    python benchmarks/compression_accuracy.py              # no new runs: table and plot of those that there are

One device does the work of all groups, exactly. A batch is cut into a slice for each group, whose gradient is computed
with batch norm statistics of its own. The gradients are summed by the compressors of `LayeredSGDStrategy` themselves,
one for each group, in threads that exchange the messages which groups would send. Running statistics are averaged over
the groups.

4,096 training images, seen 5 times in batches of 128; 4,000 test images. All settings have their first seed before any
has its second. A difference compares two runs with the same seed and groups; its spread is the standard error over the
seeds. Aim: within 0.3 points of the exact sum, or within the standard error. Each run ends as a line of results.jsonl;
a run that is there is not done again. Writes results.json, table.md and accuracy.png, too.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch
from support.cifar10_runs import (
    accuracy,
    add_data_options,
    cifar10,
    finished_runs,
    linear_sgd,
    machines,
)
from support.command_line import benchmark_parser, output_folder, parse
from support.compressed_groups import CHOICES, EXACT, CompressedGroups
from support.headless import pyplot
from support.report import markdown_table, write_report
from support.spread import summary

from lightning_dp.models import resnet20
from lightning_dp.planner.plots import colors_of, label_lines

SMOKE = {
    "seeds": 2, "groups": [2], "choices": [EXACT, "int8", "PowerSGD rank 4"], "batch_size": 8, "epochs": 1,
    "train_images": 16, "test_images": 16,
}  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """What all runs have in common."""

    batch_size: int
    epochs: int
    train_images: int
    test_images: int
    lr_at_128: float = 0.1  # in proportion to the batch; falls linearly to 0


class Run(NamedTuple):
    """One training run."""

    choice: str
    num_groups: int
    seed: int


def parser() -> argparse.ArgumentParser:
    options = benchmark_parser(__doc__, __file__)
    add_data_options(options)
    options.add_argument("--groups", type=int, nargs="+", default=[2, 4, 8])
    options.add_argument("--choices", nargs="+", choices=list(CHOICES), default=list(CHOICES))
    options.add_argument("--batch-size", type=int, default=128, help="of all groups together")
    return options


def train(run: Run, settings: Settings, root: str | None) -> dict[str, Any]:
    """Train and test; return the test accuracy in percent, and the last epoch's training loss."""
    torch.manual_seed(run.seed)
    data = cifar10(root, settings.train_images, settings.test_images, settings.batch_size, run.seed)
    loader: Any = data.train_dataloader()
    network: Any = resnet20()
    model = network.to(memory_format=torch.channels_last)
    groups = CompressedGroups(model, run.num_groups, run.choice)
    lr = settings.lr_at_128 * settings.batch_size / 128
    optimizer, decay = linear_sgd(model, lr, settings.epochs * len(loader))
    losses: list[float] = []
    for epoch in range(settings.epochs):
        loader.sampler.set_epoch(epoch)
        losses = []
        for x, y in loader:
            losses.append(groups.backward(x.contiguous(memory_format=torch.channels_last), y))
            optimizer.step()
            decay.step()
    return {"test": 100 * accuracy(model, data.test_dataloader()), "train_loss": mean(losses)}


def plan(arguments: argparse.Namespace) -> list[Run]:
    """Return all runs, seed by seed; the exact ones are always among them."""
    choices = dict.fromkeys([EXACT, *arguments.choices])
    seeds = range(1, arguments.seeds + 1)
    return [Run(choice, groups, seed) for seed in seeds for groups in arguments.groups for choice in choices]


def describe(run: Run, result: dict[str, Any]) -> str:
    """Return a line about a finished run."""
    return f"{run.choice}, {run.num_groups} groups, seed {run.seed}: test {result['test']:.1f} %"


def differences(done: dict[Run, dict[str, Any]], choice: str, num_groups: int) -> list[float]:
    """Return how many points more than the exact sum a choice reaches, for each seed."""
    seeds = sorted({run.seed for run in done})
    pairs = [(done.get(Run(choice, num_groups, seed)), done.get(Run(EXACT, num_groups, seed))) for seed in seeds]
    return [a["test"] - b["test"] for a, b in pairs if a is not None and b is not None]


def table_rows(done: dict[Run, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the figures of each choice and number of groups."""
    rows = []
    # In the order of the groups and of the choices, whatever the order in which runs have ended.
    order = list(CHOICES)
    kinds = {(run.choice, run.num_groups) for run in done}
    for choice, num_groups in sorted(kinds, key=lambda kind: (kind[1], order.index(kind[0]))):
        tests = [line["test"] for run, line in done.items() if (run.choice, run.num_groups) == (choice, num_groups)]
        more = summary(differences(done, choice, num_groups))
        figures = {"test": mean(tests), "more": more["mean"], "error": more["se"], "num_seeds": len(tests)}
        rows.append({"choice": choice, "num_groups": num_groups, **figures})
    return rows


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw the difference to the exact sum against the number of groups, with standard errors."""
    figure, axes = pyplot().subplots(figsize=(8.4, 4.2), layout="constrained")
    axes.axhspan(-0.3, 0.3, color="#dddddd", label="aim: within 0.3 points")
    choices = list(dict.fromkeys(row["choice"] for row in rows if row["choice"] != EXACT))
    ends = []
    for place, (choice, color) in enumerate(zip(choices, colors_of(choices), strict=True)):
        own = [row for row in rows if row["choice"] == choice]
        # Side by side, so that the error bars of several choices can be told apart.
        x = [row["num_groups"] * 1.03**place for row in own]
        more = [row["more"] for row in own]
        axes.errorbar(x, more, [row["error"] for row in own], marker="o", color=color)
        ends.append((choice, x[-1], more[-1], color))
    axes.set_xscale("log", base=2)
    groups = sorted({row["num_groups"] for row in rows})
    axes.set_xticks(groups, [f"{count} groups" for count in groups])
    axes.set(ylabel="accuracy minus the exact sum's, points")
    axes.legend(fontsize=8)  # the aim
    label_lines(axes, ends)
    figure.savefig(path, dpi=120)
    pyplot().close(figure)


def main(argv: Sequence[str] | None = None) -> None:
    options = parser()
    arguments = parse(options, SMOKE, argv)
    if indivisible := [count for count in arguments.groups if arguments.batch_size % count]:
        options.error(f"--batch-size {arguments.batch_size} cannot be cut into {indivisible[0]} equal slices")
    settings = Settings(arguments.batch_size, arguments.epochs, arguments.train_images, arguments.test_images)
    runs = plan(arguments)
    done = finished_runs(arguments, runs, settings, train, describe)
    if not done:
        return
    rows = table_rows(done)
    header = [
        "sum between groups",
        "groups",
        "test accuracy, %",
        "over the exact sum's, points ± standard error",
        "seeds",
    ]
    table = markdown_table(
        header,
        [
            [row["choice"], str(row["num_groups"]), f"{row['test']:.2f}", f"{row['more']:+.2f} ± {row['error']:.2f}",
             str(row["num_seeds"])]
            for row in rows
        ],
    )  # fmt: skip
    title = f"ResNet-20 on CIFAR-10, {len(done)} of {len(runs)} runs, {settings}"
    results = {"machines": machines(done), "rows": rows}
    folder = output_folder(arguments)
    write_report(folder, arguments, title, table, results)
    draw(rows, folder / "accuracy.png")


if __name__ == "__main__":
    main()
