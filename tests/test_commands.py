from __future__ import annotations

import sys

import pytest

from tests.commands import run_command


def test_status_output_and_environment(tmp_path):
    code = "import os, sys; print(os.environ['GIVEN'], os.getcwd()); print('no', file=sys.stderr); sys.exit(3)"
    done = run_command([sys.executable, "-c", code], tmp_path, {"GIVEN": "1"})
    assert (done.returncode, done.stdout, done.stderr) == (3, f"1 {tmp_path}\n", "no\n")


@pytest.mark.ci
def test_a_command_that_hangs_is_ended_with_the_processes_that_it_started():
    """The child holds the pipe of the output, so that the call would not return before the child has ended."""
    code = "import os, time; os.fork(); print('begun', flush=True); time.sleep(100000)"
    with pytest.raises(AssertionError, match=r"not finished after 2 s(.|\n)*begun"):
        run_command([sys.executable, "-c", code], limit_s=2.0)
