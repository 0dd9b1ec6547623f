"""Parameter groups with and without weight decay, and schedules with a warm-up."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.optim import SGD
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_dp.models import ResNet50
from lightning_dp.optim import LARS, multistep_with_warmup, polynomial_with_warmup, weight_decay_groups
from tests.optim.runs import rates_of


def test_only_weights_decay_and_the_rate_grows_with_the_batch():
    with torch.device("meta"):
        model = ResNet50()
    decayed, rest = weight_decay_groups(model, lr=0.1, weight_decay=1e-4, batch_size=8192)
    assert [group["lr"] for group in (decayed, rest)] == [pytest.approx(3.2)] * 2
    assert (decayed["weight_decay"], rest["weight_decay"]) == (1e-4, 0.0)
    assert len(decayed["params"]) == 53 + 1  # convolutions and the linear layer
    assert len(rest["params"]) == 2 * 53 + 1  # batch norm, and the bias
    assert {id(p) for group in (decayed, rest) for p in group["params"]} == {id(p) for p in model.parameters()}


@pytest.mark.parametrize(
    "make",
    [
        lambda model: weight_decay_groups(model, lr=0.1, weight_decay=0.1),
        lambda model: LARS(model.parameters(), lr=0.1),
    ],
)
def test_shards_that_fsdp_1_has_flattened_are_refused(make):
    """Weights have one dimension there: none would decay, and LARS would scale no update. FSDP2 keeps their shapes."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        model = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"), use_orig_params=True)
        with pytest.raises(ValueError, match=r"FSDP1 \(FSDPStrategy\) has flattened .* use FSDP2"):
            make(model)
        make(fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (2,))))
    finally:
        dist.destroy_process_group()


def test_a_group_without_parameters_is_left_out():
    (group,) = weight_decay_groups(nn.Linear(2, 2, bias=False), lr=0.1, weight_decay=0.1)
    assert (group["name"], group["lr"]) == ("decayed", 0.1)
    with pytest.raises(ValueError, match="k=0.0 must be a positive number"):
        weight_decay_groups(nn.Linear(2, 2), lr=0.1, weight_decay=0.1, batch_size=0)


def test_the_rate_warms_up_and_falls_at_the_milestones():
    rates = rates_of(multistep_with_warmup, 90, lr=3.2)  # a step is an epoch
    assert rates[:6] == pytest.approx([0.1 + (3.2 - 0.1) * n / 5 for n in range(6)])
    assert rates[5:30] == pytest.approx([3.2] * 25)
    assert rates[30:60] == pytest.approx([0.32] * 30)
    assert rates[60:80] == pytest.approx([0.032] * 20)
    assert rates[80:] == pytest.approx([0.0032] * 10)


def test_a_rate_below_the_start_of_the_warm_up_stays():
    assert rates_of(multistep_with_warmup, 90, lr=0.025)[:30] == pytest.approx([0.025] * 30)


def test_the_rate_falls_as_a_polynomial():
    rates = rates_of(polynomial_with_warmup, 10, warmup=0.2, power=2.0)
    assert rates == pytest.approx([0, 0.5, *((1 - n / 8) ** 2 for n in range(8))])
    assert rates_of(polynomial_with_warmup, 4, warmup=0.0, power=1.0) == pytest.approx([1, 0.75, 0.5, 0.25])


def test_each_group_has_its_own_warm_up():
    groups = [{"params": [nn.Parameter(torch.ones(1))], "lr": lr} for lr in (0.2, 0.4)]
    optimizer = SGD(groups, lr=1.0)
    schedule = multistep_with_warmup(optimizer, 90, start_lr=0.1)
    seen = []
    for _ in range(6):
        seen.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    assert seen[0] == pytest.approx([0.1, 0.1])
    assert seen[5] == pytest.approx([0.2, 0.4])


def test_a_schedule_resumes_from_plain_values(tmp_path):
    optimizer = SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    schedule = multistep_with_warmup(optimizer, 90)
    for _ in range(40):
        optimizer.step()
        schedule.step()
    torch.save(schedule.state_dict(), tmp_path / "state.pt")
    again = multistep_with_warmup(SGD([nn.Parameter(torch.ones(1))], lr=1.0), 90)
    again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    again.optimizer.step()
    again.step()
    assert again.get_last_lr() == pytest.approx([0.1])
    assert again.last_epoch == 41


def test_a_schedule_may_be_made_after_the_state_of_the_optimizer_was_loaded():
    optimizer = SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    schedule = multistep_with_warmup(optimizer, 90)
    for _ in range(2):  # of five steps of warm-up
        optimizer.step()
        schedule.step()
    again = SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    again.load_state_dict(optimizer.state_dict())
    continued = multistep_with_warmup(again, 90)
    continued.load_state_dict(schedule.state_dict())
    for each in (optimizer, again, schedule, continued):
        each.step()
    assert continued.get_last_lr() == schedule.get_last_lr()


@pytest.mark.parametrize(
    ("schedule_of", "options", "message"),
    [
        (multistep_with_warmup, {"total_steps": 0}, "total_steps=0 must be a positive"),
        (multistep_with_warmup, {"milestones": (0.5, 0.25)}, "must ascend, between 0 and 1"),
        (multistep_with_warmup, {"milestones": (30, 60)}, "must ascend, between 0 and 1"),
        (multistep_with_warmup, {"warmup": 5}, "warmup=5 must be a fraction"),
        (multistep_with_warmup, {"start_lr": -0.1}, "start_lr=-0.1 must not be negative"),
        (polynomial_with_warmup, {"power": 0}, "power=0 must be positive"),
        (polynomial_with_warmup, {"warmup": 1}, "warmup=1 must be a fraction"),
    ],
)
def test_an_invalid_schedule_is_refused(schedule_of, options, message):
    optimizer = SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    with pytest.raises(ValueError, match=message):
        schedule_of(optimizer, **{"total_steps": 90, **options})
