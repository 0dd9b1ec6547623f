"""Ranks that make different calls and ranks that die: an error on every rank, and no hang."""

from __future__ import annotations

import os
import re
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from lightning_dp.collectives import PeerError, ring_all_gather, ring_all_reduce, ring_reduce_scatter, star_all_reduce
from lightning_dp.collectives import ring as ring_module
from lightning_dp.collectives.groups import exclusive_use
from lightning_dp.collectives.point_to_point import Transfer, naming_backend_errors, post
from lightning_dp.collectives.small_all_gather import small_all_gather
from tests.ranks import run_processes, run_threads, thread_group

ODD_CALLS = {
    "size": lambda group: ring_all_reduce(torch.ones(5), group),
    "empty": lambda group: ring_all_reduce(torch.ones(0), group),
    "dtype": lambda group: ring_all_reduce(torch.ones(4, dtype=torch.int32), group),
    "mean of integers": lambda group: ring_all_reduce(torch.ones(4, dtype=torch.int32), group, "mean"),
    "op": lambda group: ring_all_reduce(torch.ones(4), group, "mean"),
    "wire": lambda group: ring_all_reduce(torch.ones(4), group, wire_dtype=torch.bfloat16),
    "segments": lambda group: ring_all_reduce(torch.ones(4), group, segment_bytes=1),
    "half": lambda group: ring_reduce_scatter(torch.ones(4), group),
    "other half": lambda group: ring_all_gather(torch.ones(4), group),
    "star": lambda group: star_all_reduce(torch.ones(4), group),
}


def disagree(rank, group):
    messages = {}
    for name, odd_call in ODD_CALLS.items():
        with pytest.raises(ValueError, match="do not make the same call") as caught:
            odd_call(group) if rank == 2 else ring_all_reduce(torch.ones(4), group)
        messages[name] = str(caught.value)
    # The group can still be used.
    assert ring_all_reduce(torch.ones(4), group).tolist() == [5.0] * 4
    return messages


def test_ranks_that_disagree_all_raise_and_can_continue():
    results = run_threads(5, disagree)
    assert results == [results[0]] * 5
    assert re.search(r"rank 0, 1, 3, 4: .* 4 elements of torch.float32", results[0]["size"])
    assert re.search(r"rank 2: .* 5 elements of torch.float32", results[0]["size"])


def unfit(rank, group):
    integers, floats = torch.ones(4, dtype=torch.int32), torch.ones(4)
    with pytest.raises(ValueError, match=r"the mean of torch.int32 is not defined; sum and divide"):
        ring_all_reduce(integers, group, "mean")
    with pytest.raises(ValueError, match=r"op='max' is not known; use one of sum, mean"):
        ring_all_reduce(floats, group, "max")
    with pytest.raises(ValueError, match=r"wire_dtype=torch.float16 for a tensor of torch.int32"):
        ring_all_reduce(integers, group, wire_dtype=torch.float16)
    with pytest.raises(ValueError, match=r"wire_dtype=torch.int8 for a tensor of torch.float32"):
        ring_all_reduce(floats, group, wire_dtype=torch.int8)
    with pytest.raises(ValueError, match="segment_bytes=0 is not positive"):
        ring_all_gather(floats, group, segment_bytes=0)
    with pytest.raises(ValueError, match="is not dense"):
        ring_all_reduce(torch.eye(3).to_sparse(), group)


def test_invalid_arguments_are_refused():
    run_threads(2, unfit)


class TwoThreads:
    """Rank 0 calls ``collective`` from a second thread while the first one is using the group."""

    def __init__(self, collective) -> None:
        self.collective = collective
        self.second_was_refused = threading.Event()

    def __call__(self, rank, group):
        small_all_gather(torch.ones(1), group)  # connects the sockets, which later calls use
        if rank == 1:
            assert self.second_was_refused.wait(20)
            return self.collective(torch.ones(4), group).sum().item()
        refused = pytest.raises(RuntimeError, match="another thread is using this process group.*new_group")
        with exclusive_use(group, "first call"), ThreadPoolExecutor(1) as second_thread, refused:
            second_thread.submit(self.collective, torch.ones(4), group).result()
        self.second_was_refused.set()
        return self.collective(torch.ones(4), group).sum().item()


@pytest.mark.parametrize(
    ("collective", "total"),
    [(ring_all_reduce, 8), (ring_reduce_scatter, 4), (ring_all_gather, 4), (star_all_reduce, 8), (small_all_gather, 8)],
)
def test_a_second_thread_on_a_group_is_refused(collective, total):
    assert run_threads(2, TwoThreads(collective)) == [total] * 2


WORLD_SIZE, GONE = 4, 2


class Scene:
    """Four ranks, of which one stops. The groups of the others stay open until all have noticed."""

    def __init__(self, timeout: float) -> None:
        self.store, self.timeout = dist.HashStore(), timeout
        self.all_saw = threading.Barrier(WORLD_SIZE - 1)
        self.may_go = threading.Event()

    def group(self, rank: int) -> dist.ProcessGroup:
        return thread_group(self.store, rank, WORLD_SIZE, self.timeout)

    def survive(self, group: dist.ProcessGroup, collective) -> PeerError:
        with pytest.raises(PeerError) as caught:
            collective(torch.ones(100_000), group)
        self.all_saw.wait(20)
        self.may_go.set()
        return caught.value


def dead(rank, _, scene, collective):
    group = scene.group(rank)
    if rank == GONE:
        return None  # its connections are closed
    return scene.survive(group, collective)


def silent(rank, _, scene, collective):
    group = scene.group(rank)
    if rank == GONE:
        scene.may_go.wait(20)
        return None
    return scene.survive(group, collective)


@pytest.mark.ci
@pytest.mark.parametrize("collective", [ring_all_reduce, star_all_reduce])
@pytest.mark.parametrize(("way", "timeout"), [(dead, 20.0), (silent, 2.0)])
def test_all_ranks_name_a_rank_that_is_dead_or_silent(way, timeout, collective):
    errors = run_threads(WORLD_SIZE, way, Scene(timeout), collective)
    for rank, error in enumerate(errors):
        if rank != GONE:
            assert error.group_rank == GONE
            assert re.match(rf"rank {rank} could not (send to|receive from) rank 2 of the group: ", str(error))


def send_beside_a_dead_rank(rank, _, scene):
    group = scene.group(rank)
    if rank == GONE:
        return None  # its connections are closed
    if rank == 0:
        received = torch.zeros(1)
        post(group, [(received, 1)], [])[0][0].wait()
        return received.item()
    if rank == 1:
        with pytest.raises(PeerError):
            post(group, [(torch.zeros(1), GONE)], [])[0][0].wait()
        # The connection is known to be closed now, so this message fails at its start.
        (dead_one,), (living_one,) = post(group, [(torch.zeros(1), GONE)], [(torch.ones(1), 0)])
        living_one.wait()
        with pytest.raises(PeerError, match="rank 1 could not receive from rank 2"):
            dead_one.wait()
    return None


def test_a_message_that_cannot_be_started_does_not_keep_another_back():
    assert run_threads(WORLD_SIZE, send_beside_a_dead_rank, Scene(20.0))[0] == 1


@pytest.mark.ci
def test_the_neighbors_name_a_rank_that_stops_half_way(monkeypatch):
    run_ring = ring_module.run_ring

    def leave(flat, group, **kwargs):
        return None if group.rank() == GONE else run_ring(flat, group, **kwargs)

    monkeypatch.setattr(ring_module, "run_ring", leave)

    def half_way(rank, _, scene):
        group = scene.group(rank)
        if rank == GONE:
            ring_all_reduce(torch.ones(100_000), group)  # makes the same call, but sends no data
            scene.may_go.wait(20)
            return None
        return scene.survive(group, ring_all_reduce)

    errors = run_threads(WORLD_SIZE, half_way, Scene(2.0))
    # The rank on the other side of the ring can only see that its neighbor does not send.
    assert [error and error.group_rank for error in errors] == [3, 2, None, 2]


def killed(rank):
    if rank == 2 and (child := os.fork()):
        # The child acts as the rank, so that its death does not fail this process.
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    dist.init_process_group("gloo")
    group = dist.new_group([1, 2])
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        with pytest.raises(PeerError) as caught:
            ring_all_reduce(torch.ones(10), group)
        return str(caught.value)
    return None


def test_the_error_gives_the_global_rank_of_a_killed_process():
    _, said, exit_code = run_processes(3, killed)
    assert exit_code == -signal.SIGKILL
    assert "rank 1 of the group (global rank 2)" in said


def test_an_error_of_a_signal_handler_is_not_taken_for_one_of_the_peer():
    """The loader's handler raises in the middle of a wait when a worker has died."""

    def wait_for_the_peer():
        signal.raise_signal(signal.SIGUSR1)

    def handler(number, frame):
        raise RuntimeError("DataLoader worker is killed")

    class Work:
        wait = staticmethod(wait_for_the_peer)

    transfer = Transfer(dist.group.WORLD, "receive from", (torch.zeros(1), 1), [Work()])
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(RuntimeError, match=r"^DataLoader worker is killed") as caught:
            transfer.wait()
        assert not isinstance(caught.value, PeerError)
        with pytest.raises(RuntimeError, match=r"^DataLoader worker is killed"), naming_backend_errors(lambda: "it"):
            wait_for_the_peer()
    finally:
        signal.signal(signal.SIGUSR1, before)
