"""NCCL's collectives on emulated devices: queued on the current stream, run when every rank of the group has come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tests.emulated_device.machine import Machine, Meeting, Op
from tests.emulated_device.tensors import DeviceTensor, raw

Values = dict[int, tuple[torch.Tensor, ...]]
"""Output and input of each rank."""


class Group:
    """One rank's handle of a process group."""

    def __init__(self, world: World, ranks: tuple[int, ...], rank: int) -> None:
        self.world = world
        self.ranks = ranks
        self.rank = rank
        self.num_issued = 0


class World:
    """The collectives of all ranks of one machine, all in one thread. Rank r is on device r."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._meetings: dict[tuple[tuple[int, ...], int], Meeting] = {}

    def install(self, monkeypatch: Any, module: Any) -> None:
        """Take the place of ``dist``, ``groups`` and ``create_groups`` in ``module``."""
        monkeypatch.setattr(module, "dist", self)
        monkeypatch.setattr(module, "groups", self, raising=False)
        monkeypatch.setattr(module, "create_groups", self.create_groups)
        monkeypatch.setattr(module, "destroy_group", lambda group: None)

    def create_groups(self, partition: Sequence[Sequence[int]], rank: int, *_: Any, **__: Any) -> Group | None:
        return next((Group(self, tuple(ranks), rank) for ranks in partition if rank in ranks), None)

    def reduce_scatter_single(self, output: DeviceTensor, input: DeviceTensor, group: Group) -> None:
        def run(values: Values) -> None:
            total = sum(values[rank][1] for rank in group.ranks)
            for rank, chunk in zip(group.ranks, total.chunk(len(group.ranks)), strict=True):
                values[rank][0].copy_(chunk)

        self._issue("reduce-scatter", group, run, output, input)

    def all_gather_single(self, output: DeviceTensor, input: DeviceTensor, group: Group) -> None:
        def run(values: Values) -> None:
            gathered = torch.cat([values[rank][1] for rank in group.ranks])
            for rank in group.ranks:
                values[rank][0].copy_(gathered)

        self._issue("all-gather", group, run, output, input)

    def all_reduce(self, tensor: DeviceTensor, group: Group) -> None:
        def run(values: Values) -> None:
            total = sum(values[rank][0] for rank in group.ranks)
            for rank in group.ranks:
                values[rank][0].copy_(total)

        self._issue("all-reduce", group, run, tensor)

    def reduce(self, tensor: DeviceTensor, group: Group, group_dst: int) -> None:
        def run(values: Values) -> None:
            values[group.ranks[group_dst]][0].copy_(sum(values[rank][0] for rank in group.ranks))

        self._issue("reduce", group, run, tensor)

    def broadcast(self, tensor: DeviceTensor, group: Group, group_src: int) -> None:
        def run(values: Values) -> None:
            for rank in group.ranks:
                values[rank][0].copy_(values[group.ranks[group_src]][0])

        self._issue("broadcast", group, run, tensor)

    def _issue(self, name: str, group: Group, run: Callable[[Values], None], *tensors: DeviceTensor) -> None:
        key = (group.ranks, group.num_issued)
        group.num_issued += 1
        stream = self.machine.current_stream(tensors[0].device)
        with self.machine.lock:
            new = Meeting(f"{name} over ranks {group.ranks}", len(group.ranks), lambda meeting: run(meeting.tensors))
            meeting = self._meetings.setdefault(key, new)
            assert meeting.name == new.name, f"rank {group.rank} issues a {new.name}, another rank a {meeting.name}"
            meeting.places[group.rank] = (stream, len(stream.ops))
            meeting.tensors[group.rank] = tuple(map(raw, tensors))
            op = Op(lambda: None, uses=[tensor.memory for tensor in tensors])
            op.meeting = meeting
        self.machine.queue(stream, op)
