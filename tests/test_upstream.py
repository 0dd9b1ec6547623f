"""What counts as a difference where Lightning's own tests run with our strategies in DDP's place."""

from __future__ import annotations

import copy

import pytest

from tests.upstream import run

PASSED = {
    "outcome": "passed",
    "error": "",
    "digests": [[{"bits": "a1", "progress": "4 1", "sizes": {"layer.weight": [1.0, 2.0]}}]] * 2,
}


def changed(weight: float = 1.0, progress: str = "4 1") -> dict:
    test = copy.deepcopy(PASSED)
    test["digests"] = [[{"bits": "b2", "progress": progress, "sizes": {"layer.weight": [weight, 2.0]}}]] * 2
    return test


@pytest.mark.parametrize(
    ("got", "differs_in_bits", "differs"),
    [
        (PASSED, False, False),
        (changed(), True, False),
        (changed(1.00001), True, False),
        (changed(1.1), True, True),
        (changed(progress="5 1"), True, True),
        ({**PASSED, "digests": [[]] * 2}, True, True),
        ({**PASSED, "outcome": "failed", "error": "ValueError: no"}, True, True),
        ({**PASSED, "outcome": "skipped"}, False, False),
    ],
)
def test_bits_count_unless_a_strategy_rounds_otherwise(got, differs_in_bits, differs):
    assert bool(run.differences({"t": PASSED}, {"t": got}, is_exact=True)) is differs_in_bits
    assert bool(run.differences({"t": PASSED}, {"t": got}, is_exact=False)) is differs


def test_what_fails_under_ddp_too_is_no_difference():
    assert run.differences({"t": {**PASSED, "outcome": "failed"}}, {}, is_exact=True) == {}
    assert run.differences({"t": PASSED}, {}, is_exact=True) == {"t": "not run: "}


def test_a_failure_on_the_other_one_of_two_ranks_is_no_difference():
    failed = {**PASSED, "outcome": "failed"}
    ddp = {"t on rank 0": PASSED, "t on rank 1": failed}
    assert run.differences(ddp, {"t on rank 0": failed, "t on rank 1": PASSED}, is_exact=True) == {}
    assert run.differences(ddp, {"t on rank 0": failed, "t on rank 1": failed}, is_exact=True) != {}


def test_a_difference_is_explained_by_its_test_or_its_error(monkeypatch, tmp_path):
    known = tmp_path / "known.txt"
    known.write_text("# comment\nddp2 | tests/a.py::one | a reason | with a bar\nddp2 | error: cannot save | another\n")
    monkeypatch.setattr(run, "KNOWN", known)
    found = {
        "tests/a.py::one on rank 1": "other",
        "tests/a.py::two on rank 0": "failed: I cannot save it",
        "tests/a.py::three on rank 0": "other",
    }
    assert run.unexplained(found, "ddp2") == {"tests/a.py::three on rank 0": "other"}
    assert run.unexplained(found, "ddp3") == found


@pytest.mark.slow
def test_a_rank_that_leaves_the_run_ends_it_by_name(tmp_path):
    test = tmp_path / "tests" / "tests_pytorch" / "test_leave.py"
    test.parent.mkdir(parents=True)
    test.write_text(
        "import os, time\n\ndef test_before():\n    pass\n\n"
        "def test_leave():\n    os._exit(9) if os.environ['RANK'] == '1' else time.sleep(1000)\n"
    )
    with pytest.raises(SystemExit, match=r"ddp: a rank left the run; exit statuses \[-9, 9\], after .*test_before"):
        run.run(tmp_path, "ddp", [], "")
