"""Gradients that are summed over passes as they are computed, against autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_dp.strategies.krizhevsky_hybrid.head import ParameterGradients

PASSES = [torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]


def layer() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 5).double()


def backward(sums: ParameterGradients, one: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    loss = sums.linear(x, one.weight, one.bias).square().sum() + one.weight.sum()  # a penalty goes by way of autograd
    return sums.collect(loss, x)


@pytest.mark.parametrize("factor", [1.0, 0.25])
def test_the_sum_over_passes_is_autograds(factor):
    one, plain = layer(), layer()
    sums = ParameterGradients([one.weight, one.bias], factor)
    for x in PASSES:
        of_x = backward(sums, one, x)
        plain_x = x.clone().requires_grad_()
        (plain(plain_x).square().sum() + plain.weight.sum()).backward()
        torch.testing.assert_close(of_x, plain_x.grad, rtol=1e-12, atol=1e-12)
    weight, bias = sums.take()
    torch.testing.assert_close(weight, factor * plain.weight.grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(bias, factor * plain.bias.grad, rtol=1e-12, atol=1e-12)
    assert sums.take() == [None, None]


def test_memory_is_used_again_when_nobody_has_it_and_what_was_in_it_does_not_count():
    one = layer()
    sums = ParameterGradients([one.weight, one.bias])

    def gradient(x: torch.Tensor) -> torch.Tensor:
        backward(sums, one, x)
        weight, _ = sums.take()
        (plain := layer())(x).square().sum().backward()
        torch.testing.assert_close(weight, plain.weight.grad + 1, rtol=1e-12, atol=1e-12)
        return weight

    first = gradient(PASSES[0])
    place = first.data_ptr()
    first.fill_(torch.nan)
    del first
    second = gradient(PASSES[1])
    assert second.data_ptr() == place
    view, value = second[1:], second[1:].clone()
    del second
    third = gradient(PASSES[2])
    assert third.data_ptr() != place
    torch.testing.assert_close(view, value, rtol=0, atol=0)  # the user has kept a part of it


def test_frozen_layers():
    one = layer().requires_grad_(False)
    sums = ParameterGradients([one.weight, one.bias])
    x = PASSES[0].clone().requires_grad_()
    torch.autograd.grad(sums.linear(x, one.weight, one.bias).sum(), x)
    assert sums.take() == [None, None]
    with torch.no_grad():
        torch.testing.assert_close(sums.linear(x, one.weight, one.bias), one(x))


def test_a_backward_within_that_of_a_pass_adds_nothing():
    one, plain = layer(), layer()
    sums = ParameterGradients([one.weight, one.bias])

    def loss(linear: Any, x: torch.Tensor) -> torch.Tensor:
        other, output = linear(2 * x).square().sum(), linear(x)
        output.register_hook(lambda gradient: gradient + torch.autograd.grad(other, x, retain_graph=True)[0].sum())
        return output.tanh().sum()

    x = PASSES[0].clone().requires_grad_()
    of_x = sums.collect(loss(lambda x: sums.linear(x, one.weight, one.bias), x), x)
    expected = torch.autograd.grad(loss(plain, x), [x, *plain.parameters()])
    for actual, one_of_plain in zip([of_x, *sums.take()], expected, strict=True):
        torch.testing.assert_close(actual, one_of_plain, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "penalty",
    [lambda first, second: (first + second).square().sum(), lambda first, second: first.sum() + 2 * second.sum()],
)
def test_parameters_to_which_autograd_gives_one_tensor_or_one_number(penalty):
    parameters = [layer().weight, layer().weight]
    plain = [layer().weight, layer().weight]
    sums = ParameterGradients(parameters, 0.5)
    for _ in range(2):
        sums.collect(penalty(*parameters), PASSES[0])
        penalty(*plain).backward()
    for gradient, one_of_plain in zip(sums.take(), plain, strict=True):
        torch.testing.assert_close(gradient, 0.5 * one_of_plain.grad, rtol=1e-12, atol=1e-12)


def test_a_gradient_of_the_output_that_a_hook_changes_in_place_is_an_error():
    one = layer()
    sums = ParameterGradients([one.weight, one.bias])
    x = PASSES[0].clone().requires_grad_()
    other = x.sum(1, keepdim=True).expand(-1, 5) * 1
    other.register_hook(lambda gradient: gradient.mul_(-1))
    sums.collect((sums.linear(x, one.weight, one.bias) + other).square().sum(), x)
    with pytest.raises(RuntimeError, match="gradient of the output of a linear layer in the head was modified by an"):
        sums.take()


def test_in_any_other_backward_autograd_has_the_gradients_of_any_order():
    one, plain = layer(), layer()
    sums = ParameterGradients([one.weight, one.bias])

    def penalty(linear: Any, x: torch.Tensor, parameters: Any) -> list[torch.Tensor]:
        gradients = torch.autograd.grad(linear(x).tanh().square().sum(), [x, *parameters], create_graph=True)
        total = sum(gradient.square().sum() for gradient in gradients)
        return [*gradients, *torch.autograd.grad(total, [x, *parameters], allow_unused=True)]

    x = PASSES[0].clone().requires_grad_()
    ours = penalty(lambda x: sums.linear(x, one.weight, one.bias), x, list(one.parameters()))
    for actual, expected in zip(ours, penalty(plain, x, list(plain.parameters())), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    assert sums.take() == [None, None]
