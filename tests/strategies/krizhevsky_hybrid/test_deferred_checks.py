"""Checks of numbers on a GPU, on an emulated one."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

import pytest
import torch

from lightning_dp.strategies.krizhevsky_hybrid import passes
from lightning_dp.strategies.krizhevsky_hybrid.passes import DeferredChecks
from tests.emulated_device.machine import Machine
from tests.emulated_device.mutations import Mutation, applied, fails, mutations
from tests.emulated_device.tensors import full

DEVICE = torch.device("cuda", 0)


def refuse_2(numbers):
    assert numbers.device.type == "cpu"
    if numbers.tolist() == [2.0, 2.0]:
        raise ValueError("2")


def check_later(machine: Machine, monkeypatch: Any) -> None:
    machine.install(monkeypatch)
    checks = DeferredChecks()
    seen = []
    for number in (1.0, 2.0, 3.0):
        numbers = full(machine, DEVICE, 2, number)
        checks.add(numbers, lambda values: seen.append(values.tolist()) or refuse_2(values))
        numbers.fill_(0.0)  # the GPU goes on
    thread = threading.current_thread().name
    assert machine.host_waits[thread] == 0, "the host has waited for the GPU"
    with suppress(ValueError):
        checks.finish()
    assert seen == [[1.0, 1.0], [2.0, 2.0]], "the first that raises is the last that is called"
    checks.finish()  # nothing is left
    assert machine.host_waits[thread] == 2


def test_numbers_on_the_cpu_are_checked_at_once():
    checks = DeferredChecks()
    checks.add(torch.full((2,), 1.0), refuse_2)
    with pytest.raises(ValueError, match="2"):
        checks.add(torch.full((2,), 2.0), refuse_2)
    checks.finish()


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_numbers_on_a_gpu_are_checked_later(seed, monkeypatch):
    check_later(Machine(seed), monkeypatch)


@pytest.mark.parametrize("mutation", mutations(passes), ids=str)
def test_every_wait_matters(mutation: Mutation):
    with applied(mutation):
        assert fails(check_later), f"{mutation} can be left out, and the checks pass"


def test_the_mutations_are_those_that_are_expected():
    assert [mutation.text for mutation in mutations(passes)] == [
        "non_blocking=True",
        "blocking=True",
        "streams.record_event(streams.current_stream(numbers.device), blocking=True)",
        "arrived.synchronize()",
    ]
