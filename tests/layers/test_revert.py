"""Conversion back to PyTorch's layers."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from lightning_dp.layers import (
    GlobalBatchNorm1d,
    GlobalBatchNorm2d,
    apply_global_batch_norm,
    global_batch_norm_layers,
    revert_global_batch_norm,
    unconverted_layer_names,
)
from tests.layers.test_surgery import Net


def snapshot(model: nn.Module) -> list[tuple]:
    """Everything that a conversion must keep: places, types, tensors, modes, hooks and attributes."""
    return [
        (name, type(module), {key: id(value) for key, value in vars(module).items() if key.startswith("_")})
        for name, module in model.named_modules(remove_duplicate=False)
        if not isinstance(module, nn.modules.batchnorm._BatchNorm)
    ] + [
        (
            name,
            type(module),
            {key: id(value) if isinstance(value, dict) else value for key, value in vars(module).items()},
            [id(tensor) for tensor in (*module.parameters(), *module.buffers())],
        )
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
    ]


def test_reverting_is_the_exact_reverse_of_applying():
    model = Net()
    model.features[1].eval()
    model.features[1].mark = "kept"
    model.features[1].register_forward_hook(lambda *_: None)
    model.blocks["flat"].weight.requires_grad_(False)
    before = snapshot(model)
    outside = [model.features[1], model.blocks["flat"]]
    assert apply_global_batch_norm(model) == 4
    assert snapshot(model) != before
    assert revert_global_batch_norm(model) == 4
    assert snapshot(model) == before
    assert model.again is model.features[1]
    assert model.features[1] is outside[0], "references outside the module tree stay valid"
    assert model.blocks["flat"] is outside[1]
    assert unconverted_layer_names(model) == ["features.1", "features.3", "blocks.flat", "blocks.deep"]
    assert revert_global_batch_norm(model) == 0


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x)).relu()


def scripted(model: nn.Module) -> nn.Module:
    return torch.jit.script(model)


def traced(model: nn.Module) -> nn.Module:
    graph = torch.fx.symbolic_trace(model)
    assert "norm" in [node.target for node in graph.graph.nodes if node.op == "call_module"], "a leaf, as before"
    return graph


def fused(model: nn.Module) -> nn.Module:
    fused = torch.ao.quantization.fuse_modules(model, ["conv", "norm"])
    assert isinstance(fused.norm, nn.Identity)
    return fused


@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")
@pytest.mark.parametrize("transform", [scripted, traced, fused])
def test_a_reverted_model_can_be_transformed(transform):
    model = Small()
    apply_global_batch_norm(model)
    model(torch.randn(5, 3, 6, 6))
    model.eval()
    with pytest.raises(Exception):  # noqa: B017, PT011  each transformation fails in its own way
        transform(copy.deepcopy(model))
    revert_global_batch_norm(model)
    x = torch.randn(2, 3, 6, 6)
    torch.testing.assert_close(transform(model)(x), model(x))


def test_only_the_named_layers_are_reverted():
    model = Net()
    model.blocks["own"] = GlobalBatchNorm1d(4)
    names = unconverted_layer_names(model)
    apply_global_batch_norm(model)
    assert revert_global_batch_norm(model, names) == 4
    assert global_batch_norm_layers(model) == [model.blocks["own"]]
    assert revert_global_batch_norm(model) == 1


def test_deep_copies_and_pickles_can_be_reverted():
    model = Net()
    original = model.features[1]
    apply_global_batch_norm(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301
        assert revert_global_batch_norm(other) == 4
        assert not global_batch_norm_layers(other)
        assert other.features[1] is not original
        assert other.features[1].weight is not model.features[1].weight
    assert len(global_batch_norm_layers(model)) == 4
    revert_global_batch_norm(model)
    assert model.features[1] is original


def test_what_has_changed_since_the_conversion_stays():
    model = nn.Sequential(nn.BatchNorm1d(4))
    original = model[0]
    original.temporary = 1
    apply_global_batch_norm(model)
    model.eval()
    model[0].momentum = 0.5
    model[0].weight = nn.Parameter(torch.full((4,), 2.0))
    model[0].register_forward_hook(lambda *_: None)
    del model[0].temporary
    assert revert_global_batch_norm(model) == 1
    assert model[0] is original
    assert (original.training, original.momentum, original.weight[0].item()) == (False, 0.5, 2.0)
    assert len(original._forward_hooks) == 1
    assert not hasattr(original, "temporary")
    assert vars(original).keys() == vars(nn.BatchNorm1d(4)).keys()


class Activated(GlobalBatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


def patched() -> nn.Module:
    layer = GlobalBatchNorm2d(2)
    layer.forward = lambda x: x
    return layer


def compiled() -> nn.Module:
    layer = GlobalBatchNorm2d(2)
    layer.compile(backend="eager")
    return layer


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Activated(2), "cannot revert layer '1', a Activated: its own forward would be lost"),
        (patched, "cannot revert layer '1', a GlobalBatchNorm2d: its own forward would be lost"),
        (compiled, "cannot revert layer '1', a GlobalBatchNorm2d: it is compiled on its own"),
    ],
    ids=["subclass", "patched", "compiled"],
)
def test_layers_that_would_lose_behavior_are_not_reverted(make, message):
    model = nn.Sequential(GlobalBatchNorm2d(2), make())
    with pytest.raises(ValueError, match=message):
        revert_global_batch_norm(model)
    assert type(model[0]) is GlobalBatchNorm2d
