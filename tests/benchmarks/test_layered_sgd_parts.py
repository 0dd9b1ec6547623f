"""The host-time benchmark measures real updates: applied in each way, they are the optimizer's own step."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import layered_sgd_host_time
import pytest
import torch
from layered_sgd_host_time import OPTIMIZERS, Chain, Postponable, buckets_of, measure_forwards, measure_update


@pytest.fixture(params=list(OPTIMIZERS))
def cases(request) -> Iterator[tuple[Postponable, Postponable]]:
    """Two equal cases: one steps its optimizer, the other postpones."""
    made = []
    for _ in range(2):
        torch.manual_seed(1)
        made.append(Postponable(12, 5, OPTIMIZERS[request.param]))
    yield made[0], made[1]
    for case in made:
        case.update.close()


def parameters(case: Postponable) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in case.model.parameters()])


@pytest.mark.parametrize("have_arrived", [True, False])
def test_finishing_a_postponed_update_is_the_optimizers_step(cases, have_arrived):
    plain, postponed = cases
    for _ in range(3):
        plain.step_s()
        postponed.stage(have_arrived)
        assert postponed.update.is_pending
        postponed.update.finish()
        assert not postponed.update.is_pending
    assert torch.equal(parameters(plain), parameters(postponed))


@pytest.mark.parametrize("have_arrived", [True, False])
def test_a_forward_applies_the_whole_update_and_computes_with_the_new_parameters(cases, have_arrived):
    plain, postponed = cases
    x = torch.rand(4, 8)
    for _ in range(3):
        plain.step_s()
        postponed.stage(have_arrived)
        y = postponed.model(x)
        assert not postponed.update.is_pending
        assert torch.equal(y, plain.model(x))


def test_buckets_that_arrive_one_by_one_take_a_step_each_and_those_that_have_arrived_take_one(cases, monkeypatch):
    _, postponed = cases
    steps = []
    kind = type(postponed.optimizer)
    step = kind.step
    monkeypatch.setattr(kind, "step", lambda *args: (steps.append(None), step(*args))[1])
    for have_arrived, expected in ((True, 1), (False, 5)):
        steps.clear()
        postponed.forward_s(torch.rand(4, 8), have_arrived)
        assert len(steps) == expected


def test_an_update_of_other_parameters_stays_pending(cases):
    used, other = cases
    other.stage(have_arrived=True)
    before = [p.detach().clone() for p in used.model.parameters()]
    used.model(torch.rand(4, 8))
    assert other.update.is_pending
    assert all(torch.equal(p, q) for p, q in zip(used.model.parameters(), before, strict=True))
    other.update.finish()


def test_buckets_hold_each_parameter_once_and_begin_with_the_last_one():
    parameters = list(Chain(161).parameters())
    buckets = buckets_of(parameters, 45)
    assert len(buckets) == 45
    assert [id(p) for bucket in buckets for p in bucket] == [id(p) for p in reversed(parameters)]
    assert {len(bucket) for bucket in buckets} == {3, 4}


def test_each_side_is_measured_once_a_round(monkeypatch):
    monkeypatch.setattr(layered_sgd_host_time, "NUM_OPERATIONS", 6)
    monkeypatch.setattr(layered_sgd_host_time, "NUM_BUCKETS", 2)
    case = Postponable(6, 2, OPTIMIZERS["AdamW"])
    updates = measure_update(case, rounds=3)
    assert list(updates) == [
        "optimizer.step",
        "a step for each bucket, no strategy",
        "in a forward, slow network",
        "in a forward, fast network",
        "finish_update",
    ]
    assert {len(values) for values in updates.values()} == {3}
    forwards = measure_forwards(argparse.Namespace(rounds=2, repeats=1))
    small, frozen = forwards.values()
    assert list(small)[:2] == list(frozen) == ["no strategy", "other updates pending"]
    assert {len(values) for times in forwards.values() for values in times.values()} == {2}
