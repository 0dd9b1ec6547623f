"""Choices for equation 6: which layers are measured, with which algorithms, and how often."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from lightning_dp.models import resnet20
from lightning_dp.planner import algorithms_for
from lightning_dp.planner.convolutions.measured_plans import convolution_choices, measure_convolution


def test_memory_of_algorithms_is_measured():
    layer, shape = nn.Conv2d(8, 16, 3, padding=1), (4, 8, 20, 20)
    kept = {name: measure_convolution(layer, shape, name, repeats=1) for name in algorithms_for(layer)}
    assert all(choice.time_s > 0 for choice in kept.values())
    # channels_last keeps the converted input and filters; FFT the spectra of padded input and padded filters.
    assert kept["channels_last"].num_bytes == pytest.approx(4 * (4 * 8 * 20 * 20 + 16 * 8 * 3 * 3), rel=0.01)
    assert kept["fft"].num_bytes >= 8 * (4 * 8 + 8 * 16) * 22 * 12
    assert kept["backend"].num_bytes == kept["im2col"].num_bytes == 0
    # im2col unfolds the input, for one image at least.
    assert kept["im2col"].workspace_bytes >= 4 * 8 * 9 * 20 * 20


def test_layers_of_equal_sizes_are_measured_once(monkeypatch):
    from lightning_dp.planner.convolutions import measured_plans

    measured = []

    def counted(module, shape, algorithm, *args):
        measured.append((module, shape, algorithm))
        return measured_plans.Choice(algorithm, 1.0)

    monkeypatch.setattr(measured_plans, "measure_convolution", counted)
    choices = convolution_choices(resnet20(), torch.zeros(2, 3, 32, 32))
    assert len(choices) == 19
    # Stem, and for each stage the block's convolutions; the first of stages 2 and 3 has other sizes.
    assert len(measured) == 4 * (1 + 1 + 2 + 2)


def test_a_layer_that_is_called_twice_takes_the_sum(monkeypatch):
    from lightning_dp.planner.convolutions import measured_plans

    monkeypatch.setattr(
        measured_plans,
        "measure_convolution",
        lambda m, shape, name, *rest: measured_plans.Choice(name, 1.0, shape[2], 9),
    )
    conv = nn.Conv2d(3, 3, 3)
    choices = convolution_choices(nn.Sequential(conv, conv), torch.zeros(1, 3, 10, 10))
    assert choices["0"][0] == measured_plans.Choice("backend", 2.0, 10 + 8, 9)


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize("wrap", [nn.utils.weight_norm, lambda layer: prune.l1_unstructured(layer, "weight", 0.3)])
def test_layers_whose_weight_a_hook_computes_are_left_to_the_backend(wrap):
    model, x = nn.Sequential(wrap(nn.Conv2d(3, 4, 3)), nn.Conv2d(4, 4, 3)), torch.randn(2, 3, 9, 9)
    model(x)
    assert algorithms_for(model[0]) == ("backend",)
    assert set(convolution_choices(model, x, repeats=1)) == {"1"}


def test_a_parametrized_layer_without_a_bias_has_algorithms():
    model = nn.Sequential(weight_norm(nn.Conv2d(3, 4, 3, bias=False)), nn.Conv2d(4, 4, 3))
    assert set(convolution_choices(model, torch.randn(2, 3, 9, 9), repeats=1)) == {"0", "1"}


def test_only_layers_that_are_alike_share_a_measurement(monkeypatch):
    from lightning_dp.planner.convolutions import measured_plans

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.third, self.wide = (nn.Conv2d(4, 4, 3, padding=1) for _ in range(4))
            self.wide.double()
            self.normed = weight_norm(nn.Conv2d(4, 4, 3, padding=1))

        def forward(self, x):
            return self.normed(self.wide(self.third(self.second(self.first(x))).double()).float())

    measured = []
    measure = measured_plans.measure_convolution

    def remember(module, *args):
        measured.append(module)
        return measure(module, *args)

    monkeypatch.setattr(measured_plans, "measure_convolution", remember)
    model = Mixed()
    convolution_choices(model, torch.randn(1, 4, 6, 6), repeats=1)
    # The first layer's input needs no gradient, so that it is like no other. The third one is like the second.
    assert {name for name, part in model.named_children() if part in measured} == {"first", "second", "wide", "normed"}


def test_layers_whose_forward_is_replaced_are_left_out():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3))
    model[0].forward = lambda x: nn.functional.conv2d(x, model[0].weight)
    assert set(convolution_choices(model, torch.randn(2, 3, 6, 6), repeats=1)) == {"1"}


def test_frozen_layers_are_measured_without_gradients(monkeypatch):
    from lightning_dp.planner.convolutions import measured_plans

    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 5, 3), nn.Conv2d(5, 5, 1))
    model[:2].requires_grad_(False)
    needed = {}
    measure = measured_plans.measure_convolution

    def remember(module, shape, algorithm, needs_input_grad, repeats):
        needed[module] = needs_input_grad
        return measure(module, shape, algorithm, needs_input_grad, repeats)

    monkeypatch.setattr(measured_plans, "measure_convolution", remember)
    choices = convolution_choices(model, torch.randn(2, 3, 9, 9), repeats=1)
    assert list(needed.values()) == [False, False, False, True]
    assert all(choice.time_s > 0 for choice in choices["0"])
    assert {choice.num_bytes for choice in choices["0"]} == {0}


@pytest.mark.ci
def test_an_algorithm_that_runs_out_of_memory_is_left_out(monkeypatch):
    from lightning_dp.planner.convolutions import measured_plans

    measure = measured_plans.measure_convolution

    def out_of_memory(module, shape, algorithm, *rest):
        if algorithm == "fft":
            raise torch.OutOfMemoryError
        return measure(module, shape, algorithm, *rest)

    monkeypatch.setattr(measured_plans, "measure_convolution", out_of_memory)
    shared = nn.Conv2d(3, 3, 3)
    choices = convolution_choices(nn.Sequential(shared, shared), torch.randn(2, 3, 9, 9), repeats=1)
    assert choices["0"][0].algorithm == "backend"
    assert "fft" not in [choice.algorithm for choice in choices["0"]]


def test_measuring_leaves_the_random_state():
    layer = nn.Conv2d(3, 4, 3, bias=False)
    before = torch.get_rng_state()
    convolution_choices(layer, torch.zeros(2, 3, 9, 9), repeats=1)
    assert torch.equal(torch.get_rng_state(), before)


def test_measuring_leaves_the_vectors_of_spectral_norm():
    model = nn.Sequential(spectral_norm(nn.Conv2d(3, 4, 3)))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    convolution_choices(model, torch.randn(2, 3, 9, 9), repeats=1)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
