from __future__ import annotations

import pytest
import torch

from lightning_dp.collectives.all_to_all import Channel
from tests.collectives.counting import count_messages
from tests.ranks import run_threads


def exchange(rank, group):
    """Rank r sends r + p numbers to rank p, so that sizes differ and one message is empty."""
    records = []
    channel = Channel(group, lambda *stage: records.append(stage))
    world_size = group.size()
    sends = [torch.full((rank + peer,), 10.0 * rank + peer) for peer in range(world_size)]
    receives = [torch.empty(rank + peer) for peer in range(world_size)]
    both = (
        channel.all_to_all("rows", sends, receives),
        channel.all_to_all("again", sends, [r.clone() for r in receives]),
    )
    for one in both:
        one.wait()
    gathered = channel.all_gather("number", torch.tensor([rank, 7]))
    return receives, gathered, channel.bytes_sent, channel.waited_s, records


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_every_rank_receives_what_each_other_rank_sends(world_size, monkeypatch):
    sent = count_messages(monkeypatch)
    for rank, (receives, gathered, counted, waited_s, records) in enumerate(run_threads(world_size, exchange)):
        for peer in (peer for peer in range(world_size) if peer != rank):
            assert torch.equal(receives[peer], torch.full((rank + peer,), 10.0 * peer + rank))
        assert gathered.tolist() == [[peer, 7] for peer in range(world_size)]
        numbers = sum(rank + peer for peer in range(world_size) if peer != rank)
        assert counted == {"rows": 4 * numbers, "again": 4 * numbers, "number": 16 * (world_size - 1)}
        assert sum(counted.values()) == sum(message.num_bytes for message in sent[rank])
        assert waited_s == pytest.approx(sum(end - start for name, start, end in records if name.startswith("wait")))
        assert [name for name, _, _ in records][::2] == ["rows", "again", "number"]


def columns(rank, group):
    matrix = torch.arange(12.0).reshape(3, 4).T + 100 * rank  # not contiguous
    received = [torch.empty(4, 3) for _ in range(group.size())]
    Channel(group).all_to_all("columns", [matrix] * group.size(), received).wait()
    return received[1 - rank]


def test_tensors_that_are_not_contiguous_can_be_sent():
    for rank, received in enumerate(run_threads(2, columns)):
        assert torch.equal(received, torch.arange(12.0).reshape(3, 4).T + 100 * (1 - rank))
