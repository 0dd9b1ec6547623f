"""Buckets that two ranks of a group reduce on their devices, before the carriers' part is summed on the host."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import Any

import torch

from lightning_dp.collectives import hierarchical, streams
from lightning_dp.collectives.groups import RankTopology
from lightning_dp.collectives.hierarchical import HierarchicalAllReduce
from lightning_dp.strategies.layered_sgd.host_communicator import Communicator, HostCopy
from tests.emulated_device.collectives import World
from tests.emulated_device.machine import Machine
from tests.emulated_device.tensors import full, raw
from tests.strategies.layered_sgd.host_stream_scenarios import SIZES, STEPS, LazyWork, check

DEVICES = [torch.device("cuda", index) for index in range(2)]
# Elements of SIZES that each rank carries in a step: all, or the first or second of two shards.
CARRIED = {"leader": [18, 0], "sharded": [10, 8]}


class Member(HierarchicalAllReduce):
    """One of the two. What gloo does is emulated: the other group has the same gradients, and sums are sent by hand."""

    def __init__(self, rank: int, carriers: Any, payloads: tuple[list[torch.Tensor], ...] = ([], [])) -> None:
        super().__init__(RankTopology(4, 2), rank, carriers, reduce_on_device=True)
        self._payloads = payloads
        self.is_closed = False

    def inter_group_all_reduce(self, buffer: torch.Tensor) -> None:
        if self.rank < self.num_shards:
            self._shards(buffer)[self.rank].mul_(2)

    def intra_group_broadcast(self, buffer: torch.Tensor) -> list[Any]:
        place = len(self._payloads[self.rank])
        self._payloads[self.rank].append(buffer)

        def receive() -> None:
            for member, shard in enumerate(self._shards(buffer)):
                if member != self.rank:
                    shard.copy_(self._shards(self._payloads[member][place])[member])

        return [LazyWork(receive)]

    def close(self) -> None:
        self.is_closed = True


def reduce_on_the_devices(machine: Machine, monkeypatch: Any, carriers: str) -> None:
    machine.install(monkeypatch)
    World(machine).install(monkeypatch, hierarchical)
    payloads: Any = ([], [])
    communicators = [
        Communicator(Member(rank, carriers, payloads), False, timedelta(seconds=1), device, on_host=True)
        for rank, device in enumerate(DEVICES)
    ]
    try:
        _reduce_on_the_devices(machine, communicators)
    finally:
        for communicator in communicators:
            communicator.close()
    expected = {rank: STEPS * numel for rank, numel in enumerate(CARRIED[carriers])}
    check(machine.copied_to_host == Counter(expected), f"copied to the host: {machine.copied_to_host}")


def _reduce_on_the_devices(machine: Machine, communicators: list[Communicator]) -> None:
    buffers = [[full(machine, device, size, 0.0) for size in SIZES] for device in DEVICES]
    own = [[full(machine, device, size, 0.0) for size in SIZES] for device in DEVICES]
    others = [machine.new_stream(device) for device in DEVICES]
    for stream, device in zip(others, DEVICES, strict=True):
        stream.wait_stream(machine.current_stream(device))
    for step in range(STEPS):
        sums: list[list[Any]] = []
        for rank, device in enumerate(DEVICES):
            machine.set_device(device)
            sums.append([])
            for index, buffer in enumerate(buffers[rank]):
                buffer.fill_(float(100 * step + 10 * index + rank))
                sums[rank].append(communicators[rank].submit(index, buffer))
            machine.current_stream(device).synchronize()  # the loss is logged, while the neighbor has not come as far
        for communicator in communicators:
            communicator.release()
        for bucket in (*sums[0], *sums[1]):
            check(bucket._wait_until_ended(10), "a bucket does not settle")
        for rank, device in enumerate(DEVICES):
            machine.set_device(device)
            with machine.on_stream(others[rank]):
                for index, bucket in enumerate(sums[rank]):
                    bucket.wait()
                    own[rank][index].add_(buffers[rank][index])
            machine.current_stream(device).wait_stream(others[rank])
    machine.finish()
    check(not machine.reused_too_early, "memory was handed out while a collective used it")
    for of_rank in own:
        for index, tensor in enumerate(of_rank):
            expected = 2 * sum(200 * step + 20 * index + 1 for step in range(STEPS))
            check(bool((raw(tensor) == expected).all()), f"{raw(tensor)} is not {expected}")


def drop_what_is_reduced(machine: Machine, monkeypatch: Any) -> None:
    """A rank gives up after backward, and drops its bucket. Its neighbor still gets the right sum."""
    machine.install(monkeypatch)
    World(machine).install(monkeypatch, hierarchical)
    buffers = [full(machine, device, 3, 1.0) for device in DEVICES]
    copies = [
        HostCopy(buffer, machine.new_stream(buffer.device), Member(rank, "sharded").reduce_on_device)
        for rank, buffer in enumerate(buffers)
    ]
    del buffers[0], copies[0]
    machine.finish()
    check(not machine.reused_too_early, "memory was handed out while it was reduced")
    check(copies[0].tensor[2] == 2, f"the neighbor has {copies[0].tensor}")


def close_while_reducing(machine: Machine, monkeypatch: Any) -> None:
    """Backward has raised, so buckets are not released. Groups whose collectives have not ended are not destroyed."""
    machine.install(monkeypatch)
    World(machine).install(monkeypatch, hierarchical)
    monkeypatch.setattr(streams, "is_done_within", lambda stream, _: stream.query())
    members = [Member(rank, "leader") for rank in range(2)]
    communicators = [
        Communicator(member, False, timedelta(seconds=1), device, on_host=True)
        for member, device in zip(members, DEVICES, strict=True)
    ]
    try:
        communicators[0].submit(0, full(machine, DEVICES[0], 3, 1.0))
        communicators[0].close()
        check(not members[0].is_closed, "groups were destroyed while a collective was under way")
        communicators[1].submit(0, full(machine, DEVICES[1], 3, 1.0))
        machine.finish()
    finally:
        for communicator in communicators:
            communicator.close()
    check(members[0].is_closed, "groups were left")
