"""The tables of layered_sgd_throughput: the bound of a network, and memory beside the reference."""

from __future__ import annotations

import argparse

from support.data_parallel_methods import REFERENCE, Method, full_bytes
from support.data_parallel_report import Measured, memory_table, rate_table
from support.host_jobs import Job

OPTIONS = argparse.Namespace()
RESULT = {"shapes": [[1000, 25]], "step_s": {REFERENCE: [0.5, 0.7, 0.6]}, "difference": {REFERENCE: [0.0]}}
METHOD = Method(lambda: None, full_bytes)  # 100 kB


def measured(local_s: float, **network) -> Measured:
    return Measured(Job(OPTIONS, **{"num_hosts": 2, "per_host": 1, "rate": "8mbit", **network}), RESULT, local_s)


def test_the_bound_is_what_takes_longer_on_the_slowest_link():
    assert measured(0.01).bound_s(METHOD) == 0.1
    assert measured(0.25).bound_s(METHOD) == 0.25
    assert measured(0.01, slow_host="4mbit").bound_s(METHOD) == 0.2
    assert measured(0.01, delay_ms=5.0).bound_s(METHOD) == 0.1
    assert measured(0.01, rate="none").bound_s(METHOD) == 0.01


def test_a_table_says_which_network_it_is_of():
    table = rate_table(measured(0.01, slow_host="4mbit", delay_ms=5.0), {REFERENCE: METHOD})
    assert table.splitlines()[0] == "8 Mbit/s, last host 4 Mbit/s, delay 5 ms:"
    assert table.splitlines()[-1].startswith(f"| {REFERENCE} | yes | 0 | 600 | 1.00 (1.00-1.00) | 0.10 | 200 | 3.00 |")


def test_memory_is_the_largest_of_the_ranks_beside_that_of_the_reference():
    lines = memory_table({REFERENCE: [10**7, 2 * 10**7], "other": [25 * 10**6, 10**6]}).splitlines()
    assert lines[-2:] == [f"| {REFERENCE} | 20.0 | +0.0 | 10.0, 20.0 |", "| other | 25.0 | +5.0 | 25.0, 1.0 |"]
