from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_dp.strategies.layered_sgd.bucket import BucketReduction
from lightning_dp.strategies.layered_sgd.parameter_watch import ParameterWatch
from lightning_dp.strategies.layered_sgd.pending_update import PendingUpdate, PendingUpdates


def staged(whole: bool = False):
    """Two layers with a staged update each bucket of which is already reduced."""
    layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    optimizer = torch.optim.SGD(layers.parameters(), lr=1.0)
    reductions = {}
    for index, layer in enumerate(layers):
        reduction = BucketReduction(index, torch.zeros(()))
        reduction.settle()
        for parameter in layer.parameters():
            parameter.grad = torch.ones_like(parameter)
            reductions[parameter] = reduction
    before = [parameter.detach().clone() for parameter in layers.parameters()]
    updates = PendingUpdates()
    updates.stage(PendingUpdate(optimizer, reductions, optimizer.step if whole else None))
    return layers, optimizer, updates, before


def updated(layers, before) -> list[bool]:
    with torch._C.DisableTorchFunction():
        return [not torch.equal(p, old) for p, old in zip(layers.parameters(), before, strict=True)]


USES = {
    "forward": lambda layer: layer(torch.ones(1, 3)),
    "function": lambda layer: torch.linalg.norm(layer.weight),
    "list": lambda layer: torch._foreach_norm([layer.weight]),
    "method": lambda layer: layer.weight.detach(),
    "index": lambda layer: layer.weight[0],
    "data": lambda layer: layer.weight.data,
    "T": lambda layer: layer.weight.T,
    "mT": lambda layer: layer.weight.mT,
    "H": lambda layer: layer.weight.H,
    "assigned": lambda layer: setattr(layer.weight, "data", layer.weight.data.clone()),
    "item": lambda layer: layer.bias[0].item(),
    "operator": lambda layer: 2 * layer.weight,
    "keyword": lambda layer: torch.nn.functional.linear(torch.ones(1, 3), weight=layer.weight),
    "state dict": lambda layer: layer.state_dict(),
    "copy": lambda layer: layer.weight.data.copy_(layer.weight),
    "numpy": lambda layer: layer.weight.detach().numpy(),
    "print": lambda layer: repr(layer.weight),
    "custom function": lambda layer: Double.apply(layer.weight),
}


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("whole", [False, True])
def test_every_use_of_a_parameter_updates_its_bucket_first(use, whole):
    layers, _, updates, before = staged(whole)
    with ParameterWatch(updates, {}):
        USES[use](layers[1])
        assert updated(layers, before) == ([True] * 4 if whole else [False, False, True, True])


@pytest.mark.parametrize("attribute", ["shape", "dtype", "device", "requires_grad", "_version", "is_leaf", "grad"])
def test_asking_for_anything_but_the_value_updates_nothing(attribute):
    layers, _, updates, before = staged()
    with ParameterWatch(updates, {}):
        getattr(layers[0].weight, attribute)
        assert updated(layers, before) == [False] * 4


def test_using_other_tensors_updates_nothing():
    layers, _, updates, before = staged()
    with ParameterWatch(updates, {}):
        torch.ones(3) @ torch.ones(3)
        assert updated(layers, before) == [False] * 4


def test_the_hyperparameters_are_those_of_the_staging():
    layers, optimizer, updates, before = staged()
    optimizer.param_groups[0]["lr"] = 100.0  # a schedule moves on
    updates.finish()
    assert optimizer.param_groups[0]["lr"] == 100.0
    torch.testing.assert_close(layers[0].weight.detach(), before[0] - 1.0)


def test_data_that_is_put_in_place_of_a_pending_update_stays():
    layers, _, updates, _ = staged()
    with ParameterWatch(updates, {}):
        layers[0].weight.data = torch.zeros(3, 3)
    updates.finish()
    assert torch.equal(layers[0].weight.detach(), torch.zeros(3, 3))


def test_a_group_may_be_added_meanwhile():
    layers, optimizer, updates, before = staged()
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))], "lr": 0.3})
    updates.finish()
    assert updated(layers, before) == [True] * 4
    assert optimizer.param_groups[1]["lr"] == 0.3


def test_a_failing_step_leaves_the_present_hyperparameters():
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    layer.weight.grad = torch.ones_like(layer.weight)

    def fail():
        raise KeyError("lost")

    updates = PendingUpdates()
    updates.stage(PendingUpdate(optimizer, {}, fail))
    optimizer.param_groups[0]["lr"] = 7.0
    with pytest.raises(KeyError):
        updates.finish()
    assert optimizer.param_groups[0]["lr"] == 7.0


def test_the_readers_inference_mode_is_not_the_steps():
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(layer.parameters())
    updates = PendingUpdates()
    for _ in range(2):
        layer.weight.grad = torch.ones_like(layer.weight)
        updates.stage(PendingUpdate(optimizer, {}, None))
        with torch.inference_mode(), torch.autocast("cpu"), ParameterWatch(updates, {}):
            layer(torch.ones(1, 2))
        layer.weight.grad = torch.ones_like(layer.weight)
        optimizer.step()  # in place, outside of inference mode


def test_what_a_hook_changes_in_the_step_stays_changed():
    layers = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layers.parameters(), lr=1.0)

    def step():
        optimizer.param_groups[0]["lr"] = 0.5

    layers.weight.grad = torch.ones_like(layers.weight)
    updates = PendingUpdates()
    updates.stage(PendingUpdate(optimizer, {}, step))
    optimizer.param_groups[0]["weight_decay"] = 7.0
    updates.finish()
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert optimizer.param_groups[0]["weight_decay"] == 7.0


def test_a_failed_reduction_leaves_the_update_pending():
    layers, _, updates, before = staged()
    broken = BucketReduction(0, torch.zeros(()))
    broken.settle(RuntimeError("peer gone"))
    layers[0].weight.grad = torch.ones_like(layers[0].weight)
    update = PendingUpdate(torch.optim.SGD(layers[0].parameters(), lr=1.0), {layers[0].weight: broken}, None)
    updates = PendingUpdates()
    updates.stage(update)
    with pytest.raises(RuntimeError, match="peer gone"):
        updates.finish()
    assert layers[0].weight in updates
    assert updated(layers, before) == [False] * 4
