"""The stream code of the communication hooks on an emulated device: right as it is, and wrong without any wait."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_dp.collectives import comm_hooks
from lightning_dp.collectives.comm_hooks import BucketQueue
from tests.emulated_device.collectives import Group, World
from tests.emulated_device.machine import Machine
from tests.emulated_device.mutations import Mutation, applied, fails, mutations
from tests.emulated_device.tensors import full, raw

SIZES = (7, 1, 10)
STEPS = 3
DEVICES = [torch.device("cuda", index) for index in range(2)]


class Summing(BucketQueue):
    """Sums on NCCL, which queues the sum on the current stream."""

    def _average(self, buffer: Any, parameters: list[torch.Tensor], group: Any) -> None:
        group.world.all_reduce(buffer, group)


class Tripling(BucketQueue):
    """Sums on gloo. Its messages are copied from and to the device on the current stream."""

    def _average(self, buffer: Any, parameters: list[torch.Tensor], group: Any) -> None:
        buffer.mul_(3)


def start(machine: Machine, monkeypatch: Any, from_device: bool) -> World:
    machine.install(monkeypatch)
    monkeypatch.setattr(comm_hooks, "resolve_group", lambda group: group)
    monkeypatch.setattr(comm_hooks, "sends_from_device", lambda buffer, group: from_device)
    return World(machine)


def average_in_the_hook(machine: Machine, monkeypatch: Any) -> None:
    """Two ranks on NCCL. The first goes on with its own work before the second has begun with the sum."""
    world = start(machine, monkeypatch, True)
    queues = [Summing(Group(world, (0, 1), rank), "test") for rank in range(2)]
    buffers = [[full(machine, device, size, 0.0) for size in SIZES] for device in DEVICES]
    own = [[full(machine, device, size, 0.0) for size in SIZES] for device in DEVICES]
    others = [machine.new_stream(device) for device in DEVICES]
    for stream, device in zip(others, DEVICES, strict=True):
        stream.wait_stream(machine.current_stream(device))
    for step in range(STEPS):
        futures: list[list[Any]] = []
        for rank, device in enumerate(DEVICES):
            machine.set_device(device)
            for index, buffer in enumerate(buffers[rank]):
                buffer.fill_(float(100 * step + 10 * index + rank))
            futures.append([queues[rank].submit(buffer) for buffer in buffers[rank]])
            machine.current_stream(device).synchronize()
        for rank, device in enumerate(DEVICES):
            machine.set_device(device)
            with machine.on_stream(others[rank]):
                for index, future in enumerate(futures[rank]):
                    own[rank][index].add_(future.wait())
            machine.current_stream(device).wait_stream(others[rank])
    machine.finish()
    assert not machine.reused_too_early
    for of_rank in own:
        for index, tensor in enumerate(of_rank):
            assert bool((raw(tensor) == sum(200 * step + 20 * index + 1 for step in range(STEPS))).all())


def average_in_the_thread(machine: Machine, monkeypatch: Any) -> None:
    """A rank on gloo whose device is not the first: its thread makes no context there."""
    world = start(machine, monkeypatch, False)
    device = DEVICES[1]
    machine.set_device(device)
    queue = Tripling(Group(world, (0,), 0), "test")
    buffers = [full(machine, device, size, 0.0) for size in SIZES]
    for step in range(STEPS):
        for index, buffer in enumerate(buffers):
            buffer.fill_(float(10 * step + index))
        for future in [queue.submit(buffer) for buffer in buffers]:
            future.wait()
    for thread in [each for each in threading.enumerate() if each.name == "test"]:
        thread.join(10)
    machine.finish()
    assert machine.contexts == {1}
    for index, buffer in enumerate(buffers):
        assert bool((raw(buffer) == 3 * (10 * (STEPS - 1) + index)).all())


def drop_in_flight(machine: Machine, monkeypatch: Any) -> None:
    """The backward of a rank raises, and drops its buckets. Its peer still gets the right sum."""
    world = start(machine, monkeypatch, True)
    buffers = [full(machine, device, 3, 1.0) for device in DEVICES]
    for rank in range(2):
        Summing(Group(world, (0, 1), rank), "test").submit(buffers[rank])
    del buffers[0]
    machine.finish()
    assert not machine.reused_too_early
    assert bool((raw(buffers[0]) == 2).all())


SCENARIOS: dict[str, Callable[[Machine, Any], None]] = {
    "in the hook": average_in_the_hook,
    "in the thread": average_in_the_thread,
    "dropped": drop_in_flight,
}


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("seed", [None, 0, 1, 2, 3])
def test_sums_are_right_whenever_the_device_runs(scenario, seed, monkeypatch):
    SCENARIOS[scenario](Machine(seed), monkeypatch)


MUTATIONS = mutations(comm_hooks)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_every_wait_matters(mutation: Mutation):
    with applied(mutation):
        assert any(map(fails, SCENARIOS.values())), f"{mutation} can be left out, and no scenario fails"


def test_the_mutations_are_those_that_are_expected():
    calls = {mutation.text.partition("(")[0].rpartition(".")[2] for mutation in MUTATIONS}
    assert calls == {"wait_stream", "set_device", "on_stream", "keep_until_done"}
