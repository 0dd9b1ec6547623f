"""Sums whose last messages are under way while the next one begins, as with compression."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from lightning_dp.strategies.layered_sgd.host_communicator import BucketReduction, Communicator, Stage
from tests.ranks import run_processes
from tests.strategies.layered_sgd.test_communicator import CPU, Passing


class Overlapping(Passing):
    """Begins a sum and leaves the rest to do, as a compressed all-reduce does; ``arrived[k]`` ends that of bucket k."""

    def __init__(self, num_buckets=3) -> None:
        super().__init__()
        self.arrived = [threading.Event() for _ in range(num_buckets)]
        self.begun = [threading.Event() for _ in range(num_buckets)]

    def let_all_arrive(self):
        for event in self.arrived:
            event.set()

    def inter_group_all_reduce(self, buffer):
        self.begun[int(buffer)].set()
        return self._rest(buffer)

    def _rest(self, buffer):
        assert self.arrived[int(buffer)].wait(10)
        buffer.mul_(10)
        return
        yield


class Announced:
    """A collective inside the group that ends when ``event`` is set."""

    def __init__(self, event):
        self._event = event

    def wait(self):
        assert self._event.wait(10), "waited for what cannot come"


def overlapping(collective, prioritized=False, num_buckets=3):
    """A communicator with the two threads of a compressed one, and the first buckets."""
    communicator = Communicator(collective, prioritized, timedelta(seconds=20), CPU, compressed=Compressed(collective))
    return communicator, [communicator.submit(i, torch.tensor(float(i))) for i in range(num_buckets)]


class Compressed:
    def __init__(self, collective):
        self.stages_of = lambda parameters: collective


def test_a_sum_begins_while_the_last_messages_of_the_one_before_are_under_way_but_not_two():
    collective = Overlapping()
    communicator, buckets = overlapping(collective)
    communicator.release()
    assert collective.begun[1].wait(10)
    assert not collective.begun[2].wait(0.1), "what the next forward needs first would have to wait"
    collective.arrived[0].set()
    assert collective.begun[2].wait(10)
    collective.let_all_arrive()
    for bucket in buckets:
        bucket.wait()
    communicator.close()
    assert [float(bucket.buffer) for bucket in buckets] == [0.0, 10.0, 20.0]


def test_a_sum_does_not_wait_for_the_next_bucket():
    # A hook that reads a gradient in backward waits for bucket 0, and only then bucket 1 is filled on that member.
    read = threading.Event()

    class FilledLate(Overlapping):
        def intra_group_reduce(self, buffer):
            return [Announced(read)] if int(buffer) == 1 else []

    collective = FilledLate()
    collective.let_all_arrive()
    communicator, (first, second, *_) = overlapping(collective)
    communicator.release()
    first.wait()
    read.set()
    second.wait()
    communicator.close()


def read_in_backward(rank):
    dist.init_process_group("gloo")
    collective = Overlapping()
    collective.let_all_arrive()
    communicator, _ = overlapping(collective, True, 0)
    first = communicator.submit(2, torch.tensor(2.0))
    if rank == 1:
        first.wait()  # meanwhile rank 0 asks all ranks which bucket is next
    second = communicator.submit(1, torch.tensor(1.0))
    first.wait()
    second.wait()
    communicator.close()


def test_a_gradient_that_is_read_in_backward_does_not_wait_for_a_bucket_that_is_not_filled():
    run_processes(2, read_in_backward)


@pytest.mark.parametrize("broken", ["inter_group_all_reduce", "_rest"])
def test_a_failure_reaches_all_sums_that_are_under_way(broken):
    class Broken(Overlapping):
        def inter_group_all_reduce(self, buffer):
            if broken == "inter_group_all_reduce" and int(buffer) == 1:
                raise RuntimeError("Connection closed by peer")
            return super().inter_group_all_reduce(buffer)

        def _rest(self, buffer):
            assert self.begun[0].wait(10)
            if broken == "_rest":
                raise RuntimeError("Connection closed by peer")
            assert self.arrived[0].wait(10)
            return
            yield

    collective = Broken()
    communicator, buckets = overlapping(collective)
    communicator.release()
    index = 1 if broken == "inter_group_all_reduce" else 0
    for bucket in buckets:
        with pytest.raises(RuntimeError, match=f"bucket {index}, .*Connection closed by peer"):
            bucket.wait()
    collective.let_all_arrive()
    communicator.close()


def test_a_failure_elsewhere_does_not_reach_a_sum_that_has_settled():
    # One thread may fail what it takes for unfinished while the other settles it, and somebody waits already.
    bucket = BucketReduction(0, torch.tensor(3.0), Passing())
    bucket.reduce_intra_group()
    bucket.reduce_inter_group()
    bucket.settle()
    bucket.fail(RuntimeError("Connection closed by peer"))
    bucket.wait()
    assert bucket.stage is Stage.DELIVERED
    assert bucket.buffer == 30.0
