"""What large batches cost in accuracy, and how much of it the variable batch size saves, on real CIFAR-10.

    python benchmarks/hybrid_accuracy.py --root data                 # 3 seeds, K = 8
    python benchmarks/hybrid_accuracy.py --root data --factors 4 8 16 --seeds 0 1 2 3 4 --epochs 20

Table 1 of Krizhevsky 2014 (arXiv 1404.5997) at small scale. Batch size (m, n) is m in the convolutional trunk and n in
the fully-connected head; three columns for each K: (nK, nK), the large batch; (nK, n), the variable batch size; and
(n, n), the small batch. Each run sees the same number of examples, so that (nK, nK) makes K times fewer updates.

The variable batch size of K workers is computed exactly, by one process, in the paper's order (section 4.2): the trunk
forward on nK examples; n by n through the head, forward and backward, each time with an update of the head; the trunk
backward, with the features' gradients from all K, and its update.

The network is `cifar_alexnet` with logistic units, the update rule and schedule are the paper's (section 5). The rates
are scaled from those of batch n, in each part by that part's batch, with the rule given. Test images serve for the
result alone. Results are appended to results.jsonl run by run; runs that it has are not repeated, so a run that was
stopped goes on where it was. Prints a table; writes it, and accuracy.png, too.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
import torch.nn.functional as F
from support.report import describe_machine, output_folder
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_dp.data import CIFAR10
from lightning_dp.models import TrunkAndHead, cifar_alexnet
from lightning_dp.optim import KrizhevskySGD, krizhevsky_schedule, trunk_and_head_groups

Result = dict[str, Any]
METRICS = ("test error", "test loss", "train loss")


def logistic_cost(logits: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy of a logistic unit for each class: the sum over classes, the mean over images."""
    is_class = F.one_hot(y, logits.shape[1]).to(logits.dtype)
    return F.binary_cross_entropy_with_logits(logits, is_class, reduction="sum") / len(y)


def step(model: TrunkAndHead, optimizer: Optimizer, x: Tensor, y: Tensor, head_batch_size: int) -> float:
    """Train on a batch in the trunk, by parts of ``head_batch_size`` in the head; return the mean cost.

    The optimizer has the parameters of both, and leaves alone what has no gradient. With one part, this is SGD.
    """
    features = model.trunk(x)
    parts = [part.detach().requires_grad_() for part in features.split(head_batch_size)]
    total = 0.0
    for part, target in zip(parts, y.split(head_batch_size), strict=True):
        optimizer.zero_grad()
        cost = logistic_cost(model.head(part), target)
        cost.backward()
        optimizer.step()  # of the head: the trunk has no gradient yet
        total += cost.item() * len(target)
    optimizer.zero_grad()
    # Each part's gradient is that of the mean over the part; the trunk's is to be that of the mean over all.
    shares = [part.grad * (len(part) / len(x)) for part in parts if part.grad is not None]
    features.backward(torch.cat(shares))
    optimizer.step()  # of the trunk: the head has none
    return total / len(x)


def run(data: CIFAR10, settings: Result) -> Result:
    """Train from the settings' seed, and test."""
    (trunk_batch_size, head_batch_size), epochs = settings["batch"], settings["epochs"]
    torch.manual_seed(settings["seed"])
    data.batch_size, data.seed = trunk_batch_size, settings["seed"]
    loader = data.train_dataloader()
    model = cifar_alexnet(dropout=settings["dropout"]).to(memory_format=torch.channels_last)
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
    for epoch in range(epochs):
        loader.sampler.set_epoch(epoch)
        losses = []
        for x, y in loader:
            losses.append(step(model, optimizer, laid_out(x), y, head_batch_size))
            schedule.step()
        print(
            f"    epoch {epoch + 1}/{epochs}: train loss {mean(losses):.3f}, {time.perf_counter() - start:.0f} s",
            flush=True,
        )
    seconds = time.perf_counter() - start
    images_per_s = epochs * len(loader) * trunk_batch_size / seconds
    return {"train loss": mean(losses), **test(model, data.test_dataloader()), "images per s": images_per_s}


def laid_out(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


@torch.no_grad()
def test(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> Result:
    """Top-1 error (a share of 1) and logistic cost, over all test images."""
    model.eval()
    wrong, loss, count = 0, 0.0, 0
    for x, y in batches:
        logits = model(laid_out(x))
        wrong += int((logits.argmax(1) != y).sum())
        loss += logistic_cost(logits, y).item() * len(y)
        count += len(y)
    return {"test error": wrong / count, "test loss": loss / count}


def columns(n: int, factor: int) -> list[tuple[int, int]]:
    """The large batch, the variable one, the small one."""
    return [(n * factor, n * factor), (n * factor, n), (n, n)]


def plan(arguments: argparse.Namespace) -> list[Result]:
    """Settings of all runs: seed by seed, so that what is there early compares all columns."""
    names = ("n", "lr", "weight_decay", "rule", "dropout", "images", "augment", "epochs")
    shared = {name: getattr(arguments, name) for name in names}
    batches = dict.fromkeys(batch for factor in arguments.factors for batch in columns(arguments.n, factor))
    return [{"batch": list(batch), "seed": seed, **shared} for seed in arguments.seeds for batch in batches]


def read(path: Path, planned: list[Result]) -> list[Result]:
    """The results that there are of the planned runs."""
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [row for row in rows if {name: row.get(name) for name in planned[0]} in planned]


def of_column(rows: list[Result], batch: tuple[int, int], metric: str) -> list[float]:
    """One value a seed."""
    return [row[metric] for row in sorted(rows, key=lambda row: row["seed"]) if tuple(row["batch"]) == batch]


def show(values: list[float], scale: float = 1.0, digits: int = 3) -> str:
    """Mean and standard deviation."""
    if not values:
        return "-"
    spread = f" ± {scale * stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{scale * mean(values):.{digits}f}{spread}"


def table(rows: list[Result], n: int, factors: list[int]) -> str:
    """As the paper's table 1, in Markdown: mean ± standard deviation over seeds."""
    lines = ["| K | (trunk, head) | test error, % | test loss | train loss | seeds |", "|---|---|---|---|---|---|"]
    for factor in factors:
        for batch in columns(n, factor):
            error, *losses = (of_column(rows, batch, metric) for metric in METRICS)
            shown = [show(error, 100, 2), *map(show, losses)]
            lines.append(f"| {factor} | {batch} | " + " | ".join(shown) + f" | {len(error)} |")
    return "\n".join(lines)


def draw(rows: list[Result], n: int, factors: list[int], path: Path) -> None:
    """The columns' errors: a point a seed, a line at the mean."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names, colours = ("large batch", "variable batch", "small batch"), ("#e66101", "#1f77b4", "#5aae61")
    figure, axes = plt.subplots(figsize=(7, 4))
    for place, factor in enumerate(factors):
        for index, batch in enumerate(columns(n, factor)):
            x, errors = place + 0.25 * (index - 1), [100 * error for error in of_column(rows, batch, "test error")]
            axes.scatter([x] * len(errors), errors, s=14, color=colours[index], alpha=0.6)
            if errors:
                axes.hlines(
                    mean(errors), x - 0.1, x + 0.1, color=colours[index], label=names[index] if not place else None
                )
    axes.set_xticks(range(len(factors)), [f"K = {factor}, ({factor * n}, {n})" for factor in factors])
    axes.set_ylabel("test error, %")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", help="folder that holds cifar-10-batches-py; without it nothing is trained")
    parser.add_argument("--n", type=int, default=64, help="the small batch")
    parser.add_argument("--factors", type=int, nargs="+", default=[8], help="K, how many times larger the large one is")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument(
        "--images", type=int, default=40960, help="to train on, a multiple of n K, so that none is left"
    )
    parser.add_argument("--lr", type=float, default=0.01, help="for batches of n")
    parser.add_argument("--weight-decay", type=float, default=0.0005, help="for batches of n")
    parser.add_argument("--rule", choices=["linear", "sqrt"], default="linear")
    parser.add_argument("--dropout", type=float, default=0.0, help="0, as runs are too short for overfitting")
    parser.add_argument("--augment", action="store_true", help="crops and mirror images")
    parser.add_argument("--name", default="hybrid_accuracy", help="of the folder in runs/benchmarks")
    arguments = parser.parse_args()
    for factor in arguments.factors:
        if factor < 2 or arguments.images % (arguments.n * factor):
            parser.error(
                f"--images {arguments.images} is not a multiple of n K = {arguments.n} x {factor}, with K >= 2"
            )
    return arguments


def main() -> None:
    arguments = parse_arguments()
    if arguments.root is None:
        print("left out: no --root with CIFAR-10 to train on")
        return
    folder, machine, planned = output_folder(arguments.name), describe_machine(), plan(arguments)
    results = folder / "results.jsonl"
    print(f"{machine}\n{len(planned)} runs, {len(read(results, planned))} are done; results in {results}", flush=True)
    data = CIFAR10(arguments.root, augment=arguments.augment, train_limit=arguments.images)
    data.setup()
    for number, settings in enumerate(planned, 1):
        if read(results, [settings]):
            continue
        print(f"  run {number}/{len(planned)}: {settings['batch']}, seed {settings['seed']}", flush=True)
        row = {**settings, **run(data, settings), "machine": machine}
        with results.open("a") as file:
            file.write(json.dumps(row) + "\n")
        rows = read(results, planned)
        text = table(rows, arguments.n, arguments.factors)
        (folder / "table.md").write_text(text + "\n")
        draw(rows, arguments.n, arguments.factors, folder / "accuracy.png")
    print(table(read(results, planned), arguments.n, arguments.factors))
    print(f"written to {folder}")


if __name__ == "__main__":
    main()
