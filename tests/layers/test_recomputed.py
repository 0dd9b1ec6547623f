"""Global layers in a checkpointed segment, whose forward runs a second time in backward."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_dp.layers import apply_global_batch_norm
from tests.layers.oracle import C
from tests.ranks import run_threads


def segment(ends_with_batch_norm: bool) -> nn.Sequential:
    torch.manual_seed(3)
    layers = [nn.Linear(C, C), nn.BatchNorm1d(C)]
    return nn.Sequential(*layers, *([] if ends_with_batch_norm else [nn.Tanh(), nn.Linear(C, C)])).double()


def train(model: nn.Module, x: Tensor, cotangent: Tensor, use_reentrant: bool) -> list[Tensor]:
    """Return the gradient of the input and the buffers."""
    x = x.clone().requires_grad_()
    (checkpoint(model, x, use_reentrant=use_reentrant) * cotangent).sum().backward()
    return [x.grad, *model.buffers()]


def train_both(model: nn.Sequential, use_reentrant: bool) -> tuple[list[list[Tensor]], list[Tensor]]:
    """Return the results of two ranks, and those of PyTorch's layer on the concatenated batch."""
    x, cotangent = torch.randn(2, 2, 4, C, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def work(rank: int, group: dist.ProcessGroup) -> list[Tensor]:
        own = copy.deepcopy(model)
        apply_global_batch_norm(own, group)
        return train(own, x[rank], cotangent[rank], use_reentrant)

    expected = train(copy.deepcopy(model), x.flatten(0, 1), cotangent.flatten(0, 1), use_reentrant)
    return run_threads(2, work), expected


@pytest.mark.parametrize(("use_reentrant", "ends"), [(True, True), (True, False), (False, False)])
def test_a_recomputed_layer_equals_pytorchs(use_reentrant, ends):
    ranks, (gradient, *buffers) = train_both(segment(ends), use_reentrant)
    torch.testing.assert_close(torch.cat([rank[0] for rank in ranks]), gradient, rtol=1e-10, atol=1e-10)
    for rank in ranks:
        torch.testing.assert_close(rank[1:], buffers, rtol=1e-10, atol=1e-10)


def test_a_layer_that_ends_a_segment_counts_its_batch_once():
    """Recomputation ends once all tensors are there: before our layer updates its buffers, but after PyTorch's."""
    ranks, (gradient, *buffers) = train_both(segment(ends_with_batch_norm=True), use_reentrant=False)
    torch.testing.assert_close(torch.cat([rank[0] for rank in ranks]), gradient, rtol=1e-10, atol=1e-10)
    assert [rank[-1].item() for rank in ranks] == [1, 1]
    assert buffers[-1].item() == 2
