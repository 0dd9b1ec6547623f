"""The CUDA path, which uses the kernels of SyncBatchNorm, compared with BatchNorm and SyncBatchNorm."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_dp.layers import GlobalBatchNorm2d
from lightning_dp.layers.batch_statistics import GlobalBatchNormFunction
from tests.layers.oracle import C, batches, compare, randomize, run
from tests.ranks import run_processes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
LAYOUTS = [torch.contiguous_format, torch.channels_last]


def inputs_of(
    shards: list[int], dtype: torch.dtype, layout: torch.memory_format, shift: float = 0.0
) -> list[list[Tensor]]:
    return [
        [(x + shift).to("cuda", dtype).contiguous(memory_format=layout) for x in s] for s in batches(shards, (9, 7))
    ]


def on_one_device(rank: int, shards: list[int], dtype: torch.dtype, layout: torch.memory_format) -> dict[str, Any]:
    """Train two ranks on one GPU. gloo accepts CUDA tensors, NCCL refuses two ranks on one device."""
    dist.init_process_group("gloo")
    inputs = [step[rank] for step in inputs_of(shards, dtype, layout)]
    parameters = torch.float64 if dtype == torch.float64 else torch.float32
    with torch.autocast("cuda", dtype, enabled=dtype not in (torch.float32, torch.float64)):
        result = run(randomize(GlobalBatchNorm2d(C)).to("cuda", parameters), inputs)
    return {key: [t.cpu() for t in value] for key, value in result.items()}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shards", [[5, 3], [0, 4], [4, 0]], ids=str)
def test_equals_batch_norm_on_the_concatenated_batch(shards, dtype, layout):
    ranks = run_processes(2, on_one_device, shards, dtype, layout)
    whole = [torch.cat([x.double() for x in step]).cpu() for step in inputs_of(shards, dtype, layout)]
    oracle = run(randomize(nn.BatchNorm2d(C)).double(), whole)
    compare(ranks, oracle, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * 10)


def beside_sync_batch_norm(rank: int, dtype: torch.dtype, layout: torch.memory_format) -> None:
    dist.init_process_group("gloo")
    inputs = [step[rank] for step in inputs_of([5, 3], dtype, layout, shift=1e4 if dtype == torch.float32 else 0.0)]
    ours = run(randomize(GlobalBatchNorm2d(C)).cuda(), inputs)
    theirs = run(randomize(nn.SyncBatchNorm(C)).cuda(), inputs)
    epsilon = torch.finfo(dtype).eps * (1e5 if dtype == torch.float32 else 4)
    for key in ("outputs", "gradients", "buffers"):
        torch.testing.assert_close(ours[key], theirs[key], rtol=epsilon, atol=epsilon)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equals_sync_batch_norm(dtype, layout):
    run_processes(2, beside_sync_batch_norm, dtype, layout)


def over_nccl(rank: int) -> None:
    dist.init_process_group("nccl")
    (x,), _ = inputs_of([4], torch.float32, torch.contiguous_format)
    x.requires_grad_()
    # A layer in a group of one rank calls PyTorch's forward, so the function is called directly.
    y, mean, *_ = GlobalBatchNormFunction.apply(x, None, None, 1e-5, None)
    y.sin().sum().backward()
    expected = x.detach().clone().requires_grad_()
    nn.functional.batch_norm(expected, None, None, training=True).sin().sum().backward()
    torch.testing.assert_close(mean, x.detach().mean((0, 2, 3)), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(x.grad, expected.grad, rtol=1e-3, atol=1e-4)


def test_one_rank_over_nccl():
    run_processes(1, over_nccl)
