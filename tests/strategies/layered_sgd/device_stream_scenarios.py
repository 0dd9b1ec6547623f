"""Small trainings on emulated devices whose buckets are summed on the devices. Each raises if a sum is wrong.

Buckets are filled on one stream, used on two, and freed while they are in flight.
"""

from __future__ import annotations

import random
from typing import Any

import torch

from lightning_dp.collectives.groups import RankTopology
from lightning_dp.strategies.layered_sgd import device_communicator
from lightning_dp.strategies.layered_sgd.device_communicator import DeviceAllReduce, DeviceCommunicator
from tests.emulated_device.collectives import World
from tests.emulated_device.machine import Machine
from tests.emulated_device.tensors import DeviceTensor, full, raw
from tests.strategies.layered_sgd.host_stream_scenarios import STEPS, check

SIZES = (7, 1, 10)  # two ranks in a group do not divide the first


class Rank:
    """One of 2 x 2 ranks, all in one thread. Its three phases run between those of the other ranks."""

    def __init__(self, machine: Machine, rank: int, early: bool) -> None:
        self.machine = machine
        self.rank = rank
        self.device = torch.device("cuda", rank)
        machine.set_device(self.device)
        self.main = machine.current_stream(self.device)
        self.other, first = machine.new_stream(self.device), machine.new_stream(self.device)
        self.collective = DeviceAllReduce(RankTopology(4, 2), rank)
        self.communicator = DeviceCommunicator(self.collective, early, self.device)
        with machine.on_stream(first):  # Lightning makes DDP, and so its first buckets, on a stream of their own
            self.buffers = self._new(float("nan"))
        self.parameters = [self._new(0.0), self._new(0.0)]
        self.main.wait_stream(first)
        self.other.wait_stream(self.main)
        self.sums: list[Any] = []

    def _new(self, value: float) -> list[DeviceTensor]:
        return [full(self.machine, self.device, size, value) for size in SIZES]

    def backward(self, step: int) -> None:
        self.machine.set_device(self.device)
        self.sums = []
        if step == 1:
            for buffer in self.buffers:
                self.machine.keep_until_done(buffer, self.main)  # which has read it
            self.buffers = self._new(float("nan"))  # DDP rebuilds its buckets once
        for index, buffer in enumerate(self.buffers):
            buffer.fill_(float(100 * step + 10 * index + self.rank))
            self.sums.append(self.communicator.submit(index, buffer))
        self.main.synchronize()  # the loss is logged, while other ranks have not come as far

    def after_backward(self) -> None:
        self.machine.set_device(self.device)
        with self.machine.on_stream(self.machine.new_stream(self.device)):
            self.communicator.release()

    def use(self) -> None:
        self.machine.set_device(self.device)
        for index in reversed(range(len(SIZES))):
            for stream, own in zip((self.main, self.other), self.parameters, strict=True):
                with self.machine.on_stream(stream):
                    self.sums[index].wait()
                    own[index].add_(self.buffers[index])
        self.main.wait_stream(self.other)


def sum_on_the_device(machine: Machine, monkeypatch: Any, early: bool, seed: int = 0) -> None:
    machine.install(monkeypatch)
    World(machine).install(monkeypatch, device_communicator)
    ranks = [Rank(machine, rank, early) for rank in range(4)]
    order = random.Random(seed)
    for step in range(STEPS):
        first, *others = order.sample(ranks, len(ranks))
        first.backward(step)
        check(not any(bucket.has_arrived for bucket in first.sums), "a sum has arrived that peers have not begun with")
        for rank in others:
            rank.backward(step)
        for phase in (Rank.after_backward, Rank.use):
            for rank in order.sample(ranks, len(ranks)):
                phase(rank)
    machine.finish()
    check(all(bucket.has_arrived for rank in ranks for bucket in rank.sums), "a sum has not arrived")
    check(not machine.reused_too_early, "memory was handed out while a collective used it")
    for rank in ranks:
        for own in rank.parameters:
            for index, parameter in enumerate(own):
                expected = sum(100 * step + 10 * index + peer for step in range(STEPS) for peer in range(4))
                check(bool((raw(parameter) == expected).all()), f"{raw(parameter)} is not {expected}")


def drop_in_flight(machine: Machine, monkeypatch: Any) -> None:
    """A rank gives up after backward, and drops its buckets. Its peer still gets the right sum."""
    machine.install(monkeypatch)
    World(machine).install(monkeypatch, device_communicator)
    buffers = [full(machine, torch.device("cuda", rank), 3, 1.0) for rank in range(2)]
    for rank in range(2):
        collective = DeviceAllReduce(RankTopology(2, 1), rank)
        DeviceCommunicator(collective, True, buffers[rank].device).submit(0, buffers[rank])
    del buffers[0]
    machine.finish()
    check(bool((raw(buffers[0]) == 2).all()), f"the peer has {raw(buffers[0])}")


def close_in_flight(machine: Machine, monkeypatch: Any) -> None:
    """Groups whose collectives have not ended are not destroyed."""
    machine.install(monkeypatch)
    World(machine).install(monkeypatch, device_communicator)
    monkeypatch.setattr(device_communicator, "CLOSE_LIMIT_S", 0.0)
    closed: list[int] = []
    monkeypatch.setattr(DeviceAllReduce, "close", lambda self: closed.append(self.rank))
    communicators = [
        DeviceCommunicator(DeviceAllReduce(RankTopology(2, 1), rank), True, torch.device("cuda", rank))
        for rank in range(2)
    ]
    communicators[0].submit(0, full(machine, torch.device("cuda", 0), 3, 1.0))
    communicators[0].close()
    check(not closed, "groups were destroyed while a collective was under way")
    communicators[1].submit(0, full(machine, torch.device("cuda", 1), 3, 1.0))
    machine.finish()
    communicators[0].close()
    check(closed == [0], "groups were left")
