"""The ground the other tests stand on."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankError, run_processes, run_threads


def test_threads_reduce_over_gloo():
    def sum_of_ranks(rank, group):
        value = torch.tensor([float(rank)])
        dist.all_reduce(value, group=group)
        return value.item()

    assert run_threads(3, sum_of_ranks) == [3.0, 3.0, 3.0]


def test_a_failing_thread_is_named():
    def fail_on_one(rank, group):
        if rank == 1:
            raise KeyError("lost")

    with pytest.raises(RankError, match=r"rank 1: Traceback(.|\n)*KeyError: 'lost'"):
        run_threads(2, fail_on_one)


def test_a_hanging_thread_is_shown():
    def wait_for_a_peer_that_never_sends(rank, group):
        if rank == 0:
            dist.recv(torch.zeros(1), group=group, group_src=1)

    with pytest.raises(RankError, match=r"rank 0: (.|\n)*wait_for_a_peer_that_never_sends"):
        run_threads(2, wait_for_a_peer_that_never_sends, timeout=1.0)


def sum_of_ranks(rank):
    dist.init_process_group("gloo")
    value = torch.tensor([float(rank)])
    dist.all_reduce(value)
    return value.item(), os.environ["GROUP_RANK"], os.getpid()


def test_processes_reduce_over_gloo():
    results = run_processes(4, sum_of_ranks, num_nodes=2)
    assert [result[:2] for result in results] == [(6.0, "0"), (6.0, "0"), (6.0, "1"), (6.0, "1")]
    for _, _, pid in results:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def fail_on_one(rank):
    if rank == 1:
        raise KeyError("lost")


def test_a_failing_process_is_named():
    with pytest.raises(RankError, match=r"rank 1: Traceback(.|\n)*KeyError: 'lost'"):
        run_processes(2, fail_on_one)


def die_on_one(rank):
    if rank == 1:
        os._exit(7)
    wait_forever(rank)


def wait_forever(rank):
    time.sleep(1000)


def test_a_dead_process_is_named_and_its_peer_is_stopped():
    with pytest.raises(RankError, match=r"rank 0: stopped after a peer failed(.|\n)*rank 1: died with exit code 7"):
        run_processes(2, die_on_one)


def test_a_hanging_process_is_shown_and_stopped():
    with pytest.raises(RankError, match=r"rank 0: not finished after 4.0 s(.|\n)*wait_forever"):
        run_processes(1, wait_forever, timeout=4.0)
