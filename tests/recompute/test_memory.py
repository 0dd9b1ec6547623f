"""Between forward and backward no policy keeps more than plain training; each case is a way in which one once did."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_dp.recompute import apply_recompute
from tests.recompute.counting import Operators, counted_step
from tests.recompute.models import MODELS, Model, build, loss_of

POLICIES = ("cheap", "sublinear")
SMALL_BYTES = 1024


def what_enters_a_segment_is_larger_than_what_comes_of_it(model: Model, x: Tensor) -> Tensor:
    a = model.first(x)
    wide = torch.cat([a * 1] * 10, 1)
    b = model.norm(a)  # the end of a segment
    return torch.sigmoid(wide.view(64, 10, 16).sum(1)) * b


def the_input_is_a_part_of_something_large(model: Model, x: Tensor) -> Tensor:
    return torch.exp(torch.cat([x, x + 1], 1)) * model.first.weight.sum()


def an_output_is_shown_many_times(model: Model, x: Tensor) -> Tensor:
    large = model.first(torch.cat([x] * 90))
    return large.view(90, 64, 16).sum(0).expand(100, 64, 16) * model.last.weight.sum()


def an_output_is_empty(model: Model, x: Tensor) -> Tensor:
    large = model.first(torch.cat([x] * 90))
    return model.last(torch.sigmoid(large[:0]))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "function",
    [
        what_enters_a_segment_is_larger_than_what_comes_of_it,
        the_input_is_a_part_of_something_large,
        an_output_is_shown_many_times,
        an_output_is_empty,
    ],
)
def test_no_more_is_kept_than_in_plain_training(function, policy):
    def kept_bytes(policy: str | None) -> int:
        model = Model(function)
        if policy:
            apply_recompute(model, policy)
        with Operators(model.parameters()) as operators:
            loss = model(torch.randn(64, 4096)[:, :16]).sum()
            found = operators.living_bytes()
            loss.backward()
        return found

    assert kept_bytes(policy) <= kept_bytes(None) + SMALL_BYTES


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", MODELS)
def test_the_peak_of_a_model_is_at_most_that_of_plain_training(name, policy):
    plain, model = build(name), build(name)
    apply_recompute(model, policy)
    assert counted_step(model, loss_of)[3] <= counted_step(plain, loss_of)[3] + SMALL_BYTES
