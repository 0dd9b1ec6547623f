from __future__ import annotations

import logging
import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR

from lightning_dp.models import cifar_alexnet
from lightning_dp.optim import (
    KrizhevskySGD,
    krizhevsky_schedule,
    scale_for_batch_size,
    scale_learning_rate,
    scale_weight_decay,
    trunk_and_head_groups,
)
from tests.optim.runs import rates_of, whole_and_resumed


def test_the_learning_rate_grows_by_either_rule():
    assert scale_learning_rate(0.01, 8) == pytest.approx(0.08)
    assert scale_learning_rate(0.01, 8, rule="linear") == pytest.approx(0.08)
    assert scale_learning_rate(0.01, 8, rule="sqrt") == pytest.approx(math.sqrt(8) * 0.01)
    assert scale_learning_rate(0.08, 1 / 8) == pytest.approx(0.01)


def test_the_weight_decay_is_the_papers_example():
    # "N=128, eps=0.01, omega=0.0005 ... for N'=1024 ... 0.0014141888", and 0.0014142136 for the approximation
    scaled = scale_weight_decay(0.0005, 0.01, 1024 / 128)
    assert round(scaled, 10) == 0.0014141888
    assert round(math.sqrt(8) * 0.0005, 10) == 0.0014142136


@pytest.mark.parametrize(("rule", "limit"), [("sqrt", math.sqrt(8)), ("linear", 1.0)])
def test_for_small_learning_rates_the_decay_approaches_its_limit(rule, limit):
    for lr in (1e-6, 1e-9, 1e-12):  # at the last, 1 - (1 - lr omega)^k as it is written would be 0
        assert scale_weight_decay(0.0005, lr, 8, rule=rule) == pytest.approx(limit * 0.0005, rel=5e-9)


@pytest.mark.parametrize("rule", ["sqrt", "linear"])
@pytest.mark.parametrize("k", [1, 3, 8, 0.5])
def test_one_decay_at_the_new_batch_size_is_k_at_the_old(rule, k):
    lr, weight_decay = 0.3, 0.4
    new = 1 - scale_learning_rate(lr, k, rule) * scale_weight_decay(weight_decay, lr, k, rule)
    assert new == pytest.approx((1 - lr * weight_decay) ** k, rel=1e-12)


@pytest.mark.parametrize("rule", ["sqrt", "linear"])
def test_both_are_scaled_by_one_rule(rule):
    new = scale_for_batch_size(0.01, 0.0005, 8, rule)
    assert new == (scale_learning_rate(0.01, 8, rule), scale_weight_decay(0.0005, 0.01, 8, rule))


def test_a_weight_decay_scaled_by_an_assumed_rule_comes_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        explicit = scale_weight_decay(0.0005, 0.01, 8, rule="sqrt")
        assert not caplog.records
        assert scale_weight_decay(0.0005, 0.01, 8) == explicit
    assert "pass rule='linear' or rule='sqrt'" in caplog.text


def test_zero_weight_decay_stays_zero():
    assert scale_weight_decay(0.0, 0.1, 8) == 0.0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (partial(scale_learning_rate, 0.0, 8), "lr=0.0 must be a positive"),
        (partial(scale_learning_rate, 0.1, -1), "k=-1 must be a positive"),
        (partial(scale_learning_rate, 0.1, math.nan), "k=nan must be a positive"),
        (partial(scale_learning_rate, 0.1, 8, "square"), "rule='square' must be"),
        (partial(scale_weight_decay, 0.1, 0.1, 0), "k=0 must be a positive"),
        (partial(scale_weight_decay, -0.1, 0.1, 8), "at least 0 and less than 1"),
        (partial(scale_weight_decay, 2.0, 0.5, 8), "removes 1 of the weights in each step"),
        (partial(scale_weight_decay, 0.1, 0.1, 8, "square"), "rule='square' must be"),
    ],
)
def test_invalid_arguments_of_the_scaling_rules_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def train(optimizer_of, rates: list[float], closure: bool = False) -> list[torch.Tensor]:
    """The weights after each of some steps on a problem with a gradient of its own in every step."""
    generator = torch.Generator().manual_seed(3)
    w = nn.Parameter(torch.randn(5, dtype=torch.double, generator=generator))
    optimizer, seen = optimizer_of([w]), []
    for rate in rates:
        optimizer.param_groups[0]["lr"] = rate
        x = torch.randn(5, dtype=torch.double, generator=generator)

        def loss(x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            total = ((w - x) ** 2).sum()
            total.backward()
            return total

        if closure:
            assert optimizer.step(loss).item() > 0
        else:
            loss()
            optimizer.step()
        seen.append(w.detach().clone())
    return seen


OURS = partial(KrizhevskySGD, lr=1.0, momentum=0.9, weight_decay=0.01)
TORCHS = partial(SGD, lr=1.0, momentum=0.9, weight_decay=0.01)


@pytest.mark.parametrize("closure", [False, True])
def test_at_a_constant_learning_rate_the_update_equals_that_of_torch(closure):
    for ours, torchs in zip(train(OURS, [0.03] * 20, closure), train(TORCHS, [0.03] * 20), strict=True):
        torch.testing.assert_close(ours, torchs, rtol=1e-12, atol=1e-12)


def test_when_the_learning_rate_changes_the_velocity_is_kept_unlike_in_torch():
    rates = [0.03] * 5 + [0.003] * 5
    ours, torchs = train(OURS, rates), train(TORCHS, rates)
    torch.testing.assert_close(ours[4], torchs[4], rtol=1e-12, atol=1e-12)
    velocity = ours[4] - ours[3]
    # The same gradient, the same new rate: only the old velocity, here whole and there a tenth, differs.
    torch.testing.assert_close(ours[5] - torchs[5], 0.9 * velocity * (1 - 0.1), rtol=1e-9, atol=1e-12)
    assert (ours[5] - torchs[5]).abs().max() > 1e-3


def test_the_update_is_the_papers_by_hand():
    w = nn.Parameter(torch.tensor([2.0], dtype=torch.double))
    optimizer = KrizhevskySGD([w], lr=0.1)
    velocity, expected = 0.0, 2.0
    for gradient in (1.0, -3.0, 0.5):
        w.grad = torch.tensor([gradient], dtype=torch.double)
        optimizer.step()
        velocity = 0.9 * velocity - 0.1 * (gradient + 0.0005 * expected)
        expected += velocity
        assert w.item() == pytest.approx(expected, rel=1e-13)


def test_parameters_without_a_gradient_stay_and_keep_their_velocity():
    still, moved = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = KrizhevskySGD([still, moved], lr=0.1)
    for parameter in (still, moved):
        parameter.grad = torch.ones(2)
    optimizer.step()
    before, still.grad = still.detach().clone(), None
    velocity = optimizer.state[still]["velocity"].clone()
    optimizer.step()
    assert torch.equal(still, before)
    assert torch.equal(optimizer.state[still]["velocity"], velocity)
    assert not torch.equal(moved, before)


def test_training_resumed_from_a_checkpoint_equals_uninterrupted_training(tmp_path):
    whole, resumed = whole_and_resumed(KrizhevskySGD, (3,), tmp_path)
    assert torch.equal(resumed, whole)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"lr": -1.0}, "lr=-1.0"), ({"weight_decay": -1.0}, "weight_decay=-1.0"), ({"momentum": 1.0}, "momentum=1.0")],
)
def test_options_that_make_no_sense_are_refused_in_a_group_too(options, message):
    parameter = nn.Parameter(torch.ones(1))
    with pytest.raises(ValueError, match=message):
        KrizhevskySGD([parameter], **{"lr": 0.1, **options})
    with pytest.raises(ValueError, match=message):
        KrizhevskySGD([{"params": [parameter], **options}], lr=0.1)


def test_the_rate_falls_to_a_250th_at_25_50_and_75_percent():
    a = 250 ** (-1 / 3)
    assert rates_of(krizhevsky_schedule, 8) == pytest.approx([1, 1, a, a, a**2, a**2, a**3, a**3])
    assert rates_of(krizhevsky_schedule, 8)[-1] == pytest.approx(1 / 250)
    # Of 6 steps, that from 1/6 to 2/6 begins before 25 %.
    assert rates_of(krizhevsky_schedule, 6) == pytest.approx([1, 1, a, a**2, a**2, a**3])
    assert rates_of(krizhevsky_schedule, 100, milestones=[0.07], factor=0.5).index(0.5) == 7


def test_a_schedule_keeps_the_ratio_of_the_groups():
    model = cifar_alexnet()
    optimizer = KrizhevskySGD(trunk_and_head_groups(model, lr=0.01, weight_decay=0.0005, trunk_batch_scale=8), lr=1.0)
    schedule = krizhevsky_schedule(optimizer, 4)
    for _ in range(4):
        trunk, head = (group["lr"] for group in optimizer.param_groups)
        assert trunk == pytest.approx(8 * head)
        optimizer.step()
        schedule.step()
    assert head == pytest.approx(0.01 / 250)
    assert isinstance(schedule, torch.optim.lr_scheduler.LRScheduler)
    assert not isinstance(schedule, LambdaLR), "its state is plain values"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"total_steps": 0}, "total_steps=0 must be a positive"),
        ({"factor": 0.0}, "factor=0.0 must be a positive"),
        ({"milestones": (0.5, 0.25)}, "must ascend, between 0 and 1"),
        ({"milestones": (0.25, 1.0)}, "must ascend, between 0 and 1"),
        ({"milestones": (1000, 2000)}, "must ascend, between 0 and 1"),
    ],
)
def test_an_invalid_schedule_is_refused(options, message):
    optimizer = SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    with pytest.raises(ValueError, match=message):
        krizhevsky_schedule(optimizer, **{"total_steps": 100, **options})


def test_groups_hold_every_parameter_once_with_the_rate_of_its_own_batch_size():
    model = cifar_alexnet()
    trunk, head = trunk_and_head_groups(model, lr=0.01, weight_decay=0.0005, trunk_batch_scale=8)
    assert (trunk["name"], head["name"]) == ("trunk", "head")
    assert {id(p) for p in trunk["params"]} == {id(p) for p in model.trunk.parameters()}
    assert {id(p) for p in head["params"]} == {id(p) for p in model.head.parameters()}
    assert (trunk["lr"], head["lr"]) == (pytest.approx(0.08), pytest.approx(0.01))
    assert trunk["weight_decay"] == pytest.approx(scale_weight_decay(0.0005, 0.01, 8, "linear"))
    assert head["weight_decay"] == pytest.approx(0.0005)
    scaled = trunk_and_head_groups(
        model, lr=0.01, weight_decay=0.0005, trunk_batch_scale=8, head_batch_scale=2, rule="sqrt"
    )
    assert [group["lr"] for group in scaled] == pytest.approx([0.01 * math.sqrt(8), 0.01 * math.sqrt(2)])
    assert round(scaled[0]["weight_decay"], 10) == 0.0014141888


def test_a_head_deep_inside_is_found_and_a_shared_parameter_is_the_heads():
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.ReLU(), nn.Linear(3, 3)))
    model[1][1].weight = model[0].weight
    trunk, head = trunk_and_head_groups(model, "1.1", lr=0.1, weight_decay=0.0)
    assert trunk["params"] == [model[0].bias]
    assert head["params"] == [model[0].weight, model[1][1].bias]


@pytest.mark.parametrize(
    ("head", "message"),
    [
        ("tail", "head='tail' names no submodule of Sequential, which has 0, 1"),
        ("", "head='' names no submodule"),
        ("1", "the head of Sequential has no parameters"),
    ],
)
def test_an_unknown_or_empty_head_is_refused(head, message):
    with pytest.raises(ValueError, match=message):
        trunk_and_head_groups(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), head, lr=0.1, weight_decay=0.0)


def test_a_network_that_is_all_head_is_refused():
    with pytest.raises(ValueError, match="the trunk of Sequential has no parameters"):
        trunk_and_head_groups(nn.Sequential(nn.ReLU(), nn.Linear(2, 2)), "1", lr=0.1, weight_decay=0.0)
