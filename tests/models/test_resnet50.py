from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_dp.models import ResNet50
from lightning_dp.models.resnet import Bottleneck


def test_it_has_the_published_number_of_parameters():
    with torch.device("meta"):
        model = ResNet50()
    assert sum(parameter.numel() for parameter in model.parameters()) == 25_557_032
    assert sum(isinstance(module, nn.Conv2d) for module in model.modules()) == 49 + 4  # and the four shortcuts'
    assert sum(isinstance(module, nn.BatchNorm2d) for module in model.modules()) == 53


def test_stages_halve_the_image_and_double_the_channels():
    with torch.device("meta"):
        model, shapes = ResNet50(num_classes=7), []
        for stage in model.stages:
            stage.register_forward_hook(lambda _module, _args, out: shapes.append(tuple(out.shape[1:])))
        assert model(torch.empty(2, 3, 224, 224)).shape == (2, 7)
    assert shapes == [(256, 56, 56), (512, 28, 28), (1024, 14, 14), (2048, 7, 7)]


def test_the_stride_is_that_of_the_middle_convolution():
    with torch.device("meta"):
        blocks = [stage[0] for stage in ResNet50().stages]
    assert [(block.conv1.stride[0], block.conv2.stride[0]) for block in blocks] == [(1, 1), (1, 2), (1, 2), (1, 2)]


@pytest.mark.parametrize("zero_init", [False, True])
def test_blocks_start_as_the_identity_if_asked_for(zero_init):
    torch.manual_seed(0)
    block = Bottleneck(64, 16)
    x = torch.rand(2, 64, 4, 4)
    model = ResNet50(2, zero_init)
    assert (model.stages[0][1].bn3.weight == 0).all().item() is zero_init
    if zero_init:
        nn.init.zeros_(block.bn3.weight)
        assert torch.equal(block(x), x)
