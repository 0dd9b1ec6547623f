from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_dp.collectives.groups import RankTopology
from lightning_dp.collectives.hierarchical import HierarchicalAllReduce
from lightning_dp.strategies.layered_sgd.host_communicator import Communicator, HostCopy
from tests.ranks import RankError, run_processes

CPU = torch.device("cpu")


class Recorder:
    """In place of the hierarchical all-reduce: notes the order, and holds the first bucket until it is let go."""

    reduces_on_device = False

    def __init__(self) -> None:
        self.let_go = threading.Event()
        self.order: list[int] = []

    def intra_group_reduce(self, buffer):
        return []

    def inter_group_all_reduce(self, buffer):
        if not self.order:
            assert self.let_go.wait(10)
        self.order.append(int(buffer))
        buffer.mul_(10)

    def intra_group_broadcast(self, buffer):
        return []

    def describe(self, stage):
        return f"{stage} groups, between rank 0 and rank 1,"

    def close(self):
        pass


class Passing(Recorder):
    def __init__(self) -> None:
        super().__init__()
        self.let_go.set()


def carry(rank, prioritized, on_host):
    dist.init_process_group("gloo")
    recorder = Recorder()
    communicator = Communicator(recorder, prioritized, timedelta(seconds=20), CPU, on_host)
    buckets = [communicator.submit(i, torch.tensor(float(i))) for i in range(6)]
    if not prioritized:
        communicator.release()
    recorder.let_go.set()
    for bucket in buckets:
        bucket.wait()
    communicator.close()
    return recorder.order, [float(bucket.buffer) for bucket in buckets]


@pytest.mark.parametrize("on_host", [False, True])
def test_as_published_buckets_go_in_the_order_of_submission(on_host):
    orders = run_processes(2, carry, False, on_host)
    assert orders == [([0, 1, 2, 3, 4, 5], [0.0, 10.0, 20.0, 30.0, 40.0, 50.0])] * 2


@pytest.mark.parametrize("on_host", [False, True])
def test_layers_nearest_the_input_go_first_in_one_order_on_all_ranks(on_host):
    orders = run_processes(3, carry, True, on_host)
    assert orders[1] == orders[0]
    assert orders[2] == orders[0]
    order = orders[0][0]
    # Rank 0 may have chosen the first two before the others were there: the second during the first one's sum, which
    # waits for them only then. The rest is by priority.
    assert order[2:] == sorted(order[2:], reverse=True)


def count_choices(rank):
    dist.init_process_group("gloo")
    made = []
    choose = Communicator._choose
    Communicator._choose = lambda self, group: made.append(1) or choose(self, group)
    communicator = Communicator(Passing(), True, timedelta(seconds=20), CPU)
    counts = []
    for index in (0, 1, 0):
        communicator.submit(index, torch.tensor(0.0)).wait()
        counts.append(len(made))
    communicator.close()
    return counts


def test_ranks_do_not_ask_which_bucket_is_the_first_of_a_backward():
    # Each bucket asks for the next one, of which there is none yet. So bucket 1 has to ask, too; bucket 0 has not.
    assert run_processes(2, count_choices) == [[1, 3, 4]] * 2


@pytest.mark.parametrize("on_host", [False, True])
def test_a_failure_reaches_everyone_who_waits_and_later_callers(on_host):
    class Broken(Recorder):
        def inter_group_all_reduce(self, buffer):
            raise RuntimeError("Connection closed by peer")

    communicator = Communicator(Broken(), False, timedelta(seconds=20), CPU, on_host)
    buckets = [communicator.submit(i, torch.tensor(0.0)) for i in range(2)]
    communicator.release()
    later = communicator.submit(2, torch.tensor(0.0))
    communicator.release()
    for bucket in (*buckets, later):
        message = "bucket 0, between groups, between rank 0 and rank 1, failed: .*Connection closed by peer"
        with pytest.raises(RuntimeError, match=message):
            bucket.wait()
        assert bucket.buffer == 0
    communicator.close()


# --- on copies in host memory ---

SIZES = (7, 1, 10, 4099)  # no group size divides the first
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def values(rank):
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(size, dtype=torch.float64, generator=generator).to(dtype) for dtype in DTYPES for size in SIZES]


def carry_all(rank, carriers, prioritized, on_host):
    topology, timeout = RankTopology(4, 2), timedelta(seconds=20)
    collective = HierarchicalAllReduce(topology, rank, carriers, timeout, "gloo")
    communicator = Communicator(collective, prioritized, timeout, CPU, on_host)
    own = values(rank)
    buckets = [communicator.submit(index, buffer.clone()) for index, buffer in enumerate(own)]
    communicator.release()
    for bucket, value in zip(buckets, own, strict=True):
        assert not on_host or torch.equal(bucket.buffer, value), "the buffer was changed before somebody waited for it"
        bucket.wait()
    communicator.close()
    return [bucket.buffer for bucket in buckets]


def compare_copies(rank):
    dist.init_process_group("gloo")
    for carriers in ("leader", "sharded"):
        expected = carry_all(rank, carriers, False, False)
        for prioritized in (False, True):
            got = carry_all(rank, carriers, prioritized, True)
            assert all(map(torch.equal, got, expected)), f"{carriers}, {prioritized}"
    return got


@pytest.mark.ci
def test_sums_of_copies_are_to_the_bit_those_of_the_buffers():
    oracle = [sum(each) for each in zip(*([v.double() for v in values(rank)] for rank in range(4)), strict=True)]
    for got in run_processes(4, compare_copies):
        for sum_, exact in zip(got, oracle, strict=True):
            epsilon = torch.finfo(sum_.dtype).eps
            torch.testing.assert_close(sum_.double(), exact, rtol=4 * epsilon, atol=8 * epsilon)


def lose_the_copy(rank):
    HostCopy.copy_back = lambda self: None
    compare_copies(rank)


@pytest.mark.ci
def test_sums_of_copies_differ_if_they_do_not_come_back():
    with pytest.raises(RankError, match="leader, False"):
        run_processes(4, lose_the_copy)


def test_a_sum_comes_back_once_so_that_what_is_done_to_it_stays():
    communicator = Communicator(Passing(), False, timedelta(seconds=20), CPU, on_host=True)
    bucket = communicator.submit(0, torch.tensor(3.0))
    communicator.release()
    bucket.wait()
    assert bucket.buffer == 30
    bucket.buffer.fill_(1)  # clipped, say
    bucket.wait()
    assert bucket.buffer == 1
    communicator.close()


def test_two_threads_may_wait_for_one_bucket():
    """A callback may use a parameter in a thread of its own, while the training thread waits for the gradients."""
    others: list[threading.Thread] = []

    class Broadcast:
        """While the first thread waits for it, a second one comes."""

        def wait(self):
            if not others:
                others.append(threading.Thread(target=bucket.wait))
                others[0].start()
                others[0].join(0.2)  # ends if nobody holds it up

        def get_future(self):
            return torch.futures.Future()

    class Broadcasting(Passing):
        def intra_group_broadcast(self, buffer):
            return [Broadcast()]

    communicator = Communicator(Broadcasting(), False, timedelta(seconds=20), CPU, on_host=True)
    bucket = communicator.submit(0, torch.tensor(3.0))
    communicator.release()
    bucket.wait()
    others[0].join(10)
    assert bucket.buffer == 30
    communicator.close()


class NoCollective:
    """In place of the hierarchical all-reduce of a single rank."""

    def intra_group_reduce(self, buffer: torch.Tensor) -> list[Any]:
        return []

    def close(self) -> None: ...


def test_a_thread_that_ends_fails_what_waits_for_it(monkeypatch):
    def end_at_once(self, proposal):
        with self._changed:
            self._changed.wait_for(lambda: self._ready)
        raise SystemExit("ended")

    monkeypatch.setattr(Communicator, "_next", end_at_once)
    communicator = Communicator(NoCollective(), False, timedelta(seconds=600), torch.device("cpu"))
    bucket = communicator.submit(0, torch.ones(3))
    with pytest.raises(RuntimeError, match="ended"):
        bucket.wait()
    later = communicator.submit(1, torch.ones(3))
    with pytest.raises(RuntimeError, match="ended"):
        later.wait()
    communicator.close()
