"""Candidates of plans: steps and layers, measured at each batch size."""

from __future__ import annotations

from collections import UserDict
from typing import NamedTuple

import pytest
import torch
from torch import nn

from lightning_dp.models import resnet20
from lightning_dp.planner import apply_algorithms, choose_batch_size, convolution_choices
from lightning_dp.planner.convolutions import measured_plans
from lightning_dp.planner.convolutions.measured_plans import measure_candidates, measure_step, resized
from lightning_dp.planner.convolutions.program import held_bytes
from tests.planner.networks import network


def test_measured_candidates_lead_to_a_plan_that_can_be_applied():
    model, images = network(), torch.randn(4, 3, 14, 14)
    model(images)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model[0].weight.grad = torch.ones_like(model[0].weight)
    large = measure_step(model, resized(images, 16), repeats=1).total_bytes
    # 16 images fit, 32 do not: memory grows linearly.
    measured = measure_candidates(
        model, images, (8, 4, 16, 32), memory_bytes=large + large // 4, recompute=(None, "cheap"), repeats=1
    )
    plain = [candidate.batch_size for candidate in measured if not candidate.recompute]
    assert plain == [4, 8, 16]
    assert all(name in ("0", "3") for candidate in measured for name in candidate.layers)
    plan = choose_batch_size(measured)
    with torch.no_grad():
        expected = model.eval()(images)
        apply_algorithms(model, plan.algorithms)
        torch.testing.assert_close(model(images), expected, rtol=1e-4, atol=1e-5)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model[0].weight.grad.eq(1).all(), "measuring keeps gradients"
    assert model[3].weight.grad is None


def test_using_the_backend_everywhere_takes_the_memory_that_was_measured():
    model, images = network(), torch.randn(4, 3, 14, 14)
    model(images)
    total = measure_step(model, images, repeats=1).total_bytes
    (candidate,) = measure_candidates(model, images, [4], memory_bytes=10**9, optimizer_bytes=1000, repeats=1)
    used = [choices[0] for choices in candidate.layers.values()]
    assert candidate.bound_bytes == 10**9 - 1000 - total + held_bytes(used)


def test_memory_that_holds_no_batch_is_refused_before_a_plan():
    model, images = network(), torch.randn(4, 3, 14, 14)
    model(images)
    with pytest.raises(ValueError, match=r"holds none of batch_sizes=\[4, 8\] .*: the smallest needs"):
        measure_candidates(model, images, [8, 4], memory_bytes=1000, repeats=1)
    with pytest.raises(ValueError, match="memory_bytes=-1"):
        measure_candidates(model, images, [8, 4], memory_bytes=-1)
    with pytest.raises(ValueError, match="batch_sizes=0"):
        measure_candidates(model, images, [0], memory_bytes=10**9)


def test_lists_of_sizes_and_policies_are_checked_first():
    for sizes, policies in (((), (None,)), ((4,), ()), ((4,), "cheap"), ((4,), (None, None))):
        with pytest.raises(ValueError, match="give at least one of each"):
            measure_candidates(network(), torch.randn(4, 3, 14, 14), sizes, 10**9, recompute=policies)


def test_recomputation_that_the_loss_goes_around_is_named(caplog):
    model, images = resnet20(), torch.randn(4, 3, 16, 16)
    measure_step(model, images, recompute="cheap", repeats=1)
    assert not caplog.records
    measure_step(model, images, lambda m, x: m.forward(x).square().mean(), "cheap", repeats=1)
    assert not caplog.records, "forward is what recomputes"
    measure_step(model, images, lambda m, x: type(m).forward(m, x).square().mean(), "cheap", repeats=1)
    assert "recompute='cheap' keeps everything in this step" in caplog.text


@pytest.mark.ci
def test_a_host_without_memory_for_an_algorithm_leaves_it_out(monkeypatch):
    model, images = network(), torch.randn(4, 3, 14, 14)
    model(images)
    run = measured_plans.measure_convolution

    def measured(module, shape, algorithm, *args):
        if algorithm == "fft":
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4294967296 bytes")
        if algorithm == "im2col":
            raise RuntimeError("another error")
        return run(module, shape, algorithm, *args)

    monkeypatch.setattr(measured_plans, "measure_convolution", measured)
    with pytest.raises(RuntimeError, match="another error"):
        measure_candidates(model, images, (4,), 10**9, repeats=1)
    monkeypatch.setattr(measured_plans, "algorithms_for", lambda module: ("backend", "fft"))
    (candidate,) = measure_candidates(model, images, (4,), 10**9, repeats=1)
    assert [choice.algorithm for choice in candidate.layers["0"]] == ["backend"]


@pytest.mark.ci
def test_spectra_that_do_not_fit_are_not_tried():
    layer = nn.Sequential(nn.Conv2d(64, 64, 1))
    images = torch.randn(1, 64, 30, 30)  # 64 x 64 filters as spectra of 30 x 16 complex numbers: 15.7 MB
    names = [[c.algorithm for c in convolution_choices(layer, images, 1, memory_bytes=b)["0"]] for b in (10**7, 10**8)]
    assert "fft" not in names[0]
    assert "fft" in names[1]


def test_sizes_after_one_that_does_not_fit_are_not_run(monkeypatch):
    model, images = network(), torch.randn(4, 3, 14, 14)
    model(images)
    sizes = []
    run = measure_step
    monkeypatch.setattr(
        measured_plans, "measure_step", lambda model, batch, *args: sizes.append(len(batch)) or run(model, batch, *args)
    )
    with pytest.raises(ValueError, match="memory_bytes=1000 holds none"):
        measure_candidates(model, images, (4, 8, 16), 1000, repeats=1)
    assert sizes == [4]
    with pytest.raises(ValueError, match="policy='chep'"):
        measure_candidates(model, images, (4,), 10**9, recompute=(None, "chep"))
    assert sizes == [4], "refused before anything is run"


class Pair(NamedTuple):
    image: torch.Tensor
    scale: torch.Tensor


def test_resizing_keeps_containers_and_memory_formats():
    image = torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    larger = resized(UserDict(pair=Pair(image, torch.tensor(2.0))), 5)["pair"]
    assert larger.image.shape == (5, 3, 4, 4)
    assert larger.image.is_contiguous(memory_format=torch.channels_last)
    assert larger.scale == 2
    with pytest.raises(ValueError, match="no images were found in the batch, a object"):
        resized(object(), 5)


def test_a_batch_is_resized_by_its_rows():
    batch = {"image": torch.arange(3), "pair": (torch.arange(6).view(3, 2), "name")}
    larger = resized(batch, 5)
    assert larger["image"].tolist() == [0, 1, 2, 0, 1]
    assert larger["pair"][0].shape == (5, 2)
    assert larger["pair"][1] == "name"
    assert resized(batch, 2)["image"].tolist() == [0, 1]
    no_boxes = torch.zeros(0, 4)
    assert resized((torch.arange(3), no_boxes), 5)[1] is no_boxes
