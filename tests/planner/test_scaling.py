"""Lemmas 3.1 and 3.2 of arXiv 1709.06622."""

from __future__ import annotations

import math

import pytest

from lightning_dp.planner import (
    amdahl_efficiency,
    amdahl_speedup,
    choose_num_gpus,
    choose_num_parameter_servers,
    max_overhead_ratio,
)


def test_the_papers_example_of_the_allowed_overhead():
    assert max_overhead_ratio(4, 0.8) == pytest.approx(0.2 / 2.2)
    assert round(100 * max_overhead_ratio(4, 0.8)) == 9


def test_the_papers_example_of_the_number_of_gpus():
    assert choose_num_gpus(3, 0.1) == 4
    assert amdahl_speedup(3, 0.1) < 3 <= amdahl_speedup(4, 0.1)


@pytest.mark.parametrize("num_gpus", [2, 3, 8, 1000])
@pytest.mark.parametrize("ratio", [0.001, 0.1, 1.0, 7.5])
def test_overhead_and_efficiency_are_inverse_to_each_other(num_gpus, ratio):
    assert max_overhead_ratio(num_gpus, amdahl_efficiency(num_gpus, ratio)) == pytest.approx(ratio)


@pytest.mark.parametrize("num_gpus", [1, 2, 7, 64, 4096])
@pytest.mark.parametrize("ratio", [0.0, 0.001, 0.03, 0.1, 1.0])
def test_the_number_of_gpus_is_the_smallest_one(num_gpus, ratio):
    speedup = amdahl_speedup(num_gpus, ratio)
    assert choose_num_gpus(speedup, ratio) == num_gpus, "rounding errors must not add a GPU"
    between = (speedup + amdahl_speedup(num_gpus + 1, ratio)) / 2
    assert choose_num_gpus(between, ratio) == num_gpus + 1


def test_efficiency_follows_amdahls_law():
    compute_s, overhead_s = 0.9, 0.3
    on_eight = compute_s / 8 + overhead_s
    assert 8 * amdahl_efficiency(8, overhead_s / compute_s) == pytest.approx((compute_s + overhead_s) / on_eight)


@pytest.mark.parametrize(("num_gpus", "efficiency"), [(1, 1.0), (4, 0.25), (4, 0.1)])
def test_an_efficiency_that_is_always_reached_allows_any_overhead(num_gpus, efficiency):
    assert max_overhead_ratio(num_gpus, efficiency) == math.inf


@pytest.mark.parametrize("speedup", [11, 11.5, 1e9])
def test_a_speedup_above_the_limit_names_the_limit(speedup):
    with pytest.raises(ValueError, match=r"speedup=.* is out of reach: with overhead_ratio=0.1 .* less than 11;"):
        choose_num_gpus(speedup, 0.1)


def test_without_overhead_there_is_no_limit():
    assert choose_num_gpus(1000, 0) == 1000
    assert choose_num_gpus(2.5, 0) == 3
    assert choose_num_gpus(0.5, 0.1) == 1


def test_parameter_servers_hide_their_traffic():
    # AlexNet's 180 MB, 1 Gbit/s servers, a second of computation, 4 workers: 1.44 GB to move in a second.
    assert choose_num_parameter_servers(180e6, 4, 125e6, 1.0) == 12
    assert choose_num_parameter_servers(1, 1, 125e6, 1.0) == 1


@pytest.mark.parametrize("compute_s", [0.1, 0.2, 0.3, 0.6, 0.7])
def test_a_number_of_servers_that_comes_out_even_is_not_rounded_up(compute_s):
    assert choose_num_parameter_servers(10 * 1e6 * compute_s, 2, 1e6, compute_s) == 40


@pytest.mark.parametrize(
    ("function", "arguments", "error", "message"),
    [
        (amdahl_efficiency, (0, 0.1), ValueError, "num_gpus=0 is too small"),
        (amdahl_efficiency, (2.5, 0.1), TypeError, "num_gpus=2.5 is no integer"),
        (amdahl_efficiency, (4, -0.1), ValueError, "overhead_ratio=-0.1 must be finite and at least 0"),
        (amdahl_efficiency, (4, math.nan), ValueError, "overhead_ratio=nan"),
        (max_overhead_ratio, (4, 0.0), ValueError, "efficiency=0.0 must be greater than 0"),
        (max_overhead_ratio, (4, 80), ValueError, "efficiency=80 .* at most 1, for example 0.8"),
        (choose_num_gpus, (-3, 0.1), ValueError, "speedup=-3 must be finite and greater than 0"),
        (choose_num_gpus, (math.inf, 0.0), ValueError, "speedup=inf"),
        (choose_num_parameter_servers, (-1, 4, 1e8, 1), ValueError, "param_bytes=-1"),
        (choose_num_parameter_servers, (1e6, 0, 1e8, 1), ValueError, "num_workers=0"),
        (choose_num_parameter_servers, (1e6, 4, 0, 1), ValueError, "bandwidth_bytes_per_s=0"),
        (choose_num_parameter_servers, (1e6, 4, 1e8, 0), ValueError, "compute_s=0"),
    ],
)
def test_bad_input_is_refused_by_name(function, arguments, error, message):
    with pytest.raises(error, match=message):
        function(*arguments)
