"""LARS: against its formula in float64, and against another implementation."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_dp.optim import LARS
from tests.optim.runs import whole_and_resumed


def problem() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [
        nn.Parameter(torch.randn(shape, dtype=torch.double, generator=generator))
        for shape in ((4, 3), (3,), (2, 3, 2, 2))
    ]


def train(optimizer_of, rates: list[float], closure: bool = False) -> list[torch.Tensor]:
    """The parameters after some steps, with gradients of their own in every step."""
    parameters = problem()
    optimizer = optimizer_of(parameters)
    generator = torch.Generator().manual_seed(3)
    for rate in rates:
        optimizer.param_groups[0]["lr"] = rate
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, dtype=torch.double, generator=generator)
        if closure:
            assert optimizer.step(lambda: torch.tensor(5.0)).item() == 5
        else:
            optimizer.step()
    return [parameter.detach() for parameter in parameters]


def by_hand(rates: list[float], weight_decay: float, momentum: float, trust: float) -> list[torch.Tensor]:
    parameters = [parameter.detach().clone() for parameter in problem()]
    velocities = [torch.zeros_like(parameter) for parameter in parameters]
    generator = torch.Generator().manual_seed(3)
    for rate in rates:
        for w, velocity in zip(parameters, velocities, strict=True):
            gradient = torch.randn(w.shape, dtype=torch.double, generator=generator)
            local = rate
            if w.ndim > 1:
                local *= trust * w.norm().item() / (gradient.norm().item() + weight_decay * w.norm().item())
                gradient = gradient + weight_decay * w
            velocity.copy_(momentum * velocity + local * gradient)
            w -= velocity
    return parameters


OPTIONS = {"weight_decay": 0.05, "momentum": 0.9, "trust_coefficient": 0.02}


@pytest.mark.parametrize("closure", [False, True])
def test_the_update_is_the_papers(closure):
    rates = [0.5, 0.5, 0.1, 0.2, 0.01]
    ours = train(lambda parameters: LARS(parameters, lr=1.0, **OPTIONS), rates, closure)
    for one, other in zip(ours, by_hand(rates, 0.05, 0.9, 0.02), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def test_at_a_constant_rate_it_equals_pytorch_optimizers():
    reference = pytest.importorskip("pytorch_optimizer").LARS
    rates = [0.3] * 6
    ours = train(lambda parameters: LARS(parameters, lr=1.0, **OPTIONS), rates)
    theirs = train(lambda parameters: reference(parameters, lr=1.0, **OPTIONS), rates)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def test_parameters_of_one_dimension_are_neither_scaled_nor_decayed():
    rates = [0.1, 0.05]
    small, large = (
        train(
            lambda parameters, trust=trust: LARS(parameters, lr=1.0, weight_decay=0.5, trust_coefficient=trust), rates
        )
        for trust in (0.001, 1.0)
    )
    assert torch.equal(small[1], large[1])
    assert not torch.equal(small[0], large[0])


def test_gradients_do_not_change_and_parameters_without_one_stay():
    first, second, third = problem()
    first.grad, third.grad = torch.ones_like(first), torch.zeros_like(third)
    before = second.detach().clone()
    LARS([first, second, third], lr=0.1).step()
    assert torch.equal(first.grad, torch.ones_like(first))
    assert torch.equal(second, before)


def test_a_weight_of_zeros_leaves_that_state():
    w = nn.Parameter(torch.zeros(2, 2))
    w.grad = torch.ones(2, 2)
    LARS([w], lr=0.1, weight_decay=0.1).step()
    assert torch.equal(w, torch.full((2, 2), -0.1))


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path):
    whole, resumed = whole_and_resumed(LARS, (2, 3), tmp_path)
    assert torch.equal(resumed, whole)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr=-1.0"),
        ({"weight_decay": -1.0}, "weight_decay=-1.0"),
        ({"trust_coefficient": -1.0}, "trust_coefficient=-1.0"),
        ({"momentum": 1.0}, "momentum=1.0"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        LARS(problem(), **{"lr": 0.1, **options})
