from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_dp.models import AlexNet, TrunkAndHead, cifar_alexnet


def num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.fixture(scope="module")
def alexnet() -> AlexNet:
    return AlexNet()


@pytest.mark.ci
def test_alexnet_has_the_published_filters_and_units(alexnet):
    convolutions = [m for m in alexnet.trunk if isinstance(m, nn.Conv2d)]
    assert [m.out_channels for m in convolutions] == [64, 192, 384, 384, 256]
    assert [m.kernel_size[0] for m in convolutions] == [11, 5, 3, 3, 3]
    assert [m.stride[0] for m in convolutions] == [4, 1, 1, 1, 1]
    layers = [m for m in alexnet.head if isinstance(m, nn.Linear)]
    assert [(m.in_features, m.out_features) for m in layers] == [(9216, 4096), (4096, 4096), (4096, 1000)]


@pytest.mark.ci
def test_alexnet_has_62_million_parameters_and_nearly_all_in_the_head(alexnet):
    assert num_parameters(alexnet.trunk) == 3_207_104  # "about 5%", section 3
    assert num_parameters(alexnet.head) == 58_631_144  # "about 95%"
    assert num_parameters(alexnet) == 61_838_248
    assert num_parameters(alexnet.head) / num_parameters(alexnet) == pytest.approx(0.95, abs=0.005)


def test_with_256_filters_in_the_fourth_layer_it_is_about_what_the_text_says(alexnet):
    # The two towers of 2012: filters, and inputs of each, which in layers 2, 4 and 5 come from one tower.
    two_towers = [(96, 3 * 121), (256, 48 * 25), (384, 256 * 9), (384, 192 * 9), (256, 192 * 9)]
    of_2012 = sum(filters * (inputs + 1) for filters, inputs in two_towers) + num_parameters(alexnet.head)
    with torch.device("meta"):
        model = AlexNet(filters=(64, 192, 384, 256, 256))
    assert (num_parameters(model), of_2012) == (61_100_840, 60_965_224)
    assert round(num_parameters(model) / of_2012, 4) == 1.0022  # "0.2% more parameters", section 5
    assert round(num_parameters(alexnet) / of_2012, 3) == 1.014  # footnote 1's filters
    in_head = sum(layer.weight.numel() for layer in alexnet.head if isinstance(layer, nn.Linear))
    towers = sum(filters * inputs * places for (filters, inputs), places in zip(two_towers, PLACES, strict=True))
    assert round(connections(model) / (towers + in_head), 3) == 0.986  # "2.4% fewer connections"
    assert round(connections(alexnet) / (towers + in_head), 3) == 1.158  # footnote 1's filters


PLACES = [55**2, 27**2, 13**2, 13**2, 13**2]  # where each convolution's filters are applied


def connections(model: AlexNet) -> int:
    convolutions = [layer for layer in model.trunk if isinstance(layer, nn.Conv2d)]
    linears = [layer for layer in model.head if isinstance(layer, nn.Linear)]
    in_trunk = sum(layer.weight.numel() * places for layer, places in zip(convolutions, PLACES, strict=True))
    return in_trunk + sum(layer.weight.numel() for layer in linears)


def test_most_computation_is_in_the_trunk(alexnet):
    maps = []
    hooks = [
        m.register_forward_hook(lambda module, _args, out: maps.append(module.weight.numel() * out[0, 0].numel()))
        for m in alexnet.trunk
        if isinstance(m, nn.Conv2d)
    ]
    with torch.no_grad():
        alexnet.trunk(torch.zeros(1, 3, 224, 224))
    for hook in hooks:
        hook.remove()
    trunk, head = sum(maps), sum(m.weight.numel() for m in alexnet.head if isinstance(m, nn.Linear))
    assert 0.90 < trunk / (trunk + head) < 0.95  # "about 90-95% of the computation", section 3


def test_alexnet_halves_the_maps_as_it_should(alexnet):
    widths = []
    hooks = [
        m.register_forward_hook(lambda _module, _args, out: widths.append(out.shape[-1]))
        for m in alexnet.trunk
        if isinstance(m, (nn.Conv2d, nn.MaxPool2d))
    ]
    with torch.no_grad():
        features = alexnet.trunk(torch.randn(2, 3, 224, 224))
    for hook in hooks:
        hook.remove()
    assert widths == [55, 27, 27, 13, 13, 13, 13, 6]
    assert features.shape == (2, 9216)


def test_the_quarter_for_cifar_holds_most_parameters_in_the_head():
    model = cifar_alexnet()
    assert num_parameters(model.trunk) == 200_432
    assert num_parameters(model.head) == 2_109_450
    assert [m.out_channels * 4 for m in model.trunk if isinstance(m, nn.Conv2d)] == [64, 192, 384, 384, 256]
    assert model.trunk(torch.zeros(2, 3, 32, 32)).shape == (2, 1024)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("build", "size"), [(partial(AlexNet, 7, 1), 224), (partial(cifar_alexnet, 7, 1), 32)], ids=["alexnet", "cifar"]
)
def test_the_whole_is_the_head_after_the_trunk_in_either_memory_format(
    build: Callable[[], TrunkAndHead], size: int
) -> None:
    torch.manual_seed(0)
    model = build().eval()
    x = torch.randn(2, 1, size, size)
    with torch.no_grad():
        logits = model(x)
        torch.testing.assert_close(logits, model.head(model.trunk(x)), rtol=0, atol=0)
        model.to(memory_format=torch.channels_last)
        fast = model(x.contiguous(memory_format=torch.channels_last))
    assert logits.shape == (2, 7)
    torch.testing.assert_close(fast, logits, rtol=1e-4, atol=1e-4)
    assert isinstance(list(model.trunk)[-1], nn.Flatten)
    assert {type(m) for m in model.head} == {nn.Dropout, nn.Linear, nn.ReLU}, "what can be sharded by output features"


def test_training_starts_from_the_classes_being_equally_likely_and_with_live_units():
    torch.manual_seed(0)
    model = cifar_alexnet(num_classes=100).eval()
    with torch.no_grad():
        features = model.trunk(torch.randn(64, 3, 32, 32))
        logits = model.head(features)
    assert torch.sigmoid(logits).mean().item() == pytest.approx(0.01, rel=0.1)
    assert 0.1 < features.std() < 3, "the signal neither fades nor grows on its way through the trunk"


def test_dropout_is_as_asked():
    assert [m.p for m in cifar_alexnet(dropout=0.25).head if isinstance(m, nn.Dropout)] == [0.25, 0.25]
    model, x = cifar_alexnet(dropout=0.0), torch.randn(4, 3, 32, 32)
    assert torch.equal(model.train()(x), model.eval()(x))
    model = cifar_alexnet().train()
    assert not torch.equal(model(x), model(x))


@pytest.mark.ci
def test_it_learns_to_tell_ten_pictures_apart():
    torch.manual_seed(0)
    model = cifar_alexnet(dropout=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    pictures, y = F.interpolate(torch.randn(10, 3, 4, 4), scale_factor=8), torch.arange(10)
    for _ in range(40):
        optimizer.zero_grad()
        F.cross_entropy(model(pictures + 0.3 * torch.randn(10, 3, 32, 32)), y).backward()
        optimizer.step()
    assert torch.equal(model(pictures).argmax(1), y)


def test_one_class_and_another_number_of_layers_are_refused():
    with pytest.raises(ValueError, match="num_classes=1 leaves nothing"):
        cifar_alexnet(num_classes=1)
    with pytest.raises(ValueError, match=r"filters=\(64, 192\) must be five"):
        AlexNet(filters=(64, 192))
