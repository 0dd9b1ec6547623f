from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from lightning_dp.models import CifarResNet, resnet20
from lightning_dp.models.resnet import Shortcut


def num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_resnet20_has_the_papers_size():
    assert num_parameters(resnet20()) == 269_722  # "0.27M", table 6
    assert num_parameters(CifarResNet(110)) == 1_727_962  # "1.7M"


def test_a_network_of_depth_6n_plus_2_has_that_many_layers_and_no_more_parameters_than_its_plain_twin():
    model = CifarResNet(32)
    layers = [m for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    assert len(layers) == 32
    assert all(m.kernel_size == (3, 3) for m in layers if isinstance(m, nn.Conv2d)), "shortcuts have no convolution"


@pytest.mark.parametrize("depth", [2, 18, 21])
def test_other_depths_are_refused(depth):
    with pytest.raises(ValueError, match=rf"depth={depth} is not 6n\+2"):
        CifarResNet(depth)


def test_stages_halve_the_image_and_double_the_channels():
    model, shapes = resnet20(num_classes=7), []
    for stage in (model.stage1, model.stage2, model.stage3):
        stage.register_forward_hook(lambda _module, _args, out: shapes.append(tuple(out.shape[1:])))
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 7)
    assert shapes == [(16, 32, 32), (32, 16, 16), (64, 8, 8)]


def test_a_shortcut_that_changes_the_shape_subsamples_pixels_and_pads_channels_with_zeros():
    x = torch.randn(2, 16, 8, 8)
    out = Shortcut(16, 32, stride=2)(x)
    assert out.shape == (2, 32, 4, 4)
    torch.testing.assert_close(out[:, 8:24], x[:, :, ::2, ::2], rtol=0, atol=0)
    assert out[:, :8].count_nonzero() == 0
    assert out[:, 24:].count_nonzero() == 0
    assert Shortcut(16, 16, stride=1)(x) is x


def test_weights_are_initialized_as_in_the_paper():
    model = CifarResNet(56)
    weight = model.stage3[-1].conv2.weight
    assert weight.std().item() == pytest.approx(math.sqrt(2 / (9 * 64)), rel=0.02)
    assert weight.mean().abs() < 1e-3
    assert model.head.bias.count_nonzero() == 0


def test_an_empty_batch_passes():
    assert resnet20().eval()(torch.empty(0, 3, 32, 32)).shape == (0, 10)
