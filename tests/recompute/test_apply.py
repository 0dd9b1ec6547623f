"""Switching recomputation on and off, what is refused, and copies of the model."""

from __future__ import annotations

import copy

import pytest
import torch
from lightning_fabric import Fabric
from torch import nn

from lightning_dp.models import AlexNet, resnet20
from lightning_dp.recompute import apply_recompute
from lightning_dp.recompute.policies import find_blocks, segment_ends
from tests.recompute.counting import Operators, counted_step, differing, recomputed, state_of
from tests.recompute.models import Block, Shared, build, loss_of


def test_remove_leaves_nothing_behind():
    model = build("residual")
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    keys = list(model.state_dict())
    handle = apply_recompute(model)
    assert list(model.state_dict()) == keys
    handle.remove()
    handle.remove()
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before
    plain = counted_step(build("residual"), loss_of)
    assert counted_step(model, loss_of)[1] == plain[1]


def test_a_forward_that_was_replaced_before_is_put_back():
    model = build("residual")
    forward = model.forward
    model.forward = lambda x: forward(x) * 2
    replaced = model.forward
    apply_recompute(model).remove()
    assert model.forward is replaced


def test_a_method_that_somebody_puts_back_after_its_handle_was_removed_is_plain():
    """A callback that wraps ``training_step`` may undo that in its ``teardown``, after the one of `Memonger`."""
    model = build("residual")
    handle = apply_recompute(model)
    recorded = model.forward
    model.forward = lambda x: recorded(x) * 2
    handle.remove()
    model.forward = recorded
    plain = counted_step(build("residual"), loss_of)
    assert recomputed(plain[1], counted_step(model, loss_of)[1]) == {}
    apply_recompute(model)
    assert recomputed(plain[1], counted_step(model, loss_of)[1]) != {}
    assert model.forward.__wrapped__.__code__ is nn.Sequential.forward.__code__, "Lightning looks at that"


def test_a_model_that_fabric_has_set_up_recomputes():
    """What is assigned to such a model goes to the module inside, whose forward the model calls."""
    model = Fabric(accelerator="cpu", devices=1).setup_module(build("residual"))
    plain = counted_step(model, loss_of)
    handle = apply_recompute(model)
    assert recomputed(plain[1], counted_step(model, loss_of)[1]) != {}
    handle.remove()
    model.zero_grad()
    assert recomputed(plain[1], counted_step(model, loss_of)[1]) == {}


def test_a_copy_of_the_model_is_plain():
    model = build("residual")
    apply_recompute(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[4].weight.zero_()
        other[4].bias.zero_()
        assert not other(torch.ones(2, 3, 12, 12)).any(), "the copy computes with its own parameters"
    plain = counted_step(build("residual"), loss_of)
    assert recomputed(plain[1], counted_step(other, loss_of)[1]) == {}
    assert recomputed(plain[1], counted_step(model, loss_of)[1]) != {}


def test_another_method_than_forward_can_be_recorded():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = build("residual")

        def training_step(self, step):
            return loss_of(self.net, step)

    plain, net = Net(), Net()
    handle = apply_recompute(net, method="training_step")
    with Operators() as operators:
        net.training_step(0).backward()
    with Operators() as plain_operators:
        plain.training_step(0).backward()
    assert (operators.counts - plain_operators.counts)["native_batch_norm"] == 12
    assert differing(state_of(net), state_of(plain)) == []
    handle.remove()
    assert "training_step" not in vars(net)


def test_an_error_in_forward_leaves_the_model_usable():
    model = build("residual")
    apply_recompute(model)
    with pytest.raises(RuntimeError):
        model(torch.ones(2, 4, 12, 12))
    assert recomputed(counted_step(build("residual"), loss_of)[1], counted_step(model, loss_of)[1]) != {}


@pytest.mark.parametrize(
    ("change", "policy", "message"),
    [
        (lambda model: model, "cheapest", "policy='cheapest' must be one of 'cheap', 'sublinear'"),
        (lambda model: model[1][0].compile(backend="eager"), "cheap", "'1.0', a Block, is compiled or scripted"),
        (lambda model: model.append(torch.jit.script(nn.ReLU())), "cheap", "'5', a .*Script.*is compiled or scripted"),
        (lambda model: apply_recompute(model[1]), "cheap", "'1', a Sequential, recomputes already"),
    ],
)
def test_what_cannot_work_is_refused_by_name(change, policy, message):
    model = build("residual")
    change(model)
    with pytest.raises(ValueError, match=message):
        apply_recompute(model, policy)
    assert "forward" not in vars(model)


def test_a_compiled_model_is_refused():
    with pytest.raises(ValueError, match="use either of the two"):
        apply_recompute(torch.compile(build("residual"), backend="eager"))


@pytest.mark.parametrize(
    ("model", "num_blocks", "ends"),
    [
        (build("residual"), 13, [nn.MaxPool2d, Block, nn.Flatten]),
        (resnet20(), 12, None),
        (Shared(), 5, None),
        (AlexNet(2), 21, None),
    ],
    ids=lambda x: type(x).__name__,
)
def test_blocks_are_found_by_structure(model, num_blocks, ends):
    assert len(find_blocks(model)) == num_blocks
    if ends is not None:
        assert [type(block) for block in find_blocks(model) if block in segment_ends(model)] == ends
