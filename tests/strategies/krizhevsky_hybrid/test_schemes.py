from __future__ import annotations

import pytest

from lightning_dp.strategies.krizhevsky_hybrid.exchange import SubPass, sub_passes

SIZES = [(4, 4), (3,), (5, 5, 5), (7, 0, 2, 1), (1, 1, 1, 1), (0, 0, 3), (32, 32, 32, 32)]


@pytest.mark.parametrize("scheme", ["a", "b", "c"])
@pytest.mark.parametrize("sizes", SIZES)
def test_every_example_is_in_one_pass_in_its_order(scheme, sizes):
    plan = sub_passes(scheme, sizes)
    assert len(plan) <= (1 if scheme == "a" else len(sizes))
    for rank, size in enumerate(sizes):
        rows = [row for part in plan for row in range(*part.rows[rank])]
        assert rows == list(range(size))


def test_scheme_b_takes_turns():
    assert sub_passes("b", [2, 0, 1]) == [SubPass(((0, 2), (0, 0), (0, 0))), SubPass(((0, 0), (0, 0), (0, 1)))]


def test_scheme_b_with_fewer_passes_takes_several_ranks_at_a_time():
    assert sub_passes("b", [2, 1, 3], 2) == [SubPass(((0, 2), (0, 1), (0, 0))), SubPass(((0, 0), (0, 0), (0, 3)))]


@pytest.mark.parametrize("num_passes", [2, 3, 5])
def test_scheme_c_has_any_number_of_passes(num_passes):
    sizes = [part.num_samples for part in sub_passes("c", [5, 4, 6], num_passes)]
    assert len(sizes) == num_passes
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("num_passes", [1, 2, 3, 7])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("scheme", ["b", "c"])
def test_every_example_is_in_one_of_so_many_passes(scheme, sizes, num_passes):
    plan = sub_passes(scheme, sizes, num_passes)
    assert len(plan) <= (num_passes if scheme == "c" else min(num_passes, len(sizes)))
    for rank, size in enumerate(sizes):
        assert [row for part in plan for row in range(*part.rows[rank])] == list(range(size))


def test_scheme_c_takes_an_equal_part_of_each():
    assert sub_passes("c", [4, 4]) == [SubPass(((0, 2), (0, 2))), SubPass(((2, 4), (2, 4)))]


def test_scheme_c_makes_passes_as_equal_as_they_can_be():
    assert [part.num_samples for part in sub_passes("c", [5, 5, 5, 5])] == [5, 5, 5, 5]
    assert [part.num_samples for part in sub_passes("c", [1, 1, 1, 1])] == [1, 1, 1, 1]


def test_nobody_has_anything():
    assert all(sub_passes(scheme, [0, 0]) == [SubPass(((0, 0), (0, 0)))] for scheme in ("a", "b", "c"))
