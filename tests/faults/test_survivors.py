"""What a fault of one rank does to all: each ends, says why, and leaves nothing behind but whole checkpoints.

DDP is one of the strategies of the table, so it meets the same expectations in the same run. How long it takes is
measured by ``benchmarks/faults.py``; a rank that waits for a timeout where there is none to wait for counts as hanging.
"""

from __future__ import annotations

import re

import pytest
from support.emulated_hosts import why_no_hosts
from support.faults import DDP, NUM_BATCHES, ROWS, STRATEGIES, Case, End, cases

from tests.faults.scene import is_same, run_case, saved, unbroken

# Long enough for ranks to start on a busy machine, and short enough to wait for.
SILENCE_S = 3.0

# Fault, moment, victim, strategy, with global batch norm: those that the suite runs. The whole table is slow.
IN_THE_SUITE = {
    ("kill -9", "forward", 0, "layered load", False),
    ("kill -9", "backward", 1, "layered step", False),
    ("kill -9", "pending", 1, "layered int8", True),
    ("kill -9", "forward", 1, "FSDP step", False),
    ("kill -9", "backward", 1, "FSDP shards", True),
    ("kill -9", "validation", 1, "hybrid c", True),
    ("kill -9", "save", 1, "hybrid sharded", True),
    ("stopped for 1 s", "backward", 1, "layered step", True),
    ("exception", "forward", 1, "layered PowerSGD", False),
    ("loader worker killed", "forward", 1, "hybrid a", True),
    ("other graph", "forward", 1, "layered load", True),
    ("disk full", "save", 0, "layered step", True),
}

# What the victim says, where it can say anything.
VICTIM = {
    "kill -9": "died with exit code -9",
    "exception": "ValueError: the fault",
    "loader worker killed": "(^|\n)RuntimeError: DataLoader worker",
    "disk full": "No space left|File too large|file write failed|unexpected pos",
}
NAMED = ("kill -9", "stopped for good", "exception", "loader worker killed", "network cut")


def case_of(case: Case) -> object:
    row = (case.fault, case.moment, case.victim, case.strategy, case.global_batch_norm)
    marks = [] if row in IN_THE_SUITE else [pytest.mark.slow]
    if case.fault == "other graph" and case.strategy in ("FSDP load", "FSDP shards"):
        marks.append(pytest.mark.xfail(reason="gloo aborts a process that gets more bytes than it expects"))
    return pytest.param(case, id=str(case), marks=marks)


CASES = cases(ROWS, list(STRATEGIES), [False, True], SILENCE_S)


@pytest.mark.parametrize("case", [case_of(case) for case in CASES])
def test_every_rank_ends_and_says_why(case, folder):
    if case.fault == "network cut" and (lacking := why_no_hosts()):
        pytest.skip(lacking)
    ends = run_case(case, folder)
    CHECKS.get(case.fault, all_fail)(case, ends)
    content = saved(folder)
    if content is None:
        assert case.strategy == DDP, "the checkpoint of the first epoch is lost"
    else:
        assert content["global_step"] in (NUM_BATCHES, 2 * NUM_BATCHES)


def all_fail(case: Case, ends: list[End | str]) -> None:
    for rank, end in enumerate(ends):
        text = (end if isinstance(end, str) else end.error) or ""
        if rank == case.victim:
            assert re.search(VICTIM.get(case.fault, ""), text), text
            continue
        assert isinstance(end, End), text
        assert text, "it went through"
        if names_the_victim(case):
            # Between hosts, global batch norm's error names all ranks that exchange their statistics.
            assert re.search(rf"ranks? [\d, (]*\b{case.victim}\b", text), text


def names_the_victim(case: Case) -> bool:
    """Where not, a collective of DDP, FSDP2 or Lightning may notice first, and gloo gives no rank."""
    if case.fault not in NAMED or case.moment not in ("forward", "backward", "pending"):
        return False
    if case.strategy in (DDP, "FSDP shards"):
        return False
    unnamed = ("backward", "pending") if case.strategy.startswith("hybrid") else ("pending",)
    return case.global_batch_norm or case.moment not in unnamed


def all_go_through(case: Case, ends: list[End | str]) -> None:
    for end, weights in zip(ends, unbroken(case.strategy, case.global_batch_norm), strict=True):
        assert isinstance(end, End), end
        assert end.error is None, end.trace
        assert is_same(end.weights, weights)


def writers_fail(case: Case, ends: list[End | str]) -> None:
    """All fail, and a rank that writes says why: with shards, that may be the one that has not filled the disk."""
    if case.strategy == DDP:  # Lightning copies over the old file, whose room may be enough
        return
    texts = [(end if isinstance(end, str) else end.error) or "" for end in ends]
    assert all(texts), texts
    assert re.search(VICTIM["disk full"], "\n".join(texts)), texts


CHECKS = {"stopped for 1 s": all_go_through, "disk full": writers_fail}


@pytest.mark.ci
@pytest.mark.parametrize("strategy", [pytest.param(DDP, marks=pytest.mark.slow), "hybrid a"])
def test_a_silent_rank_costs_one_timeout_where_lightning_drops_the_first(strategy, folder):
    """Before each batch rank 0 tells the others whether to stop. Global batch norm would wait once more after it."""
    case = Case("stopped for good", "pending", strategy, global_batch_norm=True, timeout_s=SILENCE_S)
    end, _ = run_case(case, folder)
    assert isinstance(end, End), end
    assert "to begin a batch: one of the other ranks (1) is stuck" in end.error


@pytest.mark.ci
@pytest.mark.parametrize(
    "strategy", ["layered step", *(pytest.param(each, marks=pytest.mark.slow) for each in STRATEGIES)]
)
def test_a_truncated_checkpoint_ends_all_ranks(strategy, folder):
    case = Case("none", "start", strategy, global_batch_norm=True)
    run_case(case, folder)
    path = folder / "checkpoints" / "last.ckpt"
    for file in [path] if path.is_file() else list(path.iterdir()):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    for end in run_case(case, folder, resume=True):
        assert isinstance(end, End), end
        assert end.error
        assert strategy == DDP or str(path) in end.error, end.error
