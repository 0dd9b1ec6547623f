"""How much accuracy large batches lose, and how much of it the variable batch size saves, on real CIFAR-10.

    python benchmarks/hybrid_accuracy.py --root data                 # 3 seeds, K = 8: 9 runs
    python benchmarks/hybrid_accuracy.py --root data --factors 4 8 16 --seeds 0 1 2 3 4 --epochs 20
    python benchmarks/hybrid_accuracy.py                             # no new runs: table and plot of those there are

Table 1 of Krizhevsky 2014 (arXiv 1404.5997) at small scale. Batch size (m, n) is m in the convolutional trunk and n in
the fully-connected head; three columns for each K: (nK, nK), the large batch; (nK, n), the variable batch size; and
(n, n), the small batch. Each run sees the same number of images, so (nK, nK) makes K times fewer updates.

The variable batch size of K workers is computed exactly, by one process, in the paper's order (section 4.2): the trunk
forward on nK images; n by n through the head, forward and backward, each time with an update of the head; the trunk
backward, with the features' gradients from all K, and its update.

The network is `cifar_alexnet` with logistic units, the update rule and schedule are the paper's (section 5). The rates
are scaled from those of batch n, in each part by that part's batch, with the rule given. Test images serve for the
result alone. The columns take turns, seed by seed; a difference compares two runs of one seed, and its spread is the
minimum and the maximum over the seeds. Bound: the small batch, which the others can at best equal in so few updates.
Each run ends as a line of results.jsonl; a run that is there is not done again. Writes results.json, table.md and
accuracy.png, too.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
import torch.nn.functional as F
from support.command_line import benchmark_parser, output_folder, parse
from support.headless import pyplot
from support.random_cifar10 import RandomCIFAR10
from support.report import describe_machine, markdown_table, write_report
from support.spread import min_max
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_dp.data import CIFAR10
from lightning_dp.models import TrunkAndHead, cifar_alexnet
from lightning_dp.optim import KrizhevskySGD, krizhevsky_schedule, trunk_and_head_groups

Result = dict[str, Any]
METRICS = ("test error", "test loss", "train loss")
COLUMNS = {"large batch": "#e66101", "variable batch": "#1f77b4", "small batch": "#5aae61"}
SMOKE = {"n": 8, "factors": [2], "seeds": [0, 1], "epochs": 1, "images": 32}


def parser() -> argparse.ArgumentParser:
    options = benchmark_parser(__doc__, __file__)
    options.add_argument("--root", help="folder that holds cifar-10-batches-py; without it nothing is trained")
    options.add_argument("--n", type=int, default=64, help="the small batch")
    options.add_argument(
        "--factors", type=int, nargs="+", default=[8], help="K, how many times larger the large one is"
    )
    options.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options.add_argument("--epochs", type=int, default=6)
    options.add_argument(
        "--images", type=int, default=40960, help="to train on; a multiple of n K, so none is left out"
    )
    options.add_argument("--lr", type=float, default=0.01, help="for batches of n")
    options.add_argument("--weight-decay", type=float, default=0.0005, help="for batches of n")
    options.add_argument("--rule", choices=["linear", "sqrt"], default="linear")
    options.add_argument("--dropout", type=float, default=0.0, help="0: runs are too short for overfitting")
    options.add_argument("--augment", action="store_true", help="crops and mirror images")
    return options


def logistic_loss(logits: Tensor, y: Tensor) -> Tensor:
    """Return the cross-entropy of a logistic unit for each class: the sum over classes, the mean over images."""
    is_class = F.one_hot(y, logits.shape[1]).to(logits.dtype)
    return F.binary_cross_entropy_with_logits(logits, is_class, reduction="sum") / len(y)


def step(model: TrunkAndHead, optimizer: Optimizer, x: Tensor, y: Tensor, head_batch_size: int) -> float:
    """Train on a batch in the trunk, by parts of ``head_batch_size`` in the head; return the mean loss.

    The optimizer has the parameters of both, and leaves alone what has no gradient. With one part, this is SGD.
    """
    features: Tensor = model.trunk(x)
    slices = [slice(begin, begin + head_batch_size) for begin in range(0, len(x), head_batch_size)]
    parts = [features[rows].detach().requires_grad_() for rows in slices]
    total = 0.0
    for part, rows in zip(parts, slices, strict=True):
        target = y[rows]
        optimizer.zero_grad()
        loss = logistic_loss(model.head(part), target)
        torch.autograd.backward(loss)
        optimizer.step()  # of the head: the trunk has no gradient yet
        total += loss.item() * len(target)
    optimizer.zero_grad()
    # Each part's gradient is that of the mean over the part; the trunk needs that of the mean over all.
    shares = [part.grad * (len(part) / len(x)) for part in parts if part.grad is not None]
    torch.autograd.backward(features, torch.cat(shares))
    optimizer.step()  # of the trunk: the head has none
    return total / len(x)


def run(data: CIFAR10, settings: Result) -> Result:
    """Train from the settings' seed, and test."""
    trunk_batch_size, head_batch_size = settings["batch"]
    epochs = settings["epochs"]
    torch.manual_seed(settings["seed"])
    data.batch_size = trunk_batch_size
    data.seed = settings["seed"]
    loader: Any = data.train_dataloader()
    model: Any = cifar_alexnet(dropout=settings["dropout"])
    model = model.to(memory_format=torch.channels_last)
    groups = trunk_and_head_groups(
        model,
        lr=settings["lr"],
        weight_decay=settings["weight_decay"],
        trunk_batch_scale=trunk_batch_size / settings["n"],
        head_batch_scale=head_batch_size / settings["n"],
        rule=settings["rule"],
    )
    optimizer = KrizhevskySGD(groups, lr=settings["lr"])
    schedule = krizhevsky_schedule(optimizer, epochs * len(loader))
    start = time.perf_counter()
    losses: list[float] = []
    for epoch in range(epochs):
        loader.sampler.set_epoch(epoch)
        losses = []
        for x, y in loader:
            losses.append(step(model, optimizer, channels_last(x), y, head_batch_size))
            schedule.step()
        seconds = time.perf_counter() - start
        print(f"    epoch {epoch + 1}/{epochs}: train loss {mean(losses):.3f}, {seconds:.0f} s", flush=True)
    images_per_s = epochs * len(loader) * trunk_batch_size / (time.perf_counter() - start)
    return {"train loss": mean(losses), **test(model, data.test_dataloader()), "images per s": images_per_s}


def channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


@torch.no_grad()
def test(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> Result:
    """Return the top-1 error (a share of 1) and the logistic loss over all test images."""
    model.eval()
    num_wrong = 0
    num_images = 0
    loss = 0.0
    for x, y in batches:
        logits = model(channels_last(x))
        num_wrong += int((logits.argmax(1) != y).sum())
        loss += logistic_loss(logits, y).item() * len(y)
        num_images += len(y)
    return {"test error": num_wrong / num_images, "test loss": loss / num_images}


def batches_of(n: int, factor: int) -> dict[str, tuple[int, int]]:
    """Return the batch size in (trunk, head) of each of the `COLUMNS`."""
    return dict(zip(COLUMNS, [(n * factor, n * factor), (n * factor, n), (n, n)], strict=True))


def plan(arguments: argparse.Namespace) -> list[Result]:
    """Return the settings of all runs, seed by seed, so that the first results compare all columns."""
    names = ("n", "lr", "weight_decay", "rule", "dropout", "images", "augment", "epochs")
    shared = {name: getattr(arguments, name) for name in names}
    # The small batch is the same one for all K.
    batches = dict.fromkeys(batch for factor in arguments.factors for batch in batches_of(arguments.n, factor).values())
    return [{"batch": list(batch), "seed": seed, **shared} for seed in arguments.seeds for batch in batches]


def read(path: Path, planned: list[Result]) -> list[Result]:
    """Return the results that there are of the planned runs."""
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [row for row in rows if {name: row.get(name) for name in planned[0]} in planned]


def by_seed(rows: list[Result], batch: tuple[int, int], metric: str) -> dict[int, float]:
    """Return a column's value of each seed."""
    return {row["seed"]: row[metric] for row in rows if tuple(row["batch"]) == batch}


def show(values: Iterable[float], scale: float = 1.0, digits: int = 3) -> str:
    """Return mean and standard deviation."""
    known = list(values)
    if not known:
        return "-"
    spread = f" ± {scale * stdev(known):.{digits}f}" if len(known) > 1 else ""
    return f"{scale * mean(known):.{digits}f}{spread}"


def accuracy_table(rows: list[Result], n: int, factors: list[int]) -> str:
    """Return the paper's table 1: mean ± standard deviation over seeds, and differences seed by seed."""
    header = [
        "K", "(trunk, head)", "test error, %", "over the small batch's, points (minimum-maximum)", "test loss",
        "train loss", "seeds",
    ]  # fmt: skip
    lines = []
    for factor in factors:
        columns = batches_of(n, factor)
        small = by_seed(rows, columns["small batch"], "test error")
        for batch in columns.values():
            error, *losses = (by_seed(rows, batch, metric) for metric in METRICS)
            more = [error[seed] - small[seed] for seed in error.keys() & small.keys()]
            difference = min_max(more).text(2, scale=100) if more else "-"
            cells = [show(error.values(), 100, 2), difference, *(show(loss.values()) for loss in losses)]
            lines.append([str(factor), str(batch), *cells, str(len(error))])
    return markdown_table(header, lines)


def draw(rows: list[Result], n: int, factors: list[int], path: Path) -> None:
    """Draw each column's test errors: a point a seed, a line at the mean, and the batch sizes below."""
    figure, panels = pyplot().subplots(
        1, len(factors), figsize=(1.5 + 3.6 * len(factors), 4.2), layout="constrained", sharey=True, squeeze=False
    )
    for axes, factor in zip(panels.flat, factors, strict=True):
        columns = batches_of(n, factor)
        for place, (name, batch) in enumerate(columns.items()):
            errors = [100 * error for error in by_seed(rows, batch, "test error").values()]
            axes.scatter([place] * len(errors), errors, s=22, color=COLUMNS[name], alpha=0.7)
            if errors:
                axes.hlines(mean(errors), place - 0.3, place + 0.3, color=COLUMNS[name], linewidth=2)
        axes.set_xticks(range(len(columns)), [f"{name}\n{batch}" for name, batch in columns.items()], fontsize=9)
        axes.set_xlim(-0.6, len(columns) - 0.4)
        axes.set(title=f"K = {factor}", xlabel="batch size (trunk, head)")
    panels[0][0].set_ylabel("test error, % (a point a seed, a line at the mean)")
    figure.savefig(path, dpi=120)
    pyplot().close(figure)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    options = parser()
    arguments = parse(options, SMOKE, argv)
    for factor in arguments.factors:
        if factor < 2 or arguments.images % (arguments.n * factor):
            options.error(
                f"--images {arguments.images} is not a multiple of n K = {arguments.n} x {factor}, with K >= 2"
            )
    return arguments


def do_missing(arguments: argparse.Namespace, planned: list[Result], results: Path) -> None:
    """Do the runs that ``results`` lacks, one after the other, and append each to it."""
    if arguments.root is None:
        data: CIFAR10 = RandomCIFAR10(arguments.images, augment=arguments.augment, batch_size=arguments.n)
    else:
        data = CIFAR10(arguments.root, augment=arguments.augment, train_limit=arguments.images)
    data.setup()
    for number, settings in enumerate(planned, 1):
        if not read(results, [settings]):
            print(f"  run {number}/{len(planned)}: {settings['batch']}, seed {settings['seed']}", flush=True)
            row = {**settings, **run(data, settings), "machine": describe_machine()}
            with results.open("a") as file:
                file.write(json.dumps(row) + "\n")


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    folder = output_folder(arguments)
    results = folder / "results.jsonl"
    planned = plan(arguments)
    if arguments.root is not None or arguments.smoke:
        do_missing(arguments, planned, results)
    rows = read(results, planned)
    if not rows:
        print(f"left out: no runs in {results}, and no --root with CIFAR-10 to do them")
        return
    title = f"Batch sizes in trunk and head, CIFAR-10, {len(rows)} of {len(planned)} runs"
    write_report(folder, arguments, title, accuracy_table(rows, arguments.n, arguments.factors), rows)
    draw(rows, arguments.n, arguments.factors, folder / "accuracy.png")


if __name__ == "__main__":
    main()
