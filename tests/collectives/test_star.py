from __future__ import annotations

import pytest
import torch

from lightning_dp.collectives import ring, star_all_reduce
from tests.ranks import run_threads

SIZES = (0, 1, 5, 1003)


def values(rank: int, size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(1000 * rank + size), dtype=torch.float64)


def reduce_all(rank, group, reducer):
    results = []
    for size in SIZES:
        tensor = values(rank, size)
        assert star_all_reduce(tensor, group, "mean", reducer=reducer, segment_bytes=80) is tensor
        results.append(tensor)
    integers = torch.arange(12).view(3, 4).t() * (rank + 1)
    results.append(star_all_reduce(integers, group, reducer=reducer))
    return results


def check(world_size: int, reducer: int) -> None:
    expected = [torch.stack([values(rank, size) for rank in range(world_size)]).mean(0) for size in SIZES]
    expected.append(torch.arange(12).view(3, 4).t() * (world_size * (world_size + 1) // 2))
    results = run_threads(world_size, reduce_all, reducer)
    for result in results:
        for mine, first, right in zip(result, results[0], expected, strict=True):
            torch.testing.assert_close(mine, right)
            assert torch.equal(mine, first), "not bitwise identical on all ranks"


@pytest.mark.parametrize(("world_size", "reducer"), [(1, 0), (2, 0), (3, 1), (5, 4), (8, 0)])
def test_star_computes_mean_and_sum_on_every_rank(world_size, reducer):
    check(world_size, reducer)


def test_the_comparison_fails_without_communication(monkeypatch):
    monkeypatch.setattr(ring, "_reduce", lambda segments, group: None)
    monkeypatch.setattr(ring, "post", lambda group, receives, sends: ([], []))
    with pytest.raises(AssertionError):
        check(3, 0)


def wrong_reducer(rank, group):
    with pytest.raises(ValueError, match="reducer=2 is not in a group of 2 ranks; use 0 to 1"):
        star_all_reduce(torch.ones(1), group, reducer=2)


def test_a_reducer_outside_the_group_is_refused():
    run_threads(2, wrong_reducer)
