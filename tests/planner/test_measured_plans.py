"""Plans of equation 6, run."""

from __future__ import annotations

import dataclasses
from collections import UserDict
from typing import Any

import pytest
import torch
import torchmetrics
from torch import nn

from lightning_dp.models import resnet20
from lightning_dp.planner import Candidate, Choice, apply_algorithms, plan_batch_size, trace_layers
from lightning_dp.planner.convolutions import measured_plans
from lightning_dp.planner.convolutions.measured_plans import StepMeasurement, measure_plans, measure_step, resized
from tests.planner.networks import chosen_algorithm, network


def test_a_plan_is_run_and_gets_the_memory_that_it_really_leaves(monkeypatch):
    model, images = network(), torch.randn(4, 3, 14, 14)
    model(images)
    steps = []

    def measured(model, batch, loss, recompute, repeats):
        formats = [chosen_algorithm(model[place]) for place in (0, 3)]
        steps.append(formats)
        # Together they hold nothing, and take half the time.
        return StepMeasurement(0.5 if formats == ["channels_last"] * 2 else 1.0, 1000)

    # By itself each holds 600 bytes, and there is room for one of them.
    layers = {name: [Choice("backend", 1.0), Choice("channels_last", 0.1, 600)] for name in ("0", "3")}
    monkeypatch.setattr(measured_plans, "measure_step", measured)
    (plan,) = measure_plans(model, images, [Candidate(4, layers, 1000, 1.0)], memory_bytes=2000)
    assert steps[0].count("channels_last") == 1
    assert steps[1] == ["channels_last"] * 2, "the first one held 1000 bytes with 600 of its own: 1600 are left"
    assert plan.algorithms == {"0": "channels_last", "3": "channels_last"}
    assert (plan.step_s, plan.peak_bytes) == (0.5, 1000)


@pytest.mark.ci
def test_a_plan_that_holds_more_than_there_is_does_not_count(monkeypatch):
    model, images = network(), torch.randn(4, 3, 14, 14)
    model(images)

    def measured(model, batch, loss, recompute, repeats):
        if chosen_algorithm(model[0]) == "channels_last":
            raise torch.OutOfMemoryError
        return StepMeasurement(1.0, 1000)

    layers = {name: [Choice("backend", 1.0), Choice("channels_last", 0.1)] for name in ("0", "3")}
    monkeypatch.setattr(measured_plans, "measure_step", measured)
    (plan,) = measure_plans(model, images, [Candidate(4, layers, 1000, 1.0)], memory_bytes=2000)
    assert plan.algorithms["0"] == "backend"
    assert measure_plans(model, images, [Candidate(4, layers, 1000, 1.0)], memory_bytes=999) == []


@pytest.mark.ci
def test_planned_peaks_are_those_of_the_plan_s_step():
    model, images = network(), torch.randn(4, 3, 14, 14)
    model(images)
    plan = plan_batch_size(model, images, (4, 16), memory_bytes=10**9, recompute=(None, "cheap"), repeats=1)
    assert set(plan.images_per_s) == {(4, ""), (4, "cheap"), (16, ""), (16, "cheap")}
    apply_algorithms(model, plan.algorithms)  # also a proof that measuring has taken its own off
    again = measure_step(model, resized(images, plan.batch_size), recompute=plan.recompute or None, repeats=1)
    assert plan.peak_bytes == again.total_bytes


def around(model: nn.Module, batch: Any) -> torch.Tensor:
    return type(model).forward(model, batch).square().mean()


@pytest.mark.ci
def test_recomputation_that_does_nothing_is_not_chosen():
    model, images = resnet20(), torch.randn(4, 3, 16, 16)
    plan = plan_batch_size(model, images, (4,), 10**9, around, recompute=("cheap", None), repeats=1)
    assert set(plan.images_per_s) == {(4, "")}
    with pytest.raises(ValueError, match=r"with recompute=\('cheap',\): each one runs out of memory, or its recomp"):
        plan_batch_size(model, images, (4,), 10**9, around, recompute=("cheap",), repeats=1)


@pytest.mark.ci
def test_plans_are_run_with_their_recomputation():
    model, images = resnet20(), torch.randn(8, 3, 16, 16)
    plan = plan_batch_size(model, images, (8,), 10**9, recompute=("cheap",), repeats=1)
    apply_algorithms(model, plan.algorithms)
    assert plan.recompute == "cheap"
    assert plan.peak_bytes == measure_step(model, images, recompute="cheap", repeats=1).total_bytes
    assert plan.peak_bytes < measure_step(model, images, repeats=1).total_bytes


def test_the_optimizer_s_state_takes_memory_from_the_plans(monkeypatch):
    model, images = network(), torch.randn(4, 3, 14, 14)
    model(images)
    asked = []
    run = measured_plans.measure_plans

    def measure(model, batch, candidates, memory_bytes, loss, repeats):
        asked.append(memory_bytes)
        return run(model, batch, candidates, memory_bytes, loss, repeats)

    monkeypatch.setattr(measured_plans, "measure_plans", measure)
    plan_batch_size(model, images, (4,), 10**9, optimizer_bytes=1000, repeats=1)
    assert asked == [10**9 - 1000]
    with pytest.raises(ValueError, match="optimizer_bytes=-1"):
        plan_batch_size(model, images, (4,), 10**9, optimizer_bytes=-1)


def test_each_algorithm_that_is_fast_enough_is_run_in_all_layers(monkeypatch):
    model, images = network(), torch.randn(4, 3, 14, 14)
    model(images)
    steps = []

    def measured(model, batch, loss, recompute, repeats):
        steps.append(tuple(chosen_algorithm(model[place]) for place in (0, 3)))
        return StepMeasurement(0.5 if steps[-1] == ("channels_last", "channels_last") else 1.0, 1000)

    choices = [Choice("backend", 1.0), Choice("channels_last", 1.4), Choice("fft", 1.6)]
    monkeypatch.setattr(measured_plans, "measure_step", measured)
    (plan,) = measure_plans(model, images, [Candidate(4, {"0": choices, "3": choices}, 1000, 1.0)], memory_bytes=2000)
    assert steps == [("backend", "backend"), ("channels_last", "channels_last")]
    assert plan.algorithms == {"0": "channels_last", "3": "channels_last"}


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = network()
        self.images = torchmetrics.SumMetric()
        self.sizes = torchmetrics.CatMetric()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.images(len(images))
        self.sizes.update(float(len(images)))
        return self.layers(images)


@pytest.mark.ci
def test_metrics_do_not_count_what_is_measured():
    model, images = Counting(), torch.randn(4, 3, 14, 14)
    model(images)
    plan_batch_size(model, images, (2, 4), 10**9, recompute=(None, "cheap"), repeats=1)
    assert model.images.compute() == 4
    assert model.sizes.compute().flatten().tolist() == [4.0]
    assert model.images.update_count == 1


class Following(nn.Module):
    """A teacher that follows its student in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3).requires_grad_(False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.teacher.weight.lerp_(self.student.weight, 0.1)
        return self.student(images) - self.teacher(images)


def test_a_teacher_does_not_move_while_plans_are_measured():
    model, images = Following(), torch.randn(2, 3, 6, 6)
    before = model.teacher.weight.detach().clone()
    trace_layers(model, images)
    plan_batch_size(model, images, (2,), 10**9, repeats=1)
    assert torch.equal(model.teacher.weight, before)


class Viewing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4 * 4 * 4, 2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.conv(images).view(len(images), -1))


def test_an_algorithm_whose_output_the_model_cannot_view_is_left_out(caplog):
    layers = {"conv": [Choice("backend", 1.0), Choice("channels_last", 0.1)]}
    candidate = Candidate(2, layers, 10**9, 1.0)
    (plan,) = measure_plans(Viewing(), torch.randn(2, 3, 6, 6), [candidate], memory_bytes=10**9, repeats=1)
    assert plan.algorithms == {"conv": "backend"}
    assert "A plan with channels_last is left out: the step raised view size is not compatible" in caplog.text


@dataclasses.dataclass
class Labeled:
    image: torch.Tensor
    label: torch.Tensor

    def __getitem__(self, place: int) -> torch.Tensor:
        return self.label if place else self.image


@pytest.mark.parametrize(
    "make",
    [
        tuple,
        list,
        lambda pair: dict(enumerate(pair)),
        lambda pair: UserDict(enumerate(pair)),
        lambda pair: Labeled(*pair),
    ],
    ids=["tuple", "list", "dict", "mapping", "dataclass"],
)
def test_batches_that_only_the_loss_can_read(make):
    model, images, labels = network(), torch.randn(4, 3, 14, 14), torch.arange(4)
    model(images)
    batch = make((images, labels))

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    counted = measure_step(model, batch, loss, repeats=1).total_bytes
    assert counted == measure_step(model, (images, labels), loss, repeats=1).total_bytes
    plan = plan_batch_size(model, batch, (2, 4), 10**9, loss, repeats=1)
    assert set(plan.images_per_s) == {(2, ""), (4, "")}
    assert set(plan.algorithms) == {"0", "3"}
