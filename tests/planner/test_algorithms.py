"""Convolution algorithms: all compute the same, the switches reach backward, and costs are measured."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from lightning_dp.models import resnet20
from lightning_dp.planner import algorithms_for, apply_algorithms
from lightning_dp.planner.convolutions.algorithms import convolve
from lightning_dp.planner.convolutions.measured_plans import convolution_choices
from lightning_dp.recompute import apply_recompute

LAYERS = {
    "plain": nn.Conv2d(3, 8, 3, padding=1),
    "stride, no bias": nn.Conv2d(4, 6, (5, 3), stride=(2, 3), padding=(2, 0), bias=False),
    "groups": nn.Conv2d(4, 8, 3, groups=2),
    "dilation": nn.Conv2d(4, 8, 3, dilation=2),
    "even kernel": nn.Conv2d(4, 2, 4, stride=2, padding=1),
}


def results(layer: nn.Conv2d, algorithm: str) -> list[torch.Tensor]:
    """Output, input gradient and parameter gradients, with a random cotangent."""
    generator = torch.Generator().manual_seed(1)
    layer = copy.deepcopy(layer).double()
    x = torch.randn(3, layer.in_channels, 11, 12, dtype=torch.float64, generator=generator, requires_grad=True)
    out = convolve(layer, x, algorithm)
    cotangent = torch.randn(out.shape, dtype=torch.float64, generator=generator)
    return [out.detach(), *torch.autograd.grad(out, [x, *layer.parameters()], cotangent)]


@pytest.mark.parametrize("name", LAYERS)
def test_all_algorithms_compute_the_same(name):
    layer = LAYERS[name]
    expected = results(layer, "backend")
    known = algorithms_for(layer)
    assert known == tuple(a for a in ("backend", "channels_last", "im2col", "fft") if a != "fft" or "fft" in known)
    assert ("fft" in known) == (name not in ("groups", "dilation"))
    for algorithm in known:
        for value, reference in zip(results(layer, algorithm), expected, strict=True):
            torch.testing.assert_close(value, reference, rtol=0, atol=1e-10)


@pytest.mark.parametrize("algorithm", ["channels_last", "im2col", "fft"])
def test_algorithms_work_under_autocast(algorithm):
    layer, x = LAYERS["plain"], torch.randn(2, 3, 6, 6, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, found = layer(x), convolve(layer, x, algorithm)
    assert found.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
    grads = [torch.autograd.grad(out.float().square().sum(), [x, *layer.parameters()]) for out in (expected, found)]
    for value, reference in zip(grads[1], grads[0], strict=True):
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, reference, rtol=0.05, atol=0.1)


@pytest.mark.parametrize("options", [{"padding": "same"}, {"padding": 1, "padding_mode": "circular"}])
def test_padding_that_is_not_a_number_of_zeros_is_left_to_the_backend(options):
    assert algorithms_for(nn.Conv2d(3, 4, 3, **options)) == ("backend",)


def test_the_switch_is_set_in_backward_as_well(monkeypatch):
    seen = []
    backward = torch.ops.aten.convolution_backward

    def watched(*args):
        seen.append(torch.backends.mkldnn.enabled)
        return backward(*args)

    monkeypatch.setattr(torch.ops.aten, "convolution_backward", watched)
    for algorithm in ("im2col", "channels_last"):
        results(LAYERS["plain"], algorithm)
    assert seen == [False, True]
    assert torch.backends.mkldnn.enabled


def test_algorithms_can_be_applied_to_a_model_and_taken_off():
    model, images = resnet20().double(), torch.randn(2, 3, 16, 16, dtype=torch.float64)
    keys = list(model.state_dict())
    expected = gradients(model, images)
    handle = apply_algorithms(model, {"conv1": "fft", "stage1.0.conv1": "im2col", "stage3.2.conv2": "channels_last"})
    found = gradients(model, images)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-10)
    assert list(model.state_dict()) == keys
    assert gradients(copy.deepcopy(model), images).keys() == expected.keys()
    with pytest.raises(ValueError, match="'conv1' is replaced already"):
        apply_algorithms(model, {"conv1": "im2col"})
    handle.remove()
    handle.remove()
    assert not any("forward" in vars(module) for module in model.modules())


def gradients(model: nn.Module, images: torch.Tensor) -> dict[str, torch.Tensor]:
    for parameter in model.parameters():
        parameter.grad = None
    model.eval()
    model(images).square().mean().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def test_a_chosen_convolution_can_be_computed_again():
    """Memonger keeps what somebody's autograd.Function computes; that of an algorithm is this package's own."""
    blocks = [nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(9)]
    net, x = nn.Sequential(*blocks), torch.randn(2, 4, 8, 8)

    def dropped_bytes(algorithm: str) -> int:
        applied = apply_algorithms(net, {f"{number}.0": algorithm for number in range(9)})
        recomputation = apply_recompute(net, "sublinear")
        net(x).square().mean().backward()
        recomputation.remove()
        applied.remove()
        return recomputation.dropped_bytes

    assert dropped_bytes("im2col") == dropped_bytes("backend") > 0


def test_a_copy_of_the_model_uses_its_own_parameters():
    model = nn.Sequential(nn.Conv2d(1, 1, 1, bias=False))
    apply_algorithms(model, {"0": "im2col"})
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied[0].weight.zero_()
    x = torch.ones(1, 1, 2, 2)
    assert not copied(x).any()
    assert model(x).any()


@pytest.mark.parametrize(
    ("algorithms", "message"),
    [
        ({"nothing": "fft"}, "'nothing' is no layer of this model"),
        ({"bn1": "fft"}, "'bn1' is a BatchNorm2d"),
        ({"conv1": "winograd"}, "'winograd' cannot compute 'conv1'; use one of 'backend', 'channels_last'"),
    ],
)
def test_what_cannot_be_applied_is_refused_by_name(algorithms, message):
    model = resnet20()
    with pytest.raises(ValueError, match=message):
        apply_algorithms(model, {"stage1.0.conv1": "fft", **algorithms})
    assert not any("forward" in vars(module) for module in model.modules()), "nothing is applied"


def test_an_algorithm_that_cannot_compute_a_layer_is_refused():
    with pytest.raises(ValueError, match="algorithm='fft' cannot compute Conv2d"):
        convolve(LAYERS["dilation"], torch.zeros(1, 4, 9, 9), "fft")


class Standardized(nn.Conv2d):
    """A convolution of another weight than its own."""

    def forward(self, input):
        return self._conv_forward(input, self.weight - self.weight.mean(), self.bias)


def test_a_subclass_of_conv2d_is_left_to_its_own_forward():
    layer = Standardized(3, 4, 3)
    assert algorithms_for(layer) == ("backend",)
    model, x = nn.Sequential(layer), torch.randn(2, 3, 6, 6)
    expected = model(x)
    choices = convolution_choices(model, x, repeats=1)
    assert choices == {}, "there is nothing to choose"
    apply_algorithms(model, {"0": "backend"})
    assert torch.equal(model(x), expected)
    assert len(algorithms_for(weight_norm(nn.Conv2d(3, 4, 3)))) > 1, "a parametrized Conv2d is one"


@pytest.mark.parametrize("algorithm", ["channels_last", "im2col", "fft"])
def test_spectral_norm_takes_one_step_of_its_iteration_in_each_forward(algorithm):
    torch.manual_seed(0)
    plain = nn.Sequential(spectral_norm(nn.Conv2d(3, 4, 3))).double()
    model, x = copy.deepcopy(plain), torch.randn(2, 3, 6, 6, dtype=torch.float64)
    apply_algorithms(model, {"0": algorithm})
    for _ in range(2):
        torch.testing.assert_close(model(x), plain(x), rtol=0, atol=1e-10)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=0, atol=1e-10)


class Masked(nn.Conv2d):
    """A convolution with a second argument and a second result."""

    def forward(self, input, mask):
        return super().forward(input * mask), mask


class Masking(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Masked(3, 4, 3), nn.Conv2d(4, 4, 3)

    def forward(self, images):
        return self.second(input=self.first(images, images > 0)[0])


def test_layers_with_other_arguments_and_keywords():
    model, x = Masking(), torch.randn(2, 3, 9, 9)
    expected = model(x)
    assert set(convolution_choices(model, x, repeats=1)) == {"second"}
    apply_algorithms(model, {"first": "backend", "second": "im2col"})
    torch.testing.assert_close(model(x), expected)


def test_single_images_and_empty_batches():
    for algorithm in algorithms_for(LAYERS["plain"]):
        image = torch.randn(3, 6, 6)
        torch.testing.assert_close(convolve(LAYERS["plain"], image, algorithm), LAYERS["plain"](image))
        assert convolve(LAYERS["plain"], torch.randn(0, 3, 6, 6), algorithm).shape == (0, 8, 6, 6)

    class OneByOne(nn.Sequential):
        def forward(self, images):
            return torch.stack([super(OneByOne, self).forward(image) for image in images])

    assert set(convolution_choices(OneByOne(nn.Conv2d(3, 4, 3)), torch.randn(2, 3, 6, 6), repeats=1)) == {"0"}


def test_a_single_image_with_the_strides_of_channels_last_has_the_right_gradient():
    layer = copy.deepcopy(LAYERS["groups"]).double()
    x = torch.randn(2, 4, 6, 6, dtype=torch.float64).to(memory_format=torch.channels_last)[0]
    for algorithm in algorithms_for(layer):
        outputs = [layer(x.contiguous()), convolve(layer, x, algorithm)]
        expected, found = (torch.autograd.grad(out.square().sum(), layer.weight)[0] for out in outputs)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("size", [(2, 9), (9, 1)])
def test_a_kernel_that_is_larger_than_the_image_is_an_error_of_each_algorithm(size):
    layer = nn.Conv2d(3, 2, 3)
    for algorithm in algorithms_for(layer):
        with pytest.raises(RuntimeError, match=r"(?i)kernel"):
            convolve(layer, torch.randn(1, 3, *size), algorithm)


def test_float64_stays_float64_under_autocast():
    layer, x = copy.deepcopy(LAYERS["plain"]).double(), torch.randn(2, 3, 6, 6, dtype=torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert {convolve(layer, x, algorithm).dtype for algorithm in algorithms_for(layer)} == {torch.float64}


def test_a_second_removal_leaves_the_algorithms_of_others():
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    first = apply_algorithms(model, {"0": "fft"})
    first.remove()
    second = apply_algorithms(model, {"0": "im2col"})
    first.remove()
    assert "forward" in vars(model[0])
    second.remove()
    assert "forward" not in vars(model[0])


def test_a_model_can_be_compiled_after_its_algorithms_were_chosen():
    x = torch.randn(2, 3, 6, 6)
    for algorithm in algorithms_for(LAYERS["plain"]):
        model = nn.Sequential(copy.deepcopy(LAYERS["plain"]), nn.ReLU())
        apply_algorithms(model, {"0": algorithm})
        expected = model(x)
        assert torch.equal(torch.compile(model, backend="eager")(x), expected)


def test_a_compiled_model_is_refused_by_name():
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    model[0].compile(backend="eager")
    with pytest.raises(
        ValueError, match="0, a Conv2d, is compiled or scripted: torch.compile chooses algorithms itself"
    ):
        apply_algorithms(model, {"0": "im2col"})
