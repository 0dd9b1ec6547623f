"""The path of eager code on CUDA, on the CPU, with stand-ins for PyTorch's CUDA kernels.

The tests that are marked gpu run the kernels themselves.
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_dp.layers import GlobalBatchNorm2d, global_batch_norm
from tests.layers.oracle import C, against_oracle, batches, randomize
from tests.layers.split_kernels import KERNELS
from tests.ranks import run_threads


@pytest.fixture
def calls(monkeypatch) -> Counter:
    """Put the stand-ins in the kernels' places, and count their calls on all ranks."""
    counts: Counter = Counter()

    def counted(kernel: Any, *args: Any) -> Any:
        counts[kernel.__name__] += 1
        return kernel(*args)

    for kernel in KERNELS:
        monkeypatch.setattr(torch, kernel.__name__, functools.partial(counted, kernel), raising=True)
    return counts


@pytest.fixture
def in_eager_code(monkeypatch, calls) -> Counter:
    monkeypatch.setattr(global_batch_norm, "uses_fused_kernels", lambda x: True)
    return calls


OPTIONS = [{}, {"affine": False}, {"track_running_stats": False}, {"momentum": None}]
NAMES = [kernel.__name__ for kernel in KERNELS]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("shards", [[5, 3], [3, 0, 6], [0, 4], [4, 0, 0, 2]], ids=str)
def test_the_path_of_eager_code_equals_batch_norm(shards, options, in_eager_code):
    against_oracle(GlobalBatchNorm2d, shards, batches(shards, (4, 3)), options=options)
    with_data = 2 * len([n for n in shards if n])
    gather = "batch_norm_gather_stats_with_counts"
    expected = {name: 2 * len(shards) if name == gather else with_data for name in NAMES}
    assert in_eager_code == expected, "one call of each kernel per rank and step; an empty batch needs the second only"


@pytest.mark.parametrize("spatial", [(4, 3), (1, 1)], ids=str)
@pytest.mark.parametrize("shards", [[1, 1], [1, 5], [1, 0], [0, 0]], ids=str)
def test_running_statistics_equal_those_of_the_other_path_where_there_is_little_data(shards, spatial, monkeypatch):
    inputs = batches(shards, spatial, steps=1)[0]

    def work(rank, group) -> list[Tensor]:
        layer = randomize(GlobalBatchNorm2d(C, group=group)).double()
        layer(inputs[rank])
        return [layer.running_mean, layer.running_var]

    expected = run_threads(len(shards), work)
    for kernel in KERNELS:
        monkeypatch.setattr(torch, kernel.__name__, kernel)
    monkeypatch.setattr(global_batch_norm, "uses_fused_kernels", lambda x: True)
    ranks = run_threads(len(shards), work)
    torch.testing.assert_close(ranks, expected, rtol=1e-10, atol=1e-10)
    assert all(torch.equal(a, b) for a, b in zip(ranks[0], ranks[1], strict=True)), "bitwise equal on all ranks"


def test_buffers_in_half_precision_are_updated_as_by_the_other_path(in_eager_code):
    """The kernel would read the counts in the dtype of the buffers, and bfloat16 has no 2 x 200 x 12 + 1."""
    shards = [201, 200]
    inputs = batches(shards, (4, 3), dtype=torch.float32, steps=1)[0]

    def work(rank, group) -> Tensor:
        layer = randomize(GlobalBatchNorm2d(C, group=group)).float()
        layer.running_mean, layer.running_var = layer.running_mean.bfloat16(), layer.running_var.bfloat16()
        layer._check_input = lambda input: None  # it refuses such buffers on the way to local statistics
        layer(inputs[rank])
        return torch.stack([layer.running_mean, layer.running_var]).double()

    whole = torch.cat(inputs).double()
    var, mean = torch.var_mean(whole, (0, 2, 3))
    before = randomize(GlobalBatchNorm2d(C))
    expected = torch.stack([before.running_mean.lerp(mean.float(), 0.1), before.running_var.lerp(var.float(), 0.1)])
    for buffers in run_threads(2, work):
        torch.testing.assert_close(buffers, expected.double(), rtol=1e-2, atol=1e-2)
