"""What global batch norm gives: the accuracy of both kinds of statistics at small batches (the paper's Figure 4).

    python benchmarks/agbn_accuracy.py --root DIR     # DIR holds cifar-10-batches-py; 51 runs on one core
    python benchmarks/agbn_accuracy.py --root DIR --seeds 1 --batch-sizes 8 128
    python benchmarks/agbn_accuracy.py                # no new runs: table and picture of those that there are

ResNet-20 on CIFAR-10, global batches of 8 to 128 images on 4 and on 8 devices, at every batch size the same images, as
often, and a learning rate in proportion to the batch. One device does the work of all, exactly: global statistics are
those of plain batch norm on the whole batch, whatever the number of devices, and local ones those of the batch's slices
(`sliced_batch_norm`; ``tests/layers/test_sliced_batch_norm.py`` proves it on real ranks). The last part compares the
values of ``global_phase`` at one small batch.

Not the paper's size: 4,096 training images seen 5 times, where it has 50,000 and 50 epochs. All cells have their first
seed before any has its second. Each run ends as a line of results.jsonl; a run that is there is not done again.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from support.global_batch_norm_tables import draw, figure_4, phases
from support.report import describe_machine, output_folder
from support.sliced_batch_norm import slice_batch_norm

from lightning_dp.callbacks.convergence import Plateau
from lightning_dp.callbacks.statistics_policy import GlobalPhase, in_global_phase
from lightning_dp.data import CIFAR10
from lightning_dp.models import resnet20


@dataclass(frozen=True)
class Settings:
    """What all runs have in common."""

    epochs: int = 5
    train_images: int = 4096  # a multiple of every batch size: all see the same images
    test_images: int = 4000
    lr_at_128: float = 0.1  # in proportion to the batch, as in Goyal et al. 2017; falls linearly to 0
    plateau_min_delta: float = 0.15  # of the training loss, patience 1 epoch


class Run(NamedTuple):
    """One training run. ``phase`` is a ``global_phase``, or "never": local statistics throughout."""

    batch_size: int
    num_devices: int  # 1 where statistics are always global: their number then makes no difference
    phase: str
    seed: int


def train(run: Run, settings: Settings, root: str) -> dict[str, Any]:
    """Train and test; accuracies in percent, and the share of steps with global statistics."""
    torch.manual_seed(run.seed)
    data = CIFAR10(
        root,
        val_size=0,
        train_limit=settings.train_images,
        test_limit=settings.test_images,
        batch_size=run.batch_size,
        seed=run.seed,
    )
    data.setup()
    loader: Any = data.train_dataloader()
    model: Any = resnet20()
    layers = slice_batch_norm(model)
    model = model.to(memory_format=torch.channels_last)
    lr = settings.lr_at_128 * run.batch_size / 128
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9, weight_decay=1e-4)
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, settings.epochs * len(loader))
    criterion = Plateau("train_loss", patience=1, min_delta=settings.plateau_min_delta)
    global_epochs, losses = 0, []
    for epoch in range(settings.epochs):
        is_global = run.phase != "never" and in_global_phase(cast(GlobalPhase, run.phase), criterion.converged)
        for layer in layers:
            layer.num_slices = 1 if is_global else run.num_devices
        loader.sampler.set_epoch(epoch)
        loss_sum = num_right = num_seen = 0.0
        for x, y in loader:
            logits = model(x.contiguous(memory_format=torch.channels_last))
            loss = F.cross_entropy(logits, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            decay.step()
            loss_sum += loss.item() * len(y)
            num_right += (logits.argmax(1) == y).sum().item()
            num_seen += len(y)
        global_epochs += is_global
        losses.append(loss_sum / num_seen)
        criterion.update({"train_loss": losses[-1]})
    averaged = accuracy(model, data.test_dataloader())
    for layer in layers:
        layer.running_var = layer.whole_var
    return {
        "test": 100 * averaged,  # with the running statistics averaged over the devices, as the callback has it
        "test_whole_var": 100 * accuracy(model, data.test_dataloader()),  # with the variance between devices, too
        "train": 100 * num_right / num_seen,  # in the last epoch, augmented, with the statistics of training
        "losses": losses,
        "global_share": global_epochs / settings.epochs,
    }


@torch.no_grad()
def accuracy(model: torch.nn.Module, loader: Any) -> float:
    """Share of images that the model has right in evaluation, with its running statistics."""
    model.eval()
    right = [model(x.contiguous(memory_format=torch.channels_last)).argmax(1) == y for x, y in loader]
    return torch.cat(right).float().mean().item()


def plan(arguments: argparse.Namespace) -> list[Run]:
    """All runs, seed by seed."""
    runs = []
    for seed in range(1, arguments.seeds + 1):
        for batch_size in arguments.batch_sizes:
            runs.append(Run(batch_size, 1, "always", seed))
            runs += [Run(batch_size, devices, "never", seed) for devices in arguments.devices]
        batch_size, devices = arguments.phase_cell
        runs += [Run(batch_size, devices, phase, seed) for phase in ("until_converged", "after_converged")]
    return runs


def read(path: Path, settings: Settings) -> dict[Run, dict[str, Any]]:
    """The runs in ``path`` that had these settings."""
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {Run(**line["run"]): line for line in lines if line["settings"] == asdict(settings)}


def do_missing(runs: list[Run], settings: Settings, root: str, path: Path) -> None:
    """Do the runs that ``path`` lacks, one after the other, and append each to it."""
    done = read(path, settings)
    missing = [run for run in runs if run not in done]
    start = time.perf_counter()
    for number, run in enumerate(missing, 1):
        begin = time.perf_counter()
        result = train(run, settings, root)
        now = time.perf_counter()
        line = {"run": run._asdict(), "settings": asdict(settings), **result, "seconds": now - begin}
        with path.open("a") as file:
            file.write(json.dumps({**line, "machine": describe_machine()}) + "\n")
        what = f"batch {run.batch_size}, {run.num_devices} devices, {run.phase}, seed {run.seed}"
        minutes = (now - start) / number * (len(missing) - number) / 60
        print(f"[{number}/{len(missing)}] {what}: test {result['test']:.1f} % ({result['test_whole_var']:.1f})", end="")
        print(f", train {result['train']:.1f} %, {now - begin:.0f} s; about {minutes:.0f} min left", flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", help="folder that holds cifar-10-batches-py; without it nothing is trained")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[8, 16, 32, 64, 128])
    parser.add_argument("--devices", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--phase-cell", type=int, nargs=2, default=[8, 4], help="batch and devices of the last part")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    settings = Settings()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    folder = output_folder("agbn_accuracy")
    path = folder / "results.jsonl"
    runs = plan(arguments)
    if arguments.root is not None:
        do_missing(runs, settings, arguments.root, path)
    done = {run: line for run, line in read(path, settings).items() if run in runs}
    if not done:
        print(f"left out: no runs in {path}, and no --root with CIFAR-10 to do them")
        return
    print(f"{len(done)} of {len(runs)} runs; {settings}")
    tables = {
        "figure 4": figure_4(done, arguments.batch_sizes, arguments.devices),
        "phases": phases(done, *arguments.phase_cell),
    }
    machines = sorted({line["machine"] for line in done.values()})
    everything = {"machines": machines, "settings": asdict(settings), **tables}
    (folder / "summary.json").write_text(json.dumps(everything, indent=1))
    draw(tables["figure 4"], folder / "accuracy.png")
    print(f"\nwritten to {folder}")


if __name__ == "__main__":
    main()
