"""The stream code of layered SGD on an emulated device: right as it is, and wrong without any of its waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lightning_dp.strategies.layered_sgd import device_communicator, host_communicator
from tests.emulated_device.machine import Machine
from tests.emulated_device.mutations import Mutation, applied, fails, mutations
from tests.strategies.layered_sgd.device_stream_scenarios import close_in_flight, drop_in_flight, sum_on_the_device
from tests.strategies.layered_sgd.group_stream_scenarios import (
    close_while_reducing,
    drop_what_is_reduced,
    reduce_on_the_devices,
)
from tests.strategies.layered_sgd.host_stream_scenarios import (
    free_what_is_copied_back,
    sum_on_the_host,
    wait_for_copies_in_turn,
)

SCENARIOS: dict[str, Callable[[Machine, Any], None]] = {
    "host, after backward": lambda machine, patch: sum_on_the_host(machine, patch, False),
    "host, by priority": lambda machine, patch: sum_on_the_host(machine, patch, True),
    "host, freed": free_what_is_copied_back,
    "host, leaders' copies": lambda machine, patch: reduce_on_the_devices(machine, patch, "leader"),
    "host, shards' copies": lambda machine, patch: reduce_on_the_devices(machine, patch, "sharded"),
    "host, dropped": drop_what_is_reduced,
    "host, closed": close_while_reducing,
    "device, in backward": lambda machine, patch: sum_on_the_device(machine, patch, True),
    "device, after backward": lambda machine, patch: sum_on_the_device(machine, patch, False),
    "device, dropped": drop_in_flight,
    "device, closed": close_in_flight,
}
# Also what can only be said of a device that is as late as it may be.
LATE_SCENARIOS = {**SCENARIOS, "host, order": wait_for_copies_in_turn}

# `with_background_threads` has a test of its own, without a device: `tests/collectives/test_thread_priority.py`.
MUTATIONS = [
    each
    for module in (host_communicator, device_communicator)
    for each in mutations(module)
    if each.text != "streams.set_device(device)" or "background" not in each.function
]


@pytest.mark.parametrize("scenario", LATE_SCENARIOS)
def test_sums_are_right_on_a_device_that_is_as_late_as_it_may_be(scenario, monkeypatch):
    LATE_SCENARIOS[scenario](Machine(), monkeypatch)


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("seed", range(5))
def test_sums_are_right_whenever_the_device_runs(scenario, seed, monkeypatch):
    SCENARIOS[scenario](Machine(seed), monkeypatch)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("early", [True, False])
def test_sums_are_right_whichever_rank_is_ahead(early, seed, monkeypatch):
    sum_on_the_device(Machine(), monkeypatch, early, seed)


@pytest.mark.ci
@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_every_wait_matters(mutation: Mutation, monkeypatch):
    for module in (host_communicator, device_communicator):
        monkeypatch.setattr(module, "CLOSE_LIMIT_S", 0.2)  # without some waits, a thread never ends
    with applied(mutation):
        assert any(map(fails, LATE_SCENARIOS.values())), f"{mutation} can be left out, and no scenario fails"


def test_waits_are_found_in_each_module():
    """A wait that is written in another way would not be found."""
    assert {mutation.module for mutation in MUTATIONS} == {host_communicator, device_communicator}
