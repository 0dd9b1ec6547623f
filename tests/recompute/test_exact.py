"""Training with recomputation is bitwise the same as without: gradients, parameters, buffers, random numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_dp.recompute import apply_recompute
from tests.recompute.counting import Operators, differing, recomputed, state_of
from tests.recompute.models import MODELS, build, loss_of

POLICIES = ("cheap", "sublinear")
Apply = Callable[[nn.Module], object]


def train(model: nn.Module, steps: int = 10, accumulate: int = 1, bf16: bool = False) -> dict[str, Tensor]:
    """Train with momentum, and return the state with the last step's gradients."""
    torch.manual_seed(5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    for step in range(steps * accumulate):
        if step % accumulate == 0:
            optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16) if bf16 else nullcontext():
            loss = loss_of(model, step)
        loss.backward()
        if (step + 1) % accumulate == 0:
            optimizer.step()
    return state_of(model)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", MODELS)
def test_ten_steps_are_bitwise_the_same(name, policy):
    model = build(name)
    plain = copy.deepcopy(model)
    handle = apply_recompute(model, policy)
    assert differing(train(model), train(plain)) == []
    handle.remove()


@pytest.mark.ci
@pytest.mark.parametrize("policy", POLICIES)
def test_bf16_and_accumulation_are_bitwise_the_same(policy):
    for options in ({"bf16": True}, {"accumulate": 3}, {"bf16": True, "accumulate": 2}):
        model = build("residual")
        plain = copy.deepcopy(model)
        apply_recompute(model, policy)
        assert differing(train(model, 3, **options), train(plain, 3, **options)) == [], options


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_each_dtype_and_memory_format_is_bitwise_the_same(policy, dtype, memory_format):
    def gradients(apply: bool) -> dict[str, Tensor]:
        model = build("residual").to(dtype=dtype, memory_format=memory_format)
        if apply:
            apply_recompute(model, policy)
        x = torch.randn(4, 3, 12, 12, generator=torch.Generator().manual_seed(1)).to(dtype)
        (model(x.contiguous(memory_format=memory_format)) ** 2).sum().backward()
        return state_of(model)

    assert differing(gradients(True), gradients(False)) == []


def test_the_test_sees_that_statistics_move_twice():
    """`torch.utils.checkpoint` does that (torch issue #96136)."""
    model = build("residual")
    plain = copy.deepcopy(model)
    forward = model.forward
    model.forward = lambda x: checkpoint(forward, x, use_reentrant=False)
    found = differing(train(model, 1), train(plain, 1))
    assert "1.0.bn1.running_mean" in found
    assert "1.0.bn1.num_batches_tracked" in found
    assert not any(name.endswith("grad") for name in found)


def test_the_tests_models_recompute_something():
    """Else all of the above would hold for a library that does nothing."""

    def backward_of(name: str, policy: str | None) -> dict[str, int]:
        model = build(name)
        if policy:
            apply_recompute(model, policy)
        with Operators() as operators:
            loss = loss_of(model)
            operators.counts.clear()
            loss.backward()
        return operators.counts

    for name in MODELS:
        plain = backward_of(name, None)
        for policy in POLICIES:
            assert recomputed(plain, backward_of(name, policy)), (name, policy)
        assert recomputed(plain, backward_of(name, None)) == {}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_graph_can_be_run_through_twice_and_differentiated_twice(policy):
    def gradients(apply: bool) -> list[Tensor]:
        model = build("dropout").double().eval()
        if apply:
            apply_recompute(model, policy)
        x = torch.randn(2, 3, 12, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        x.requires_grad_()
        out = model(x).square().sum()
        (first,) = torch.autograd.grad(out, x, retain_graph=True)
        (second,) = torch.autograd.grad(out, x, create_graph=True)
        second.square().sum().backward()
        return [first, second.detach(), x.grad]

    for actual, expected in zip(gradients(True), gradients(False), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("policy", POLICIES)
def test_training_mode_may_change_between_forward_and_backward(policy):
    model = build("dropout")
    plain = copy.deepcopy(model)
    apply_recompute(model, policy)
    states = []
    for net in (model, plain):
        torch.manual_seed(1)
        loss = loss_of(net)
        net.eval()
        loss.backward()
        states.append(state_of(net))
    assert differing(*states) == []


def test_a_parameter_that_changes_before_backward_is_refused_as_in_plain_training():
    for policy in (None, *POLICIES):
        model = build("residual")
        if policy:
            apply_recompute(model, policy)
        loss = loss_of(model)
        with torch.no_grad():
            model[1][0].conv1.weight.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
