"""Threads that sum gradients have a lower priority than the training thread, and nobody else has."""

from __future__ import annotations

import logging
import os
import sys
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_dp.collectives import streams
from lightning_dp.collectives.groups import RankTopology
from lightning_dp.strategies.layered_sgd import host_communicator
from lightning_dp.strategies.layered_sgd.host_communicator import NICE_STEPS, with_background_threads
from lightning_dp.strategies.layered_sgd.options import CommunicatorOptions
from tests.ranks import run_processes

CPU = torch.device("cpu")
on_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="threads have no priorities of their own")


def priority(thread: int) -> int:
    return os.getpriority(os.PRIO_PROCESS, thread)


def own_priority() -> int:
    return priority(threading.get_native_id())


def lower(before: int) -> int:
    return min(19, before + NICE_STEPS)  # Linux has no lower one than 19


def in_new_thread(function):
    seen = []
    thread = threading.Thread(target=lambda: seen.append(function()))
    thread.start()
    thread.join()
    return seen[0]


@on_linux
def test_threads_that_are_started_have_a_lower_priority_and_the_caller_has_its_own():
    before = own_priority()
    inside = with_background_threads(lambda: (own_priority(), in_new_thread(own_priority)), CPU)
    assert inside == (lower(before),) * 2
    assert (own_priority(), in_new_thread(own_priority)) == (before, before)


def test_an_exception_is_raised_in_the_caller():
    with pytest.raises(ValueError, match="of the caller"):
        with_background_threads(lambda: (_ for _ in ()).throw(ValueError("of the caller")), CPU)


@on_linux
def test_where_the_system_forbids_it_all_goes_on_and_the_log_says_so(monkeypatch, caplog):
    def forbidden(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "setpriority", forbidden)
    with caplog.at_level(logging.INFO, "lightning_dp"):
        assert with_background_threads(lambda: 7, CPU) == 7
    assert "keep the priority of the training thread: [Errno 1] Operation not permitted" in caplog.text


def test_elsewhere_than_on_linux_there_is_no_thread(monkeypatch):
    monkeypatch.setattr(host_communicator.sys, "platform", "darwin")
    assert with_background_threads(threading.get_ident, CPU) == threading.get_ident()


@on_linux
def test_the_thread_is_on_the_device_of_the_rank(monkeypatch):
    """A new thread is on device 0. There, what it makes would take memory of that GPU, on every rank of the node."""
    chosen = []
    monkeypatch.setattr(streams, "set_device", lambda device: chosen.append((device, threading.get_ident())))
    seen = with_background_threads(threading.get_ident, torch.device("cuda", 3))
    assert chosen == [(torch.device("cuda", 3), seen)]


def priorities_of_communicator(rank, compression):
    dist.init_process_group("gloo")
    before = set(os.listdir("/proc/self/task"))
    options = CommunicatorOptions("leader", "step", "native", "auto", compression)
    module = nn.Linear(8, 8)
    topology = RankTopology(2, 1)
    communicator = options.make_communicator(
        topology, rank, CPU, "gloo", timedelta(seconds=60), lambda *_: None, module, False, "test"
    )
    bucket = torch.full((72,), float(rank + 1))
    communicator.submit(0, bucket, list(module.parameters())).wait()
    assert bucket.sum() == 3 * 72
    started = {
        Path(f"/proc/self/task/{thread}/comm").read_text().strip(): priority(int(thread))
        for thread in set(os.listdir("/proc/self/task")) - before
    }
    communicator.close()
    dist.destroy_process_group()
    return started, own_priority()


@on_linux
@pytest.mark.parametrize("compression", [None, "bf16"])
def test_all_threads_that_sum_give_way_to_the_training_thread(compression):
    for started, own in run_processes(2, priorities_of_communicator, compression):
        # Older versions of torch do not name gloo's threads.
        assert any("gloo" in name for name in started) or torch.__version__ < "2.13"
        assert set(started.values()) == {lower(own)}
