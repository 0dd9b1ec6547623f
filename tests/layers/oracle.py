"""Oracle of the tests of global batch norm: PyTorch's layer in one process, on the concatenated batch, in float64."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_dp.layers import GlobalBatchNorm1d, GlobalBatchNorm2d, GlobalBatchNorm3d
from tests.ranks import run_threads

SHARDS = {1: [4], 2: [5, 3], 3: [4, 1, 6], 4: [3, 5, 1, 2]}  # unequal local batches
C = 3
PLAIN = {GlobalBatchNorm1d: nn.BatchNorm1d, GlobalBatchNorm2d: nn.BatchNorm2d, GlobalBatchNorm3d: nn.BatchNorm3d}
SPATIAL = {GlobalBatchNorm1d: (), GlobalBatchNorm2d: (4, 3), GlobalBatchNorm3d: (2, 3, 2)}


def batches(shards: list[int], spatial: tuple[int, ...], dtype=torch.float64, steps: int = 2) -> list[list[Tensor]]:
    """One batch per step and rank. Mean and standard deviation depend on the rank."""
    generator = torch.Generator().manual_seed(7)
    return [
        [
            (torch.randn(n, C, *spatial, generator=generator, dtype=torch.float64) * (1 + rank) + 2 * rank).to(dtype)
            for rank, n in enumerate(shards)
        ]
        for _ in range(steps)
    ]


def randomize(layer: nn.Module) -> nn.Module:
    """Give ``layer`` fixed weights and running statistics that differ from the defaults."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for tensor in (*layer.parameters(), *layer.buffers()):
            if tensor.is_floating_point():
                tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
    return layer


def run(layer: nn.Module, inputs: list[Tensor], calls: int = 1) -> dict[str, Any]:
    """Run forward and backward with a random cotangent per step. Return everything that the layer computes."""
    outputs, gradients = [], []
    for step, x in enumerate(inputs):
        x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
        y = x
        for _ in range(calls):
            y = layer(y)
        # A function of the rows alone, so that ranks and oracle have the same cotangent.
        cotangent = (x.detach().double() * 3 + step).sin().to(y.dtype)
        (y * cotangent).sum().backward()
        outputs.append(y.detach())
        gradients.append(x.grad)
    return {
        "outputs": outputs,
        "gradients": gradients,
        "parameters": [p.grad for p in layer.parameters()],
        "buffers": [b.clone() for b in layer.buffers()],
    }


def compare(ranks: list[dict[str, Any]], oracle: dict[str, Any], **tolerance: float) -> None:
    close = lambda a, b: torch.testing.assert_close(a, b, check_dtype=False, **tolerance)  # noqa: E731
    for key in ("outputs", "gradients"):
        for step, expected in enumerate(oracle[key]):
            close(torch.cat([rank[key][step] for rank in ranks]), expected)
    for index, expected in enumerate(oracle["parameters"]):
        close(sum(rank["parameters"][index] for rank in ranks), expected)
    for rank in ranks:
        for ours, expected in zip(rank["buffers"], oracle["buffers"], strict=True):
            close(ours, expected)


EXACT = {"rtol": 1e-10, "atol": 1e-10}


def against_oracle(
    kind: type[nn.Module],
    shards: list[int],
    inputs: list[list[Tensor]],
    options: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.float64,
    calls: int = 1,
    **tolerance: float,
) -> list[dict[str, Any]]:
    """Compare the layer on several ranks with PyTorch's layer in float64 on the concatenated batches."""
    options = options or {}

    def work(rank: int, group: dist.ProcessGroup) -> dict[str, Any]:
        layer = randomize(kind(C, **options, group=group)).to(dtype)
        return run(layer, [step[rank] for step in inputs], calls)

    ranks = run_threads(len(shards), work)
    plain = randomize(PLAIN[kind](C, **options)).double()
    oracle = run(plain, [torch.cat(step).double() for step in inputs], calls)
    compare(ranks, oracle, **(tolerance or EXACT))
    return ranks
