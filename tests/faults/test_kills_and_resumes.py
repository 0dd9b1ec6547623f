"""A job that is killed again and again, and continued from its last checkpoint, ends as if nothing had happened."""

from __future__ import annotations

from itertools import cycle

import pytest
from support.faults import STRATEGIES, Case, End

from tests.faults.scene import is_same, run_case, saved

# Of rank 0, which writes the checkpoints, and of rank 1.
KILLS = (("save", 0), ("pending", 1), ("rename", 0), ("backward", 1), ("validation", 0), ("forward", 1))

MANY_KILLS = ("layered step", "layered load", "FSDP step", "FSDP shards", "hybrid a", "hybrid sharded")


@pytest.mark.ci
@pytest.mark.parametrize(
    ("strategy", "num_kills"),
    [
        ("layered step", 3),
        *(pytest.param(strategy, 6, marks=pytest.mark.slow) for strategy in STRATEGIES),
        *(pytest.param(strategy, 50, marks=pytest.mark.slow) for strategy in MANY_KILLS),
    ],
)
def test_bitwise_the_unbroken_run(strategy, num_kills, tmp_path):
    num_epochs = num_kills + 1

    def case(fault, moment, victim, epoch):
        return Case(fault, moment, strategy, victim, True, epoch=epoch, num_epochs=num_epochs)

    whole = run_case(case("none", "start", 0, 0), tmp_path / "whole")
    killed = tmp_path / "killed"
    for epoch, (moment, victim) in zip(range(num_kills), cycle(KILLS), strict=False):
        ends = run_case(case("kill -9", moment, victim, epoch), killed, resume=saved(killed) is not None)
        assert "died with exit code -9" in ends[victim]
    ends = run_case(case("none", "start", 0, 0), killed, resume=True)
    for end, expected in zip(ends, whole, strict=True):
        assert isinstance(end, End), end
        assert end.error is None, end.trace
        assert isinstance(expected, End)
        assert is_same(end.weights, expected.weights)
