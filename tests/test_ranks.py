"""The helpers that run a test on several ranks."""

from __future__ import annotations

import os
import threading
import time
import warnings

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


def test_the_stack_of_a_hanging_thread_is_shown():
    release = threading.Event()

    def wait_for_an_event(rank, group):
        if rank == 0:
            release.wait()

    with pytest.raises(RankError, match=r"rank 0: not finished after 0.1 s(.|\n)*wait_for_an_event"):
        run_threads(2, wait_for_an_event, timeout=0.1)
    release.set()


def test_no_thread_goes_on_before_all_have_built_the_group(monkeypatch):
    """One that finished sooner would close connections that its peers are still opening."""
    build, built = dist.ProcessGroupGloo, []

    class SlowOnOne(build):
        def __new__(cls, store, rank, *args):
            group = build(store, rank, *args)
            if rank == 1:
                time.sleep(0.2)
            built.append(rank)
            return group

    monkeypatch.setattr(dist, "ProcessGroupGloo", SlowOnOne)
    assert run_threads(2, lambda rank, group: len(built)) == [2, 2]


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
        run_processes(2, die_on_one, grace=0)


def fail_after_a_peer(rank):
    dist.init_process_group("gloo")
    if rank == 1:
        os._exit(7)
    dist.all_reduce(torch.zeros(1))


def test_the_peers_of_a_dead_process_have_time_to_say_what_they_saw():
    with pytest.raises(RankError, match=r"rank 0: Traceback(.|\n)*all_reduce(.|\n)*rank 1: died with exit code 7"):
        run_processes(2, fail_after_a_peer)


def test_a_hanging_process_is_shown_and_stopped():
    with pytest.raises(RankError, match=r"rank 0: not finished after 0.1 s(.|\n)*wait_forever"):
        run_processes(1, wait_forever, timeout=0.1)


def warn(rank):
    warnings.warn("that is old", DeprecationWarning, stacklevel=1)


def test_warnings_are_errors_in_a_process_too():
    with pytest.raises(RankError, match="DeprecationWarning: that is old"):
        run_processes(1, warn)


@pytest.mark.filterwarnings("ignore:that is old")
def test_a_process_ignores_the_warnings_that_the_test_ignores():
    run_processes(1, warn)
