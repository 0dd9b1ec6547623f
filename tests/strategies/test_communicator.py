from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from lightning_dp.strategies.communicator import Communicator
from tests.ranks import run_processes


class Recorder:
    """In place of the two-level all-reduce: notes the order, and holds the first bucket until it is let go."""

    def __init__(self) -> None:
        self.let_go = threading.Event()
        self.order: list[int] = []

    def reduce_inside(self, buffer):
        return []

    def all_reduce_between(self, buffer):
        if not self.order:
            assert self.let_go.wait(10)
        self.order.append(int(buffer))
        buffer.mul_(10)

    def broadcast_inside(self, buffer):
        return []

    def describe(self, stage):
        return f"{stage} groups, between rank 0 and rank 1,"

    def close(self):
        pass


def carry(rank, prioritised):
    dist.init_process_group("gloo")
    recorder = Recorder()
    communicator = Communicator(recorder, prioritised, timedelta(seconds=20), torch.device("cpu"))
    buckets = [communicator.submit(i, torch.tensor(float(i))) for i in range(4)]
    if not prioritised:
        communicator.release()
    recorder.let_go.set()
    for bucket in buckets:
        bucket.wait()
    communicator.close()
    return recorder.order, [float(bucket.buffer) for bucket in buckets]


def test_as_published_buckets_go_in_the_order_of_submission():
    orders = run_processes(2, carry, False)
    assert orders == [([0, 1, 2, 3], [0.0, 10.0, 20.0, 30.0])] * 2


def test_layers_nearest_the_input_go_first_in_one_order_on_all_ranks():
    orders = run_processes(3, carry, True)
    assert orders[1] == orders[0]
    assert orders[2] == orders[0]
    order = orders[0][0]
    # The thread may have taken any of the first ones before the others were there; the rest is by priority.
    assert order[1:] == sorted(order[1:], reverse=True)


def test_a_failure_reaches_everyone_who_waits_and_whoever_comes_later():
    class Broken(Recorder):
        def all_reduce_between(self, buffer):
            raise RuntimeError("Connection closed by peer")

    communicator = Communicator(Broken(), False, timedelta(seconds=20), torch.device("cpu"))
    buckets = [communicator.submit(i, torch.tensor(0.0)) for i in range(2)]
    communicator.release()
    later = communicator.submit(2, torch.tensor(0.0))
    communicator.release()
    for bucket in (*buckets, later):
        message = "bucket 0, between groups, between rank 0 and rank 1, failed: .*Connection closed by peer"
        with pytest.raises(RuntimeError, match=message):
            bucket.wait()
    communicator.close()
