"""Equations 2 to 5, and the measured peak beside them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_dp.models import AlexNet, resnet20
from lightning_dp.planner import LayerKind, MemoryModel, measure_memory, measure_step, trace_layers


def chain() -> nn.Sequential:
    """Two convolutions, a pooling and two fully-connected layers: a chain as the paper assumes it."""
    features = [nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3)]
    return nn.Sequential(*features, nn.Flatten(), nn.Linear(16 * 6 * 6, 20), nn.Linear(20, 10))


def test_the_terms_are_those_of_the_equations():
    model = MemoryModel.from_module(chain(), torch.zeros(2, 3, 32, 32))
    # Equation 1: 32 -> 16 -> 8 -> 6. Four bytes a number, instead of 32 bits.
    assert model.feature_map_bytes(7) == 7 * 4 * (32 * 32 * 3 + 16 * 16 * 8 + 8 * 8 * 8 + 6 * 6 * 16)
    assert model.parameter_bytes() == 3 * 4 * (3 * 3 * 3 * 8 + 8 + 3 * 3 * 8 * 16 + 16)
    weights = 16 * 6 * 6 * 20 + 20 * 10
    assert model.classifier_bytes(7) == 4 * (7 * (20 + 10) + 3 * (weights + 20 + 10))
    assert model.other_bytes(7) == 0
    assert model.unmodeled == ()
    sum_of_terms = model.feature_map_bytes(7) + model.parameter_bytes() + model.classifier_bytes(7)
    assert model.bound_bytes(10**9, 7) == 10**9 - sum_of_terms


def test_a_model_on_the_meta_device_can_be_traced():
    with torch.device("meta"):
        network = AlexNet()
        traced = MemoryModel.from_module(network, torch.zeros(2, 3, 224, 224))
    assert sum(layer.weight_bytes + layer.bias_bytes for layer in traced.layers) == 4 * sum(
        parameter.numel() for parameter in network.parameters()
    )
    kinds = [layer.kind for layer in traced.layers]
    assert kinds.count(LayerKind.CONVOLUTION) == 5
    assert kinds.count(LayerKind.LINEAR) == 3


def test_tracing_leaves_model_and_random_numbers_alone():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    trace_layers(model, torch.randn(2, 3, 8, 8, generator=torch.Generator()))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(module._forward_hooks for module in model.modules())


def test_layers_of_other_kinds_are_counted_as_traced_and_named():
    layers = [nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.GELU(), nn.Flatten()]
    model = MemoryModel.from_module(nn.Sequential(*layers), torch.zeros(2, 3, 10, 10))
    feature_map = 4 * 8 * 8 * 4
    # Batch norm's output and twice 4 parameters, GELU's output. ReLU changes in place, and Flatten is a view.
    assert model.other_bytes(5) == 5 * 2 * feature_map + 3 * 2 * 4 * 4
    first, second = model.unmodeled
    assert first.startswith("BatchNorm2d is not in equations 2 to 4; 1 layers hold")
    assert second.startswith("GELU is not")
    assert second in model.table(5)


def test_a_shared_layer_has_its_parameters_once_and_each_output():
    linear = nn.Linear(6, 6)
    model = MemoryModel.from_module(nn.Sequential(linear, linear), torch.zeros(3, 6))
    assert model.classifier_bytes(3) == 4 * (3 * 2 * 6 + 3 * (36 + 6))


def test_a_bound_that_no_batch_fits_is_an_error():
    model = MemoryModel.from_module(chain(), torch.zeros(2, 3, 32, 32))
    one = model.step_bytes(1)
    assert model.max_batch_size(one) == 1
    assert model.max_batch_size(model.step_bytes(37) + 1) == 37
    with pytest.raises(ValueError, match=rf"memory_bytes={one - 1} holds no batch: one image needs {one} bytes"):
        model.max_batch_size(one - 1)
    with pytest.raises(ValueError, match=r"a batch of 8 needs \d+ bytes .* use a batch of at most 1"):
        model.bound_bytes(one, 8)
    with pytest.raises(ValueError, match="memory_bytes=1 holds no batch: one image needs"):
        model.bound_bytes(1, 8)
    with pytest.raises(ValueError, match="memory_bytes=-5"):
        model.bound_bytes(-5, 1)
    with pytest.raises(ValueError, match="batch_size=-1"):
        model.step_bytes(-1)


def test_input_that_cannot_be_traced_is_refused():
    with pytest.raises(ValueError, match="contains no tensor"):
        trace_layers(nn.Linear(1, 1), [])

    class Aside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.never_called = nn.Linear(1, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    with pytest.raises(ValueError, match="Aside called no module"):
        trace_layers(Aside(), torch.zeros(1))
    with pytest.raises(ValueError, match="1 is scripted, which hides its layers"):
        trace_layers(nn.Sequential(nn.Linear(1, 1), torch.jit.script(nn.ReLU())), torch.zeros(1))


def test_memory_is_measured_to_the_byte():
    def hold_two_keep_one() -> torch.Tensor:
        first = torch.zeros(1000)
        second = first.clone()
        del first
        return second.clone()

    use = measure_memory(hold_two_keep_one)
    assert (use.peak_bytes, use.kept_bytes) == (8000, 4000)
    assert use.result.shape == (1000,)


@pytest.mark.ci
@pytest.mark.parametrize("image_size", [16, 32])
def test_the_peak_of_a_step_grows_with_the_batch_as_measured_on_smaller_ones(image_size):
    model = resnet20()
    peaks = {
        n: measure_step(model, torch.randn(n, 3, image_size, image_size), repeats=1).total_bytes for n in (4, 8, 32)
    }
    per_image = (peaks[8] - peaks[4]) / 4
    assert peaks[4] + 28 * per_image == pytest.approx(peaks[32], rel=0.05)
    held = 4 * sum(parameter.numel() for parameter in model.parameters())
    assert peaks[4] > 2 * held, "parameters and gradients are counted"
