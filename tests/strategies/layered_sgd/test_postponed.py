"""The update is postponed, and every reader of the parameters sees them up to date."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import DDPStrategy
from torch import Tensor

from lightning_dp.collectives.hierarchical import HierarchicalAllReduce
from tests.ranks import run_processes
from tests.strategies.layered_sgd.modules import OVERLAPS, fit, layered
from tests.strategies.modules import assert_same, snapshot


def version(parameter: Tensor) -> int:
    """Return how often ``parameter`` has been changed, behind the back of the watch."""
    with torch._C.DisableTorchFunctionSubclass():
        return parameter._version


class Versions(pl.Callback):
    """Reads how often each parameter has been changed."""

    reads = False

    def __init__(self) -> None:
        self.start = 0
        self.before: list[int] = []
        self.after: list[int] = []
        self.in_forward: list[dict[str, int]] = []

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.start = version(module.first.weight)
        module.first.register_forward_pre_hook(
            lambda *_: self.in_forward.append(
                {"first": version(module.first.weight), "last": version(module.last.weight)}
            )
        )
        module.last.register_forward_hook(lambda *_: self.in_forward[-1].update(done=version(module.last.weight)))

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.before.append(version(module.first.weight))
        if self.reads:
            module.first.weight.sum()
            self.after.append(version(module.first.weight))


class ReadingVersions(Versions):
    reads = True


def watch_versions(rank, overlap, callback):
    versions = callback()
    fit(layered(overlap=overlap), 2, max_steps=5, callbacks=[versions])
    return versions.start, versions.before, versions.after, versions.in_forward


def steps_done(versions: list[int], start: int) -> list[float]:
    """Versions as numbers of updates: an update changes a parameter a fixed number of times."""
    per_step = (versions[-1] - start) / (len(versions) - 1)
    return [(version - start) / per_step for version in versions]


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_the_update_waits_until_the_next_step(overlap):
    start, before, _, _ = run_processes(2, watch_versions, overlap, Versions)[0]
    assert before[0] == start
    assert steps_done(before, start) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_reading_a_parameter_brings_it_up_to_date(overlap):
    start, before, after, _ = run_processes(2, watch_versions, overlap, ReadingVersions)[0]
    assert before[0] == start
    assert before[1:] == after[:-1]
    assert all(b < a for b, a in zip(before, after, strict=True))


def test_each_layer_is_updated_just_before_its_next_forward():
    _, _, _, in_forward = run_processes(2, watch_versions, "step", Versions)[0]
    for step in in_forward[1:]:
        assert step["last"] < step["done"], "the last layer was updated before the forward came to it"


def test_as_published_the_whole_update_precedes_the_forward():
    _, _, _, in_forward = run_processes(2, watch_versions, "load", Versions)[0]
    for step in in_forward[1:]:
        assert step["last"] == step["done"]


class Gate(pl.Callback):
    """Shut from the start of backward until the next batch has been loaded."""

    def __init__(self) -> None:
        self.open = threading.Event()

    def on_before_backward(self, *_: Any) -> None:
        self.open.clear()

    def on_train_batch_start(self, *_: Any) -> None:
        self.open.set()

    def on_train_epoch_end(self, *_: Any) -> None:
        self.open.set()


def cross_only_after_loading(rank, overlap):
    gate, crossing = Gate(), HierarchicalAllReduce.inter_group_all_reduce

    def gated(self, buffer):
        assert gate.open.wait(10), "something waited for the reduction between groups before the next batch was loaded"
        crossing(self, buffer)

    HierarchicalAllReduce.inter_group_all_reduce = gated
    got = snapshot(*fit(layered(overlap=overlap), 2, max_steps=4, callbacks=[gate]))
    assert_same(got, snapshot(*fit(DDPStrategy(), 2, max_steps=4)))


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_the_network_has_until_the_next_batch_is_loaded(overlap):
    run_processes(2, cross_only_after_loading, overlap)
