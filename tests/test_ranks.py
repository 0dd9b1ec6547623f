"""The helpers that run a test on several ranks."""

from __future__ import annotations

import os
import threading
import time
import warnings

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankError, run_cases, run_processes, run_threads


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


IMPORTED_BY = os.getpid()


def spoil(rank):
    """Change what only a new process has as it was."""
    assert not hasattr(dist, "spoiled")
    assert "SPOILED" not in os.environ
    dist.spoiled, os.environ["SPOILED"] = True, "1"
    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
    return os.getpid() == IMPORTED_BY


def test_each_call_has_new_processes_and_the_server_has_imported_the_test():
    for _ in range(2):
        assert run_processes(2, spoil) == [torch.cuda.is_available()] * 2


def fail_in_two_cases(rank, case, folder):
    """Rank 1 fails in one case, both ranks in another."""
    (folder / f"{case} {rank}").write_text(str(os.getpid()))
    if case == "second" and rank == 1:
        raise KeyError("lost")
    if case == "third":
        raise ValueError("bad")


def test_cases_share_processes_and_each_that_fails_is_named(tmp_path):
    with pytest.raises(RankError) as caught:
        run_cases(2, fail_in_two_cases, ["first", "second", "third", "fourth", "fifth"], tmp_path)
    message = str(caught.value)
    named = [name for name in ("first", "second", "third", "fourth", "fifth") if f"case {name!r}: rank" in message]
    assert named == ["second", "third"]
    assert "KeyError: 'lost'" in message
    assert "ValueError: bad" in message
    pids = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert pids["first 1"] == pids["second 1"] != pids["third 1"]
    assert pids["fourth 0"] == pids["fifth 0"]


def die_in_case(rank, case):
    os._exit(7)


def test_a_death_in_a_case_is_reported():
    with pytest.raises(RankError, match="died with exit code 7"):
        run_cases(1, die_in_case, ["only"])


def print_and_die(rank):
    print("on the output", flush=True)
    os.write(2, b"on the error output")
    os._exit(7)


def test_what_a_dead_process_has_printed_is_in_its_error():
    with pytest.raises(RankError, match=r"exit code 7\non the output\non the error output"):
        run_processes(1, print_and_die)
