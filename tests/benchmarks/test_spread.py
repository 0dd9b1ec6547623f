"""Ratios with their spread, and sides that take turns."""

from __future__ import annotations

import pytest
from support.spread import alternate, median_interval, min_max, quartiles, ratios, turn_order


def test_sides_take_turns_forward_and_backward_and_the_first_round_is_not_counted():
    calls = []

    def side(name):
        def call() -> float:
            calls.append(name)
            return float(len(calls))

        return call

    values = alternate({name: side(name) for name in "abc"}, num_rounds=2)
    assert "".join(calls) == "abc" + "cba" + "abc"
    assert values == {"a": [6.0, 7.0], "b": [5.0, 8.0], "c": [4.0, 9.0]}


def test_turn_order_gives_every_side_the_first_place_or_the_last_in_turn():
    assert turn_order(["a", "b"], 0) == ["a", "b"]
    assert turn_order(["a", "b"], 1) == ["b", "a"]


def test_ratios_pair_the_values_of_one_round():
    assert ratios([2.0, 9.0], [1.0, 3.0]) == [2.0, 3.0]
    with pytest.raises(ValueError, match="shorter"):
        ratios([1.0, 2.0], [1.0])


def test_min_max_and_quartiles_stay_within_the_values():
    values = [4.0, 1.0, 3.0, 2.0, 10.0]
    assert min_max(values).text(0) == "3 (1-10)"
    assert quartiles(values).text(0) == "3 (2-4)"
    for spread in (quartiles([1.0, 2.0]), quartiles([5.0])):
        assert 1.0 <= spread.low <= spread.median <= spread.high <= 5.0


def test_the_interval_of_the_median_holds_the_median_and_shrinks_with_the_number_of_values():
    few = median_interval(range(9))
    many = median_interval(range(900))
    assert few[0] < 4 < few[1]
    assert many[0] < 450 < many[1]
    assert (many[1] - many[0]) / 900 < (few[1] - few[0]) / 9
