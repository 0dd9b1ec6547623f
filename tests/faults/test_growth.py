"""Threads, descriptors and memory do not grow with steps and fits."""

from __future__ import annotations

import gc
import os
import resource
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import pytorch_lightning as pl
from support.faults import NUM_BATCHES, STRATEGIES, WORLD_SIZE, Case, Data, Fault, Net, make_trainer

from tests.ranks import run_cases, run_processes


class Usage(NamedTuple):
    threads: int
    descriptors: int
    memory_bytes: int


def usage() -> Usage:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Usage(len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), pages * resource.getpagesize())


class Recorder(pl.Callback):
    """What this process uses after each epoch."""

    def __init__(self) -> None:
        self.usages: list[Usage] = []

    def on_train_epoch_end(self, *_: Any) -> None:
        gc.collect()
        self.usages.append(usage())


def train(rank: int, strategy: str, folder: Path, num_fits: int, num_epochs: int) -> list[Usage]:
    """Return what this process used after each epoch of a single fit, or after each of several fits."""
    case = Case("none", "start", strategy, global_batch_norm=True, num_epochs=num_epochs)
    fault = Fault(case, rank, folder)
    recorder = Recorder()
    after_fits = []
    for _ in range(num_fits):
        trainer = make_trainer(case, folder)
        trainer.callbacks.append(recorder)
        trainer.fit(Net(fault), datamodule=Data(fault, rank))
        del trainer
        gc.collect()
        after_fits.append(usage())
    return recorder.usages if num_fits == 1 else after_fits


SLOW = [pytest.param(strategy, 50, 2000, marks=pytest.mark.slow) for strategy in STRATEGIES]
"""Strategy, fits, steps."""


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore")  # advice on loaders
@pytest.mark.parametrize(("strategy", "num_fits", "num_steps"), [("layered int8", 4, 24), *SLOW])
def test_nothing_grows(strategy, num_fits, num_steps, tmp_path):
    for fits, epochs in ((num_fits, 1), (1, num_steps // NUM_BATCHES)):
        for usages in run_processes(WORLD_SIZE, train, strategy, tmp_path, fits, epochs):
            half, end = usages[len(usages) // 2 - 1], usages[-1]
            print(f"{strategy}, {fits} fits of {epochs} epochs: {usages[0]}, {half}, {end}")
            assert end.threads <= half.threads
            assert end.descriptors <= half.descriptors
            assert end.memory_bytes - half.memory_bytes < MAX_GROWTH_BYTES


def fit_without_garbage_collection(rank: int, strategy: str, folder: Path) -> None:
    gc.collect()
    gc.disable()
    usages = []
    for _ in range(5):
        case = Case("none", "start", strategy)
        fault = Fault(case, rank, folder)
        make_trainer(case, folder).fit(Net(fault), datamodule=Data(fault, rank))
        usages.append(usage())
    gc.enable()
    # Each of the last three fits would leave one at least. A socket may close a moment after its fit has ended.
    assert usages[4].threads - usages[1].threads < 3, usages
    assert usages[4].descriptors - usages[1].descriptors < 3, usages


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore")  # advice on loaders
def test_a_fit_leaves_no_threads_to_the_garbage_collector(tmp_path):
    run_cases(WORLD_SIZE, fit_without_garbage_collection, ["layered PowerSGD", "FSDP shards", "hybrid c"], tmp_path)


MAX_GROWTH_BYTES = 2 * 2**20
"""From the middle to the end: the allocator keeps some pages more or less."""
