"""PyTorch's double backward takes views of plain numbers: the conjugate of a complex factor."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_dp.recompute import apply_recompute


class Factor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1 + 1j, 2, 3 - 1j], dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        penalty = torch.autograd.grad((x * (0.5 - 0.5j) * self.weight).real.square().sum(), x, create_graph=True)[0]
        return penalty.real.square().sum()


def gradient(module: Factor) -> Tensor:
    module(torch.ones(3, dtype=torch.complex128, requires_grad=True)).backward()
    found, module.weight.grad = module.weight.grad, None
    assert found is not None
    return found


def test_a_gradient_in_the_forward_pass_may_conjugate_a_number():
    module = Factor()
    plain = gradient(module)
    apply_recompute(module, "cheap")
    assert torch.equal(gradient(module), plain)
