"""DeAR's order, the rival of layered SGD: what it sums, and in which order."""

from __future__ import annotations

import threading

import pytest
import support.dear as dear
import torch
from support.dear import RingHalves

from tests.ranks import run_threads

SIZES = [7, 1000, 2]  # of the buckets; the last one is smaller than the number of ranks


def gradients(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(size, dtype=torch.float64, generator=generator) for size in SIZES]


def reduce_buckets(rank: int, group) -> list[torch.Tensor]:
    buffers = gradients(rank)
    halves = RingHalves(group)
    sums = [halves.submit(index, buffer) for index, buffer in enumerate(buffers)]
    assert not any(each.has_arrived for each in sums)
    halves.release()
    for each in sums:
        each.wait()
    halves.close()
    return buffers


def test_the_two_halves_sum_over_all_ranks_bitwise_identically():
    summed = run_threads(3, reduce_buckets)
    for index, of_ranks in enumerate(zip(*map(gradients, range(3)), strict=True)):
        for rank in range(3):
            assert torch.equal(summed[rank][index], summed[0][index])
        torch.testing.assert_close(summed[0][index], sum(of_ranks), rtol=0, atol=1e-12)


class UnusedGroup:
    """Stands for a process group of two ranks, of which this is the first. No message is sent."""

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 0


@pytest.fixture
def halves(monkeypatch):
    monkeypatch.setattr(dear, "destroy_group", lambda group: None)
    halves = RingHalves(UnusedGroup())
    yield halves
    halves.close()


def test_gathers_begin_after_the_last_reduction_with_the_first_layers(halves, monkeypatch):
    ran = []
    monkeypatch.setattr(dear, "run_ring", lambda flat, group, **kwargs: ran.append((kwargs["num_copying"], len(flat))))
    sums = [halves.submit(index, torch.zeros(size)) for index, size in enumerate(SIZES)]
    halves.release()
    for each in sums:
        each.wait()
    assert ran == [(0, 7), (0, 1000), (0, 2), (1, 2), (1, 1000), (1, 7)]


def test_reductions_run_during_backward(halves, monkeypatch):
    reduced = threading.Event()
    monkeypatch.setattr(dear, "run_ring", lambda *args, **kwargs: reduced.set())
    pending = halves.submit(0, torch.zeros(4))
    assert reduced.wait(60.0)  # before `release`, which is called when backward has ended
    assert not pending.has_arrived


def test_a_failed_message_fails_every_bucket(halves, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError("the link is down")

    monkeypatch.setattr(dear, "run_ring", fail)
    sums = [halves.submit(index, torch.zeros(4)) for index in range(2)]
    halves.release()
    for index, each in enumerate(sums):
        with pytest.raises(RuntimeError, match=f"bucket {index} failed") as error:
            each.wait()
        assert "the link is down" in str(error.value.__cause__)
