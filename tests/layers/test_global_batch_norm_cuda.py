"""The CUDA path, which uses the kernels of SyncBatchNorm, compared with BatchNorm and SyncBatchNorm."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_dp.layers import GlobalBatchNorm2d
from lightning_dp.layers.batch_statistics import GlobalBatchNormFunction
from lightning_dp.layers.fused_batch_norm import FusedGlobalBatchNormFunction
from tests.layers import split_kernels
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


def over_nccl(rank: int, fused: bool) -> None:
    """Forward and backward without a wait of the host. Layers in a group of one rank call PyTorch's forward instead."""
    dist.init_process_group("nccl")
    (x,), _ = inputs_of([4], torch.float32, torch.contiguous_format)
    x.requires_grad_()
    mean, var = torch.zeros(C, device="cuda"), torch.ones(C, device="cuda")
    dist.all_reduce(torch.zeros(1, device="cuda"))  # NCCL connects in the first call
    torch.cuda.set_sync_debug_mode("error" if fused else "default")
    if fused:
        y = FusedGlobalBatchNormFunction.apply(x, None, None, mean, var, 1e-5, 1.0, dist.group.WORLD)
    else:
        y, mean, var, _ = GlobalBatchNormFunction.apply(x, None, None, 1e-5, dist.group.WORLD)
    y.sin().sum().backward()
    torch.cuda.set_sync_debug_mode("default")
    expected = x.detach().clone().requires_grad_()
    nn.functional.batch_norm(expected, None, None, training=True).sin().sum().backward()
    expected_var, expected_mean = torch.var_mean(x.detach(), (0, 2, 3))
    torch.testing.assert_close([mean, var], [expected_mean, expected_var], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(x.grad, expected.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("fused", [True, False])
def test_one_rank_over_nccl(fused):
    run_processes(1, over_nccl, fused)


@pytest.mark.parametrize("kernel", split_kernels.KERNELS, ids=lambda kernel: kernel.__name__)
def test_the_stand_ins_for_the_kernels_compute_what_these_do(kernel):
    """The tests on the CPU rest on the stand-ins, also for a rank with an empty batch (a tiny count)."""
    x, dy = torch.randn(2, 5, C, 4, 3, dtype=torch.float64, device="cuda")
    mean, invstd, weight, bias, sum_dy, sum_dy_xmu = torch.rand(6, C, dtype=torch.float64, device="cuda") + 0.5
    statistics = torch.rand(3, 2 * C + 1, dtype=torch.float64, device="cuda") + 0.5
    statistics[:, -1] = torch.tensor([1e-30, 7.0, 3.0])
    counts = torch.tensor([0, 7, 3], dtype=torch.int32, device="cuda")
    arguments = {
        "batch_norm_stats": (x, 1e-5),
        "batch_norm_gather_stats_with_counts": (
            *(statistics, statistics[:, :C], statistics[:, C:-1], mean, invstd),
            *(0.1, 1e-5, statistics[:, -1]),
        ),
        "batch_norm_elemt": (x, weight, bias, mean, invstd, 1e-5),
        "batch_norm_backward_reduce": (dy, x, mean, invstd, weight, True, True, True),
        "batch_norm_backward_elemt": (dy, x, mean, invstd, weight, sum_dy, sum_dy_xmu, counts),
    }[kernel.__name__]
    copies = [value.clone() if isinstance(value, Tensor) else value for value in arguments]
    torch.testing.assert_close(getattr(torch, kernel.__name__)(*arguments), kernel(*copies), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(arguments, tuple(copies), rtol=1e-9, atol=1e-9, msg="the running statistics differ")
