"""The input of a recorded forward may be a part of a larger tensor, and change afterwards."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_dp._private.torch_names import sequence_number
from lightning_dp.recompute import apply_recompute
from lightning_dp.recompute.values import copy_of
from tests.recompute.counting import differing, state_of

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows from the third on": lambda x: x[2:],
    "every second column": lambda x: x[:, ::2],
    "columns as rows": lambda x: x.t()[1:],
    "a row repeated": lambda x: x[3:4].expand(40, 96),
}


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


class Model(nn.Module):
    """Backward needs values that are larger than the input, and computes them from it, or from memory beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(numbers(4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        windows = x.as_strided((40, 8), (8, 1), x.storage_offset() + 16)
        sums = x.sum(0, keepdim=True)
        hidden = [torch.sigmoid(read + self.shift) for read in (x, windows, sums)]
        x.mul_(3)
        return sum(h.square().mean() for h in hidden)


def trained(view: Callable[[Tensor], Tensor], policy: str | None) -> dict[str, Tensor]:
    model = Model()
    if policy:
        apply_recompute(model, policy)
    model(view(numbers(64, 96))).backward()
    return state_of(model)


@pytest.mark.parametrize("policy", ["cheap", "sublinear"])
@pytest.mark.parametrize("name", [name for name in VIEWS if name != "a row repeated"])
def test_gradients_are_bitwise_the_same(name, policy):
    assert differing(trained(VIEWS[name], policy), trained(VIEWS[name], None)) == []


@pytest.mark.parametrize("name", VIEWS)
def test_a_copy_has_the_values_and_the_strides(name):
    x = VIEWS[name](numbers(64, 96))
    copy = copy_of(x)
    assert torch.equal(copy, x)
    assert copy.stride() == x.stride()
    assert copy.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


class Looks(nn.Module):
    """Reads a small view without a graph, before anything with a graph reads it: PyTorch makes its node no earlier."""

    def forward(self, base: Tensor, row: Tensor) -> Tensor:
        base.mul_(2)
        with torch.no_grad():
            self.read = row * 3
        wave = base.sin()
        self.is_later = sequence_number(row.grad_fn) > sequence_number(wave.grad_fn)
        return wave.sum()


def test_the_nodes_of_the_graph_are_made_in_the_order_of_plain_training():
    model = Looks()
    apply_recompute(model)
    base = numbers(4, 8).requires_grad_() * 1
    model(base, base[0])
    assert model.is_later
