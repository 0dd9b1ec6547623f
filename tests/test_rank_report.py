"""Which of several failures is reported: the one that the others follow from."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from dataclasses import asdict
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from lightning_dp import launch as launch_module
from lightning_dp.launch import RankReport, _launch_error, dead_ranks, first_report, run_and_report


def report(rank: int, time_s: float, message: str, follows_death: bool = False) -> RankReport:
    return RankReport(rank, time_s, message, "its traceback", follows_death)


def message_for(folder: Path, exit_codes: dict[int, int], *reports: RankReport) -> str:
    """The error that `launch` raises when the agent saw these exit codes, and ranks left these reports."""
    for one in reports:
        (folder / f"{one.rank}.json").write_text(json.dumps(asdict(one)))
    failures = {rank: ProcessFailure(rank, 100 + rank, code, "no file") for rank, code in exit_codes.items()}
    return str(_launch_error(folder, ChildFailedError("train", failures), 4))


OWN = "ValueError: no data"
LOST = "RuntimeError: connection closed by peer"


@pytest.mark.parametrize("code", [-signal.SIGABRT, -signal.SIGTERM, -signal.SIGKILL, 1])
def test_the_message_of_the_rank_that_failed_first_comes_before_what_it_did_to_the_others(tmp_path, code):
    """gloo aborts a rank that waits for one that has raised an error, and the agent may see the abort first."""
    assert message_for(tmp_path, {0: code}, report(1, 5.0, OWN), report(2, 5.1, LOST)) == f"rank 1 of 4: {OWN}"


@pytest.mark.parametrize("words", ["Connection closed by peer", "Read error [127.0.0.1]:1: Connection reset by peer"])
def test_a_connection_that_a_failing_rank_has_closed_is_no_cause_though_it_is_reported_first(tmp_path, words):
    lost = f"RuntimeError: [tcp/pair.cc:553] {words} [127.0.0.1]:1."  # gloo's words
    assert message_for(tmp_path, {0: 1}, report(0, 5.0, lost), report(1, 5.1, OWN)) == f"rank 1 of 4: {OWN}"


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV", "SIGBUS", "SIGABRT"])
def test_a_death_without_a_message_comes_before_the_lost_connections_that_follow(tmp_path, name):
    lost = [report(rank, 5.0, LOST, follows_death=True) for rank in (0, 2)]
    assert message_for(tmp_path, {1: -signal.Signals[name]}, *lost).startswith(f"rank 1 of 4 was killed by {name}")


def test_without_a_message_there_is_the_exit_code(tmp_path):
    assert message_for(tmp_path, {3: 7}) == "rank 3 of 4 ended with exit code 7 and no message"


def test_a_rank_that_ends_with_status_0_before_its_function_returns_is_named(tmp_path):
    """The agent sees nothing wrong with it. It sees rank 0, which has lost its connection."""
    (tmp_path / "1.alive").touch()
    message = message_for(tmp_path, {0: 1}, report(0, 5.0, LOST, follows_death=True))
    assert message == "rank 1 of 4 ended before its function returned, as by os._exit(0)"


def test_of_several_messages_the_first_counts(tmp_path):
    assert message_for(tmp_path, {2: 1}, report(2, 6.0, LOST), report(3, 5.5, OWN)) == f"rank 3 of 4: {OWN}"


def test_the_traceback_comes_with_the_message(tmp_path):
    (tmp_path / "2.json").write_text(json.dumps(asdict(report(2, 1.0, OWN))))
    assert first_report(tmp_path).traceback == "its traceback"
    (tmp_path / "2.json").unlink()
    assert first_report(tmp_path) is None


def rank_of(folder: str, rank: int, end: str) -> None:
    """A rank that ends in one of four ways, or waits."""
    os.environ["RANK"] = str(rank)

    def function() -> None:
        if end == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if end == "left":
            os._exit(3)
        if end == "raised":
            raise ValueError("no data")
        if end == "waiting":
            Path(folder, f"{rank}.entered").touch()
            signal.pause()

    run_and_report(folder, function, ())


def test_only_ranks_that_ended_without_a_report_are_dead(tmp_path):
    context = multiprocessing.get_context("fork")
    waiting = context.Process(target=rank_of, args=(str(tmp_path), 4, "waiting"))
    waiting.start()
    for rank, end in enumerate(("finished", "raised", "killed", "left")):
        process = context.Process(target=rank_of, args=(str(tmp_path), rank, end))
        process.start()
        process.join()
    while not (tmp_path / "4.entered").exists():
        assert waiting.is_alive()
    assert sorted(dead_ranks(tmp_path, but=9)) == [2, 3]
    assert dead_ranks(tmp_path, but=3) == [2]
    waiting.kill()
    waiting.join()
    assert sorted(dead_ranks(tmp_path, but=9)) == [2, 3, 4]


def kill_a_fork() -> None:
    """End a process that has the handlers and descriptors of this one by SIGTERM, as a pool ends its workers."""
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
    os.waitpid(pid, 0)


@pytest.mark.parametrize(
    ("peer", "told"), [("alive", "nobody"), ("dead", "nobody"), ("dead", "this rank"), ("dead", "its fork")]
)
def test_a_rank_that_fails_after_a_death_says_so_and_waits_for_the_agent(tmp_path, monkeypatch, peer, told):
    """Not where the agent has sent its SIGTERM before, which a handler of Lightning's has taken."""
    waits: list[float] = []
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(launch_module.time, "sleep", waits.append)
    monkeypatch.setattr(launch_module, "dead_ranks", lambda folder, but: [1] if peer == "dead" else [])
    handler = signal.getsignal(signal.SIGTERM)

    def lose() -> None:
        signal.signal(signal.SIGTERM, lambda *_: None)
        if told == "this rank":
            os.kill(os.getpid(), signal.SIGTERM)
        if told == "its fork":
            kill_a_fork()
        raise RuntimeError("connection closed by peer")

    with pytest.raises(SystemExit):
        run_and_report(str(tmp_path), lose, ())
    signal.signal(signal.SIGTERM, handler)
    written = json.loads((tmp_path / "0.json").read_text())
    assert written["message"] == LOST
    assert written["follows_death"] == (peer == "dead")
    assert bool(waits) == (peer == "dead" and told != "this rank")
    assert (first_report(tmp_path) is None) == (peer == "dead")
