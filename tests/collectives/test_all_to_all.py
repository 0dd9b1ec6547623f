from __future__ import annotations

from collections import defaultdict

import pytest
import torch
import torch.distributed as dist

from lightning_dp.collectives.all_to_all import HEADER_BYTES, INLINE_BYTES, CallMismatchError, Channel
from tests.ranks import run_processes, run_threads


def count_bytes(monkeypatch):
    """Rank in its group -> the sizes of the messages that it sends from now on, in order."""
    sent = defaultdict(list)
    original = dist.isend

    def isend(tensor, **options):
        sent[options["group"].rank()].append(tensor.nbytes)
        return original(tensor, **options)

    monkeypatch.setattr(dist, "isend", isend)
    return sent


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
    sent = count_bytes(monkeypatch)
    for rank, (receives, gathered, counted, waited_s, records) in enumerate(run_threads(world_size, exchange)):
        for peer in (peer for peer in range(world_size) if peer != rank):
            assert torch.equal(receives[peer], torch.full((rank + peer,), 10.0 * peer + rank))
        assert gathered.tolist() == [[peer, 7] for peer in range(world_size)]
        numbers = sum(rank + peer for peer in range(world_size) if peer != rank)
        assert counted == {"rows": 4 * numbers, "again": 4 * numbers, "number": 16 * (world_size - 1)}
        assert sum(counted.values()) == sum(sent[rank]) - HEADER_BYTES * len(sent[rank])  # one message, with its header
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


def one_element(rank, group):
    """A contiguous tensor of one element may have any strides."""
    sends = [torch.empty_strided((1, 1), (3, 5)).fill_(rank) for _ in range(2)]
    receives = [torch.empty_strided((1, 1), (3, 5)) for _ in range(2)]
    Channel(group).all_to_all("element", sends, receives).wait()
    return receives[1 - rank].item()


def test_a_single_element_with_strides_can_be_sent():
    assert run_threads(2, one_element) == [1, 0]


def large_and_small(rank, group):
    """A payload that fits behind its header, and one that does not, in flight together."""
    channel = Channel(group)
    sizes = [INLINE_BYTES, INLINE_BYTES + 1]
    sends = [torch.full((size,), 10 + rank, dtype=torch.uint8) for size in sizes]
    receives = [[torch.empty(size, dtype=torch.uint8) for _ in range(2)] for size in sizes]
    exchanges = [channel.all_to_all("bytes", [s, s], r) for s, r in zip(sends, receives, strict=True)]
    for exchange in exchanges:
        exchange.wait()
    return [of_peers[1 - rank].unique().tolist() for of_peers in receives]


def test_a_large_payload_is_one_more_message(monkeypatch):
    sent = count_bytes(monkeypatch)
    for rank, received in enumerate(run_threads(2, large_and_small)):
        assert received == [[10 + 1 - rank], [10 + 1 - rank]]
        assert sent[rank] == [HEADER_BYTES + INLINE_BYTES, HEADER_BYTES, INLINE_BYTES + 1]


MISMATCHES = {
    "another name": [("features", 400), ("loss", 400)],
    "a shorter message": [("features", 400), ("features", 396)],
    "a longer message": [("features", 400), ("features", 404)],
    "a much shorter message": [("features", 40000), ("features", 400)],
    "a much longer message": [("features", 400), ("features", 40000)],
    "other large messages": [("features", 40000), ("logits", 40004)],
}


def mismatched(rank, what, num_bytes):
    dist.init_process_group("gloo")
    received = [torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(2)]
    exchange = Channel(dist.group.WORLD).all_to_all(what, [torch.ones(num_bytes, dtype=torch.uint8)] * 2, received)
    with pytest.raises(CallMismatchError) as error:
        exchange.wait()
    assert not received[1 - rank].any()
    return str(error.value)


def _mismatched(rank, calls):
    return mismatched(rank, *calls[rank])


@pytest.mark.parametrize("case", MISMATCHES)
def test_ranks_in_different_exchanges_are_told_so_by_name(case):
    calls = MISMATCHES[case]
    for rank, text in enumerate(run_processes(2, _mismatched, calls)):
        for index, (what, num_bytes) in ((rank, calls[rank]), (1 - rank, calls[1 - rank])):
            assert f"rank {index}" in text
            assert f"exchange 0, {what!r} ({num_bytes} bytes)" in text


def other_order(rank, group):
    channel = Channel(group)
    with pytest.raises(CallMismatchError, match=r"exchange 0, '(first|second)'.*exchange 0, '(first|second)'"):
        channel.all_gather(["first", "second"][rank], torch.ones(3))


def test_the_same_exchanges_in_another_order_are_refused():
    run_threads(2, other_order)
