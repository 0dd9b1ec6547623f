"""Kernels that PyTorch does not know, such as those of Triton, overwrite tensors without a new version.

NumPy stands for them here. A tensor that was overwritten so must not be computed again by the operator that made it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from lightning_dp._private.torch_names import without_modes
from lightning_dp.recompute import apply_recompute
from tests.recompute.counting import differing, state_of
from tests.recompute.models import Model


class CrossEntropy(Function):
    """Leaves its gradient in the place of its input, as that of Liger kernels."""

    @staticmethod
    def forward(ctx, x, y):  # type: ignore[no-untyped-def]
        loss = F.cross_entropy(x, y)
        gradient = (x.softmax(1) - F.one_hot(y, x.shape[1])) / len(y)
        np.copyto(x.detach().numpy(), gradient.numpy())
        ctx.save_for_backward(x.detach())
        return loss

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        return ctx.saved_tensors[0] * dy, None


class Tripled(Function):
    """Changes a copy, and returns also a mask that it has written into zeros."""

    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        y = x.t().contiguous()
        np.multiply(y.numpy(), 3, out=y.numpy())
        mask = y * 0
        mask.numpy()[::2] = 1
        ctx.mark_non_differentiable(mask)
        return y.t(), mask.t()

    @staticmethod
    def backward(ctx, dy, _):  # type: ignore[no-untyped-def]
        return 3 * dy


class Product(Function):
    """Overwrites a product, and saves it without returning it."""

    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        y = x @ x.t()
        np.multiply(y.numpy(), 2, out=y.numpy())
        ctx.save_for_backward(y)
        return x.sin()

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        return ctx.saved_tensors[0] @ dy


def loss_in_place_of_the_logits(model: Model, x: Tensor) -> Tensor:
    logits = F.relu(model.first(x)).view(4, 6, 16)[:, :-1].contiguous().view(20, 16)
    return CrossEntropy.apply(logits, torch.arange(20) % 16)


def copy_that_is_changed(model: Model, x: Tensor) -> Tensor:
    y, mask = Tripled.apply(model.first(x).sin())
    return model.last((y * mask * 2).sin())


def product_that_is_changed(model: Model, x: Tensor) -> Tensor:
    return model.last(Product.apply(model.first(x)).cos())


def mask_from_numpy(model: Model, x: Tensor) -> Tensor:
    masks = [torch.zeros(24, 16), torch.ones(24, 16), torch.full((24, 16), 3.0)]
    masks += [torch.zeros_like(x), torch.ones_like(x), torch.full_like(x, 3.0)]
    out = model.first(x)
    for mask in masks:
        mask.numpy()[::2] = 2
        out = out * mask
    return model.last(out)


@pytest.mark.parametrize("policy", ["cheap", "sublinear"])
@pytest.mark.parametrize(
    "function", [loss_in_place_of_the_logits, copy_that_is_changed, product_that_is_changed, mask_from_numpy]
)
def test_what_a_foreign_kernel_has_written_is_kept(function: Callable[[Model, Tensor], Tensor], policy: str):
    def trained(policy: str | None) -> dict[str, Tensor]:
        model = Model(function)
        if policy:
            apply_recompute(model, policy)
        x = torch.randn(24, 16, generator=torch.Generator().manual_seed(1))
        model(x).square().mean().backward()
        return state_of(model)

    assert differing(trained(policy), trained(None)) == []


@pytest.mark.parametrize("policy", ["cheap", "sublinear"])
def test_a_weight_that_was_updated_unseen_after_its_backward_can_be_changed(policy: str):
    """As a Wasserstein GAN clips its critic within a training step, under layered SGD, whose updates no mode sees."""

    def train(model: Model, x: Tensor) -> Tensor:
        scores = model.last(model.norm(model.first(x)))
        scores.square().mean().backward()
        with without_modes(), torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad)
        for parameter in model.parameters():
            parameter.data.clamp_(-0.1, 0.1)
        return scores

    def trained(policy: str | None) -> dict[str, Tensor]:
        model = Model(train)
        model.last = nn.Linear(16, 1)  # a weight that is small enough to be kept with what is computed from it
        if policy:
            apply_recompute(model, policy)
        model(torch.randn(24, 16, generator=torch.Generator().manual_seed(1)))
        return state_of(model)

    assert differing(trained(policy), trained(None)) == []
