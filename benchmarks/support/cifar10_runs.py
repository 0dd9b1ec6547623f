"""Runs of ResNet-20 on CIFAR-10 that may take hours: each ends as a line of a file, and is not done again."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import LinearLR

from lightning_dp.data import CIFAR10
from support.command_line import output_folder
from support.random_cifar10 import RandomCIFAR10
from support.report import describe_machine

RunT = TypeVar("RunT", bound=tuple[Any, ...])  # a NamedTuple
Result = dict[str, Any]


def add_data_options(options: argparse.ArgumentParser) -> None:
    """Add the options that say how much is trained, and on what."""
    options.add_argument("--root", help="folder that holds cifar-10-batches-py; without it nothing is trained")
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--epochs", type=int, default=5)
    options.add_argument("--train-images", type=int, default=4096)
    options.add_argument("--test-images", type=int, default=4000)


def cifar10(root: str | None, train_images: int, test_images: int, batch_size: int, seed: int) -> CIFAR10:
    """Return the data; random images without ``root``, for smoke runs."""
    if root is None:
        data: CIFAR10 = RandomCIFAR10(train_images, batch_size=batch_size, eval_batch_size=test_images, seed=seed)
    else:
        data = CIFAR10(
            root, val_size=0, train_limit=train_images, test_limit=test_images, batch_size=batch_size, seed=seed
        )
    data.setup()
    return data


def linear_sgd(model: nn.Module, lr: float, num_steps: int) -> tuple[SGD, LinearLR]:
    """Return momentum SGD, and a schedule in which the learning rate falls linearly to 0."""
    optimizer = SGD(model.parameters(), lr, momentum=0.9, weight_decay=1e-4)
    return optimizer, LinearLR(optimizer, 1.0, 0.0, num_steps)


@torch.no_grad()
def accuracy(model: nn.Module, loader: Any) -> float:
    """Return the share of images that the model classifies correctly in evaluation, with its running statistics."""
    model.eval()
    correct = [model(x.contiguous(memory_format=torch.channels_last)).argmax(1) == y for x, y in loader]
    return torch.cat(correct).float().mean().item()


def finished_runs(
    arguments: argparse.Namespace,
    runs: Sequence[RunT],
    settings: Any,
    train: Callable[[RunT, Any, str | None], Result],
    describe: Callable[[RunT, Result], str],
) -> dict[RunT, Result]:
    """Do the runs that are missing in the output folder, if there is data, and return all that are there.

    Args:
        arguments: of `add_data_options` and `benchmark_parser`.
        runs: all that are planned.
        settings: a dataclass with what all runs have in common. Runs with other settings do not count.
        train: does a run, and returns its figures.
        describe: the text to print after a run.
    """
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    path = output_folder(arguments) / "results.jsonl"
    if arguments.root is not None or arguments.smoke:
        do_missing(runs, settings, arguments.root, path, train, describe)
    done = {run: line for run, line in read(path, settings, type(runs[0])).items() if run in runs}
    if not done:
        print(f"left out: no runs in {path}, and no --root with CIFAR-10 to do them")
    return done


def read(path: Path, settings: Any, kind: type[RunT]) -> dict[RunT, Result]:
    """Return the runs in ``path`` that had these settings."""
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {kind(**line["run"]): line for line in lines if line["settings"] == asdict(settings)}


def do_missing(
    runs: Sequence[RunT],
    settings: Any,
    root: str | None,
    path: Path,
    train: Callable[[RunT, Any, str | None], Result],
    describe: Callable[[RunT, Result], str],
) -> None:
    """Do the runs that ``path`` lacks, one after the other, and append each to it."""
    done = read(path, settings, type(runs[0]))
    missing: list[Any] = [run for run in runs if run not in done]
    start = time.perf_counter()
    for number, run in enumerate(missing, 1):
        begin = time.perf_counter()
        result = train(run, settings, root)
        now = time.perf_counter()
        line = {"run": run._asdict(), "settings": asdict(settings), **result, "seconds": now - begin}
        with path.open("a") as file:
            file.write(json.dumps({**line, "machine": describe_machine()}) + "\n")
        minutes = (now - start) / number * (len(missing) - number) / 60
        print(f"[{number}/{len(missing)}] {describe(run, result)}, {now - begin:.0f} s", end="")
        print(f"; about {minutes:.0f} min left", flush=True)


def machines(done: dict[RunT, Result]) -> list[str]:
    """Return the machines of the runs, also of those that were done before."""
    return sorted({line["machine"] for line in done.values()})
