"""Exchanges in one call of the backend, as on NCCL: on the CPU, with gloo's messages in place of that call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_dp.collectives import all_to_all, groups, small_all_gather
from lightning_dp.collectives.all_to_all import Channel
from tests.ranks import run_threads, thread_group


class Works:
    def __init__(self, works: list[Any]) -> None:
        self.works = works

    def wait(self) -> None:
        for work in self.works:
            work.wait()


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """Let tensors on the CPU take the way of NCCL, and record the calls of the backend on all ranks."""
    names: list[str] = []

    def exchange(outputs, inputs, group, async_op) -> Works:
        assert async_op
        names.append("all_to_all")
        peers = [peer for peer in range(group.size()) if peer != group.rank()]
        assert not inputs[group.rank()].numel(), "a rank sends nothing to itself"
        assert not outputs[group.rank()].numel()
        works = [dist.irecv(outputs[peer], group=group, group_src=peer) for peer in peers if outputs[peer].numel()]
        works += [dist.isend(inputs[peer], group=group, group_dst=peer) for peer in peers if inputs[peer].numel()]
        return Works(works)

    def gather(output, tensor, group) -> None:
        names.append("all_gather")
        dist.all_gather(list(output.chunk(group.size())), tensor, group=group)

    monkeypatch.setattr(dist, "all_to_all", exchange)
    monkeypatch.setattr(all_to_all, "sends_from_device", lambda tensor, group: True)
    monkeypatch.setattr(small_all_gather, "backend_name", lambda group, device: "nccl")
    monkeypatch.setattr(groups, "all_gather_single", gather)
    return names


def exchange(rank: int, group: dist.ProcessGroup) -> tuple[list[torch.Tensor], torch.Tensor, Any, int]:
    """Rank r sends r + p numbers to rank p, so that sizes differ and one message is empty."""
    channel = Channel(group)
    sends = [torch.full((rank + peer,), 10.0 * rank + peer) for peer in range(group.size())]
    receives = [torch.empty(rank + peer) for peer in range(group.size())]
    channel.all_to_all("rows", sends, receives).wait()
    gathered = channel.all_gather("number", torch.tensor(rank))
    return receives, gathered, channel.bytes_sent, channel.num_exchanges


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_one_call_exchanges_what_several_messages_would(world_size, calls):
    for rank, (receives, gathered, counted, num_exchanges) in enumerate(run_threads(world_size, exchange)):
        for peer in (peer for peer in range(world_size) if peer != rank):
            assert torch.equal(receives[peer], torch.full((rank + peer,), 10.0 * peer + rank))
        assert gathered.tolist() == list(range(world_size))
        numbers = sum(rank + peer for peer in range(world_size) if peer != rank)
        assert (counted["rows"], counted["number"], num_exchanges) == (4 * numbers, 8 * (world_size - 1), 2)
    exchanges = world_size if world_size > 1 else 0  # a rank alone exchanges nothing
    assert sorted(calls) == ["all_gather"] * world_size + ["all_to_all"] * exchanges


def test_integers_for_the_host_travel_from_host_memory(calls, monkeypatch):
    """In a group of their own, if the group of the channel cannot send from there: no rank waits for its GPU."""
    store = dist.HashStore()
    host_groups: list[dist.ProcessGroup] = []
    # Replaced once, for all ranks: they are threads.
    monkeypatch.setattr(
        all_to_all, "sends_from_device", lambda tensor, group: not any(group is each for each in host_groups)
    )

    def work(rank: int, group: dist.ProcessGroup) -> Any:
        host_group = thread_group(dist.PrefixStore("host", store), rank, 2, 60.0)
        host_groups.append(host_group)
        channel = Channel(group, host_group=host_group)
        return channel.gather_integers("sizes", [rank, -1]), dict(channel.bytes_sent)

    def alone(rank: int, group: dist.ProcessGroup) -> Any:
        return Channel(group).gather_integers("sizes", [rank, -1])

    for gathered, counted in run_threads(2, work):
        assert gathered == [[0, -1], [1, -1]]
        assert counted == {"sizes": 16}
    assert not calls
    assert run_threads(2, alone) == [[[0, -1], [1, -1]]] * 2
