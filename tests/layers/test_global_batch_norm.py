"""Global batch norm compared with PyTorch's batch norm on the concatenated batch, in one process."""

from __future__ import annotations

import copy
import pickle
import threading
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_dp.layers import GlobalBatchNorm1d, GlobalBatchNorm2d, GlobalBatchNorm3d, batch_statistics
from tests.layers.oracle import EXACT, PLAIN, SHARDS, SPATIAL, C, against_oracle, batches, compare, randomize, run
from tests.ranks import RankError, run_threads


@pytest.fixture(params=["forward", "backward"])
def broken_collective(request, monkeypatch) -> None:
    """One of the two collectives returns only the values of the calling rank."""
    gather, dimensions = batch_statistics.small_all_gather, {"forward": 1, "backward": 2}[request.param]

    def broken(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        gathered = gather(tensor, group)
        if tensor.dim() == dimensions:
            gathered[0] = tensor
            gathered[1:] = 0
        return gathered

    monkeypatch.setattr(batch_statistics, "small_all_gather", broken)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", PLAIN, ids=lambda kind: kind.__name__)
def test_equals_batch_norm_on_the_concatenated_batch(kind, world_size):
    shards = SHARDS[world_size]
    against_oracle(kind, shards, batches(shards, SPATIAL[kind]))


@pytest.mark.parametrize("kind", PLAIN, ids=lambda kind: kind.__name__)
def test_the_comparison_fails_without_either_collective(kind, broken_collective):
    with pytest.raises(AssertionError, match="not close"):
        against_oracle(kind, SHARDS[3], batches(SHARDS[3], SPATIAL[kind]))


OPTIONS = {
    "no affine": {"affine": False},
    "no running statistics": {"track_running_stats": False},
    "cumulative average": {"momentum": None},
    "all of them": {"affine": False, "momentum": 0.3, "eps": 1e-2},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_options_of_the_layer(options):
    against_oracle(GlobalBatchNorm2d, SHARDS[3], batches(SHARDS[3], (4, 3), steps=3), options)


def test_the_comparison_of_options_fails_without_either_collective(broken_collective):
    with pytest.raises(AssertionError, match="not close"):
        against_oracle(GlobalBatchNorm2d, SHARDS[3], batches(SHARDS[3], (4, 3)), {"affine": False, "momentum": None})


@pytest.mark.parametrize("shards", [[0, 4], [4, 0, 3], [0, 0, 5], [1, 1]], ids=str)
@pytest.mark.parametrize("spatial", [(4, 3), (1, 1)], ids=str)
def test_empty_and_single_local_batches(shards, spatial):
    ranks = against_oracle(GlobalBatchNorm2d, shards, batches(shards, spatial))
    for rank in ranks:
        assert all(p is not None for p in rank["parameters"]), "DDP needs a gradient on every rank"
        assert all(b.isfinite().all() for b in rank["buffers"])


def test_the_comparison_of_empty_batches_fails_without_either_collective(broken_collective):
    with pytest.raises(AssertionError, match="not close"):
        against_oracle(GlobalBatchNorm2d, [3, 0, 4], batches([3, 0, 4], (4, 3)))


def test_a_layer_used_twice_in_a_forward():
    against_oracle(GlobalBatchNorm2d, SHARDS[2], batches(SHARDS[2], (4, 3)), calls=2)


@pytest.mark.parametrize("shape", [(7,), (1,)], ids=str)
def test_sequences(shape):
    against_oracle(GlobalBatchNorm1d, SHARDS[3], batches(SHARDS[3], shape))


@pytest.mark.parametrize("layout", ["channels_last", "channels_last_3d", "transposed", "mixed"])
def test_memory_formats(layout):
    kind = GlobalBatchNorm3d if layout == "channels_last_3d" else GlobalBatchNorm2d
    inputs = batches(SHARDS[3], SPATIAL[kind])
    if layout == "transposed":
        inputs = [[x.transpose(2, 3).contiguous().transpose(2, 3) for x in step] for step in inputs]
    elif layout == "mixed":
        inputs = [
            [x.contiguous(memory_format=torch.channels_last) if r else x for r, x in enumerate(s)] for s in inputs
        ]
    else:
        inputs = [[x.contiguous(memory_format=getattr(torch, layout)) for x in step] for step in inputs]
    ranks = against_oracle(kind, SHARDS[3], inputs)
    if layout.startswith("channels_last"):
        assert ranks[0]["outputs"][0].is_contiguous(memory_format=getattr(torch, layout))
        assert ranks[0]["gradients"][0].is_contiguous(memory_format=getattr(torch, layout))


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_float32_where_the_mean_is_10000_standard_deviations(memory_format):
    shards = [50, 30]
    inputs = [
        [(x + 1e4).contiguous(memory_format=memory_format) for x in s] for s in batches(shards, (8, 8), torch.float32)
    ]
    whole = [torch.cat(step) for step in inputs]
    oracle = run(randomize(nn.BatchNorm2d(C)).double(), [x.double() for x in whole])
    ranks = run_threads(
        2, lambda rank, group: run(randomize(GlobalBatchNorm2d(C, group=group)), [step[rank] for step in inputs])
    )
    # The spacing of float32 numbers near 1e4 is 2^-10. The gradients of the weights are sums over all elements, each of
    # which has an error of that size.
    step = 2**-10 / whole[0].std().item()
    compare(ranks, {**oracle, "parameters": []}, rtol=1e-5, atol=8 * step)
    compare(ranks, {**oracle, "outputs": [], "gradients": []}, rtol=1e-5, atol=step * whole[0].numel() / C)
    # The means of the ranks are 2 apart. Their distance, and so the variance, is exact to one spacing.
    torch.testing.assert_close(ranks[0]["buffers"], oracle["buffers"], rtol=1e-3, atol=0, check_dtype=False)
    naive = whole[0].square().mean((0, 2, 3)) - whole[0].mean((0, 2, 3)).square()  # equation 5 of the paper
    assert not torch.allclose(naive.double(), whole[0].double().var((0, 2, 3)), rtol=0.1)


@pytest.mark.parametrize("shape", [(64, 16, 32, 32), (4096, 16)], ids=str)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_one_thread_adds_many_values_as_accurately_as_several(memory_format, shape):
    x = torch.randn(shape) + 1e4
    if len(shape) == 4:
        x = x.contiguous(memory_format=memory_format)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # torchrun's default
    try:
        mean, deviations = batch_statistics.local_moments(x)
    finally:
        torch.set_num_threads(num_threads)
    by_channel = x.double().transpose(0, 1).flatten(1)
    # Half of the spacing of float32 numbers near 1e4, and the rounding of a float32 sum.
    torch.testing.assert_close(mean.double(), by_channel.mean(1), rtol=0, atol=2**-11)
    variance = deviations.double() / by_channel.shape[1]
    torch.testing.assert_close(variance, by_channel.var(1, correction=0), rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_half_precision_activations_have_float32_statistics(dtype, memory_format):
    inputs = [[x.contiguous(memory_format=memory_format) for x in s] for s in batches(SHARDS[3], (6, 5), dtype)]
    epsilon = torch.finfo(dtype).eps

    def work(rank: int, group: dist.ProcessGroup) -> dict[str, Any]:
        layer = randomize(GlobalBatchNorm2d(C, group=group))
        with torch.autocast("cpu", dtype):
            return run(layer, [step[rank] for step in inputs])

    ranks = run_threads(3, work)
    oracle = run(randomize(nn.BatchNorm2d(C)).double(), [torch.cat(step).double() for step in inputs])
    assert ranks[0]["outputs"][0].dtype == ranks[0]["gradients"][0].dtype == dtype
    # The cotangent is computed from the rounded input, which increases its error by up to a factor of 3.
    compare(ranks, {**oracle, "buffers": [b.float() for b in oracle["buffers"]]}, rtol=8 * epsilon, atol=40 * epsilon)
    for rank in ranks:
        for ours, expected in zip(rank["buffers"], oracle["buffers"], strict=True):
            torch.testing.assert_close(ours.double(), expected.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_a_layer_of_another_dtype_than_float32(dtype):
    inputs = batches(SHARDS[2], (6, 5), dtype)
    epsilon = torch.finfo(dtype).eps
    against_oracle(GlobalBatchNorm2d, SHARDS[2], inputs, dtype=dtype, rtol=50 * epsilon, atol=50 * epsilon)


@pytest.mark.parametrize("momentum", [0.0, 0.1, 1.0])
def test_running_statistics_in_float16_are_computed_in_float32(momentum):
    inputs = [200 * x for x in batches(SHARDS[2], (6, 5), torch.float16, steps=1)[0]]

    def updated(rank: int, group: dist.ProcessGroup | None) -> list[Tensor]:
        layer = GlobalBatchNorm2d(C, momentum=momentum, group=group).half()
        layer(torch.cat(inputs) if group is None else inputs[rank])
        return [layer.running_mean, layer.running_var]

    expected = updated(0, None)
    assert torch.cat(inputs).double().var((0, 2, 3)).min() > torch.finfo(torch.float16).max
    assert expected[1].isfinite().all() == (momentum < 1)
    for buffers in run_threads(2, updated):
        torch.testing.assert_close(buffers, expected, rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize("left_out", ["weight", "bias"])
def test_a_layer_with_only_one_of_weight_and_bias(left_out):
    inputs = batches(SHARDS[2], (4, 3))

    def layer(kind: type[nn.BatchNorm2d], **options: Any) -> nn.Module:
        layer = randomize(kind(C, **options)).double()
        setattr(layer, left_out, None)
        return layer

    oracle = run(layer(nn.BatchNorm2d), [torch.cat(step) for step in inputs])
    ranks = run_threads(2, lambda rank, group: run(layer(GlobalBatchNorm2d, group=group), [x[rank] for x in inputs]))
    compare(ranks, oracle, **EXACT)


def count_collectives(monkeypatch) -> Counter:
    """Count the calls of each collective, and the numbers that batch norm gathers, in all ranks together."""
    calls: Counter = Counter()
    adding = threading.Lock()  # ranks are threads

    def add(name: str, number: int) -> None:
        with adding:
            calls[name] += number

    for name in ("all_gather", "all_reduce", "broadcast", "reduce", "all_gather_into_tensor", "barrier"):
        original = getattr(dist, name)

        def counted(*args: Any, _name: str = name, _original: Any = original, **kwargs: Any) -> Any:
            add(_name, 1)
            return _original(*args, **kwargs)

        monkeypatch.setattr(dist, name, counted)
    gather = batch_statistics.small_all_gather

    def counted_gather(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        add("small_all_gather", 1)
        add("numbers", tensor.numel())
        return gather(tensor, group)

    monkeypatch.setattr(batch_statistics, "small_all_gather", counted_gather)
    return calls


def test_a_forward_and_a_backward_are_one_collective_each(monkeypatch):
    calls = count_collectives(monkeypatch)
    against_oracle(GlobalBatchNorm2d, SHARDS[3], batches(SHARDS[3], (4, 3), steps=2))
    calls_per_rank = 2 * 2  # steps, forward and backward
    to_connect = 3  # once per group
    assert calls == {
        "all_gather": 3 * to_connect,
        "small_all_gather": 3 * calls_per_rank,
        "numbers": 3 * 2 * ((2 * C + 1) + 2 * C),
    }


@pytest.mark.parametrize("reason", ["switched off", "evaluation", "group of one", "no group"])
def test_in_all_other_cases_it_equals_the_pytorch_layer_and_does_not_communicate(reason, monkeypatch):
    calls = count_collectives(monkeypatch)
    shards = SHARDS[1] if reason == "group of one" else SHARDS[2]
    inputs = batches(shards, (4, 3))

    def both(rank: int, group: dist.ProcessGroup) -> tuple[dict[str, Any], dict[str, Any]]:
        ours = randomize(GlobalBatchNorm2d(C, group=None if reason == "no group" else group)).double()
        plain = randomize(nn.BatchNorm2d(C)).double()
        assert ours.is_global
        ours.is_global = reason != "switched off"
        for layer in (ours, plain):
            layer.train(reason != "evaluation")
        return tuple(run(layer, [step[rank] for step in inputs]) for layer in (ours, plain))

    for ours, plain in run_threads(len(shards), both):
        compare([ours], plain, rtol=0.0, atol=0.0)
    assert not calls


def test_switching_at_run_time():
    inputs = batches(SHARDS[2], (4, 3), steps=4)

    def work(rank: int, group: dist.ProcessGroup) -> list[Tensor]:
        layer = GlobalBatchNorm2d(C, group=group).double()
        outputs = []
        for step, is_global in enumerate([True, False, True, False]):
            layer.is_global = is_global
            outputs.append(layer(inputs[step][rank]).detach())
        return outputs

    ranks = run_threads(2, work)
    plain = nn.BatchNorm2d(C).double()
    for step, is_global in enumerate([True, False, True, False]):
        shards = inputs[step]
        expected = plain(torch.cat(shards)) if is_global else torch.cat([plain(x) for x in shards])
        torch.testing.assert_close(torch.cat([rank[step] for rank in ranks]), expected.detach(), **EXACT)


def test_frozen_parameters_and_inputs_without_gradient():
    inputs = batches(SHARDS[2], (4, 3), steps=1)[0]

    def work(rank: int, group: dist.ProcessGroup) -> list[Tensor | None]:
        layer = GlobalBatchNorm2d(C, group=group).double()
        layer.weight.requires_grad_(False)
        layer(inputs[rank]).square().sum().backward()
        return [layer.weight.grad, layer.bias.grad]

    for weight_grad, bias_grad in run_threads(2, work):
        assert weight_grad is None
        assert bias_grad.shape == (C,)


def test_differentiating_twice_is_refused():
    def work(rank: int, group: dist.ProcessGroup) -> None:
        x = torch.randn(3, C, requires_grad=True)
        y = GlobalBatchNorm1d(C, group=group)(x)
        (gradient,) = torch.autograd.grad(y.sin().sum(), x, create_graph=True)
        gradient.sum().backward()

    with pytest.raises(RankError, match="once_differentiable"):
        run_threads(2, work)


def test_deep_copies_share_the_group_and_pickles_do_not_hold_it():
    def work(rank: int, group: dist.ProcessGroup) -> tuple[bool, bool]:
        layer = GlobalBatchNorm2d(C, group=group)
        return copy.deepcopy(layer).group is group, pickle.loads(pickle.dumps(layer)).group is None  # noqa: S301

    assert run_threads(2, work) == [(True, True)] * 2
