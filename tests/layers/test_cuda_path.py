"""The CUDA path of global batch norm on the CPU, with stand-ins for PyTorch's CUDA kernels."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_dp.layers import GlobalBatchNorm2d, batch_statistics
from tests.layers.oracle import against_oracle, batches


class SplitKernels:
    """The functions of the CUDA kernels of SyncBatchNorm, written in a few lines that run on any device."""

    @staticmethod
    def batch_norm_stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        var, mean = torch.var_mean(x, (0, 2, 3), correction=0)
        return mean, (var + eps).rsqrt()

    @staticmethod
    def batch_norm_elemt(x, weight, bias, mean, invstd, eps) -> Tensor:
        c = (1, -1, 1, 1)
        y = (x - mean.view(c)) * invstd.view(c)
        y = y if weight is None else y * weight.view(c)
        return y if bias is None else y + bias.view(c)

    @staticmethod
    def batch_norm_backward_reduce(dy, x, mean, invstd, weight, input_g, weight_g, bias_g) -> tuple:
        xmu = x - mean.view(1, -1, 1, 1)
        return dy.sum((0, 2, 3)), (dy * xmu).sum((0, 2, 3)), None, None

    @staticmethod
    def batch_norm_backward_elemt(dy, x, mean, invstd, weight, sum_dy, sum_dy_xmu, counts) -> Tensor:
        assert counts.dtype == torch.int32
        c, n = (1, -1, 1, 1), counts.sum()
        slope = (invstd.square() * sum_dy_xmu / n).view(c)
        scale = invstd if weight is None else invstd * weight
        return (dy - (sum_dy / n).view(c) - (x - mean.view(c)) * slope) * scale.view(c)


@pytest.mark.parametrize("options", [{}, {"affine": False}], ids=str)
@pytest.mark.parametrize("shards", [[5, 3], [3, 0, 6]], ids=str)
def test_the_cuda_path_with_stand_ins_for_its_kernels(shards, options, monkeypatch):
    """The tests that are marked gpu run the kernels themselves."""
    calls: Counter = Counter()

    def counted(name: str, *args: Any) -> Any:
        calls[name] += 1
        return getattr(SplitKernels, name)(*args)

    names = [name for name in vars(SplitKernels) if not name.startswith("_")]
    for name in names:
        monkeypatch.setattr(torch, name, functools.partial(counted, name))
    monkeypatch.setattr(batch_statistics, "_has_split_kernels", lambda x: True)
    against_oracle(GlobalBatchNorm2d, shards, batches(shards, (4, 3)), options=options)
    ranks_with_data = len([n for n in shards if n])
    assert calls == dict.fromkeys(names, 2 * ranks_with_data), "one call of each kernel per rank and step"
