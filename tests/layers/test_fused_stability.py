"""The combination of the ranks' statistics by torch's CUDA kernel does not cancel, and adds no error that counts.

With float32 statistics a mean much larger than the standard deviation is known to about ratio x 6e-8 standard
deviations, by whatever method. The kernel's arithmetic is written out in `split_kernels`, and run in float32 here.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.layers.split_kernels import batch_norm_gather_stats_with_counts

N, C, EPS = 256, 256, 1e-5


def welford(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of (ranks, N, C) over N in float32, value by value, as a thread of torch's kernels does."""
    mean, squares = torch.zeros_like(x[:, 0]), torch.zeros_like(x[:, 0])
    for number, values in enumerate(x.unbind(1), start=1):
        delta = values - mean
        mean = mean + delta / number
        squares = squares + delta * (values - mean)
    return mean, squares / x.shape[1]


def naive(x: Tensor) -> Tensor:
    """The paper's equation 5, v - u^2, which cancels."""
    x = x.reshape(-1, C)
    return x.square().mean(0) - x.mean(0).square()


@pytest.mark.parametrize("num_ranks", [2, 8, 64])
@pytest.mark.parametrize("ratio", [1.0, 1e2, 1e4])
def test_the_kernels_combination_is_as_accurate_as_the_statistics_that_it_combines(ratio, num_ranks):
    x = (torch.randn(num_ranks, N, C, dtype=torch.float64) + ratio).float()
    exact_vars, exact_means = torch.var_mean(x.double(), 1, correction=0)
    exact_var, exact_mean = torch.var_mean(x.double().reshape(-1, C), 0, correction=0)
    means, invstds = exact_means.float(), (exact_vars.float() + EPS).rsqrt()
    counts = torch.full((num_ranks,), float(N))
    mean, invstd = batch_norm_gather_stats_with_counts(means, means, invstds, None, None, 0.1, EPS, counts)
    var = invstd.double().pow(-2) - EPS

    error = lambda actual, expected: float((actual.double() - expected).abs().mean())  # noqa: E731
    local_mean, local_var = welford(x)
    assert error(mean, exact_mean) <= 3 * error(local_mean, exact_means)
    assert error(var, exact_var) <= 3 * error(local_var, exact_vars)
    if ratio == 1e4:
        assert error(var, exact_var) < 1e-4, "the variance is 1"
        assert error(naive(x), exact_var) > 0.1, "the formula that cancels"
