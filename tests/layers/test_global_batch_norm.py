"""Global batch norm against torch's batch norm on the concatenated batch, in one process."""

from __future__ import annotations

import copy
import functools
import pickle
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_dp.layers import GlobalBatchNorm1d, GlobalBatchNorm2d, GlobalBatchNorm3d, batch_statistics
from tests.ranks import RankError, run_processes, run_threads

SHARDS = {1: [4], 2: [5, 3], 3: [4, 1, 6], 4: [3, 5, 1, 2]}  # unequal local batches
C = 3
PLAIN = {GlobalBatchNorm1d: nn.BatchNorm1d, GlobalBatchNorm2d: nn.BatchNorm2d, GlobalBatchNorm3d: nn.BatchNorm3d}
SPATIAL = {GlobalBatchNorm1d: (), GlobalBatchNorm2d: (4, 3), GlobalBatchNorm3d: (2, 3, 2)}


def batches(shards: list[int], spatial: tuple[int, ...], dtype=torch.float64, steps: int = 2) -> list[list[Tensor]]:
    """Per step and rank, a batch whose mean and spread depend on the rank."""
    generator = torch.Generator().manual_seed(7)
    return [
        [
            (torch.randn(n, C, *spatial, generator=generator, dtype=torch.float64) * (1 + rank) + 2 * rank).to(dtype)
            for rank, n in enumerate(shards)
        ]
        for _ in range(steps)
    ]


def randomize(layer: nn.Module) -> nn.Module:
    """The same odd weights and running statistics in every layer that is made."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for tensor in (*layer.parameters(), *layer.buffers()):
            if tensor.is_floating_point():
                tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
    return layer


def run(layer: nn.Module, inputs: list[Tensor], calls: int = 1) -> dict[str, Any]:
    """Forward and backward with a random cotangent per step; everything that the layer computes."""
    outputs, gradients = [], []
    for step, x in enumerate(inputs):
        x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
        y = x
        for _ in range(calls):
            y = layer(y)
        # As random as the data, and a function of the rows alone, so that ranks and oracle have the same.
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
    """Run the layer on ranks, and torch's own in float64 on the batches laid together; compare all results."""
    options = options or {}

    def work(rank: int, group: dist.ProcessGroup) -> dict[str, Any]:
        layer = randomize(kind(C, **options, group=group)).to(dtype)
        return run(layer, [step[rank] for step in inputs], calls)

    ranks = run_threads(len(shards), work)
    plain = randomize(PLAIN[kind](C, **options)).double()
    oracle = run(plain, [torch.cat(step).double() for step in inputs], calls)
    compare(ranks, oracle, **(tolerance or EXACT))
    return ranks


@pytest.fixture(params=["forward", "backward"])
def broken_collective(request, monkeypatch) -> None:
    """One of the two collectives gives each rank only what it has itself."""
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
def test_needs_both_collectives(kind, broken_collective):
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


def test_options_need_the_collectives(broken_collective):
    with pytest.raises(AssertionError, match="not close"):
        against_oracle(GlobalBatchNorm2d, SHARDS[3], batches(SHARDS[3], (4, 3)), {"affine": False, "momentum": None})


@pytest.mark.parametrize("shards", [[0, 4], [4, 0, 3], [0, 0, 5], [1, 1]], ids=str)
@pytest.mark.parametrize("spatial", [(4, 3), (1, 1)], ids=str)
def test_empty_and_single_local_batches(shards, spatial):
    ranks = against_oracle(GlobalBatchNorm2d, shards, batches(shards, spatial))
    for rank in ranks:
        assert all(p is not None for p in rank["parameters"]), "DDP waits for a gradient on every rank"
        assert all(b.isfinite().all() for b in rank["buffers"])


def test_empty_local_batches_need_the_collectives(broken_collective):
    with pytest.raises(AssertionError, match="not close"):
        against_oracle(GlobalBatchNorm2d, [3, 0, 4], batches([3, 0, 4], (4, 3)))


def test_all_batches_empty_leave_no_nan():
    def work(rank: int, group: dist.ProcessGroup) -> dict[str, Any]:
        return run(GlobalBatchNorm2d(C, group=group), [torch.empty(0, C, 2, 2)])

    for rank in run_threads(2, work):
        assert all(b.isfinite().all() for b in rank["buffers"])


def test_used_twice_in_a_forward():
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
    # Float32 near 1e4 goes in steps of 2^-10; so does torch's own layer in float32. The gradients of the weights are
    # sums over all elements of what is off by that.
    step = 2**-10 / whole[0].std().item()
    compare(ranks, {**oracle, "parameters": []}, rtol=1e-5, atol=8 * step)
    compare(ranks, {**oracle, "outputs": [], "gradients": []}, rtol=1e-5, atol=step * whole[0].numel() / C)
    # The variance between the ranks, whose means are 2 apart, knows that distance to a step.
    torch.testing.assert_close(ranks[0]["buffers"], oracle["buffers"], rtol=1e-3, atol=0, check_dtype=False)
    naive = whole[0].square().mean((0, 2, 3)) - whole[0].mean((0, 2, 3)).square()  # the paper's equation 5
    assert not torch.allclose(naive.double(), whole[0].double().var((0, 2, 3)), rtol=0.1)


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
    # The cotangent is computed from the rounded output, and up to 3 times as sensitive.
    compare(ranks, {**oracle, "buffers": [b.float() for b in oracle["buffers"]]}, rtol=8 * epsilon, atol=40 * epsilon)
    for rank in ranks:
        for ours, expected in zip(rank["buffers"], oracle["buffers"], strict=True):
            torch.testing.assert_close(ours.double(), expected.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_a_layer_of_another_dtype_than_float32(dtype):
    inputs = batches(SHARDS[2], (6, 5), dtype)
    epsilon = torch.finfo(dtype).eps
    against_oracle(GlobalBatchNorm2d, SHARDS[2], inputs, dtype=dtype, rtol=50 * epsilon, atol=50 * epsilon)


def count_collectives(monkeypatch) -> Counter:
    """Count calls of each collective, and the numbers that batch norm's own hands over, on all ranks together."""
    calls: Counter = Counter()
    for name in ("all_gather", "all_reduce", "broadcast", "reduce", "all_gather_into_tensor", "barrier"):
        original = getattr(dist, name)

        def counted(*args: Any, _name: str = name, _original: Any = original, **kwargs: Any) -> Any:
            calls[_name] += 1
            return _original(*args, **kwargs)

        monkeypatch.setattr(dist, name, counted)
    gather = batch_statistics.small_all_gather

    def counted_gather(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        calls["small_all_gather"] += 1
        calls["numbers"] += tensor.numel()
        return gather(tensor, group)

    monkeypatch.setattr(batch_statistics, "small_all_gather", counted_gather)
    return calls


def test_one_collective_a_forward_and_one_a_backward(monkeypatch):
    calls = count_collectives(monkeypatch)
    against_oracle(GlobalBatchNorm2d, SHARDS[3], batches(SHARDS[3], (4, 3), steps=2))
    calls_a_rank = 2 * 2  # steps, and forward and backward
    to_connect = 3  # once a group
    assert calls == {
        "all_gather": 3 * to_connect,
        "small_all_gather": 3 * calls_a_rank,
        "numbers": 3 * 2 * ((2 * C + 1) + 2 * C),
    }


@pytest.mark.parametrize("reason", ["switched off", "evaluation", "group of one", "no group"])
def test_otherwise_it_is_torchs_layer_and_talks_to_nobody(reason, monkeypatch):
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


def test_wrong_shapes_are_refused_like_torch_does():
    def work(rank: int, group: dist.ProcessGroup) -> None:
        GlobalBatchNorm2d(C, group=group)(torch.zeros(2, C))

    with pytest.raises(RankError, match="expected 4D input"):
        run_threads(2, work)


def test_copies_share_the_group_and_files_do_not_hold_it():
    def work(rank: int, group: dist.ProcessGroup) -> tuple[bool, bool]:
        layer = GlobalBatchNorm2d(C, group=group)
        return copy.deepcopy(layer).group is group, pickle.loads(pickle.dumps(layer)).group is None  # noqa: S301

    assert run_threads(2, work) == [(True, True)] * 2


def compiled(rank: int) -> dict[str, Any]:
    dist.init_process_group("gloo")
    group = dist.new_group([0, 1])
    torch._dynamo.config.suppress_errors = False
    import warnings

    warnings.simplefilter("ignore")  # dynamo itself uses what it deprecates
    x = batches(SHARDS[2], (4, 3), steps=1)[0][rank]
    result: dict[str, Any] = {"breaks": {}, "same": {}}
    for name, layer in {
        "plain": nn.BatchNorm2d(C),
        "local": GlobalBatchNorm2d(C),
        "global": GlobalBatchNorm2d(C),
        "subgroup": GlobalBatchNorm2d(C, group=group),
    }.items():
        layer = randomize(layer).double()
        if name == "local":
            layer.is_global = False
        torch._dynamo.reset()
        explanation = torch._dynamo.explain(nn.Sequential(copy.deepcopy(layer), nn.ReLU()))(x)
        result["breaks"][name] = (explanation.graph_break_count, explanation.graph_count)
        eager = run(copy.deepcopy(layer), [x, x])
        compare([run(torch.compile(layer, backend="aot_eager"), [x, x])], eager, **EXACT)
    return result


def test_torch_compile_breaks_the_graph_nowhere():
    for rank in run_processes(2, compiled):
        assert set(rank["breaks"].values()) == {(0, 1)}, rank


def compiled_block(rank: int) -> None:
    """A residual block whose branches have equally many channels, compiled for changing batch sizes."""
    dist.init_process_group("gloo")
    import warnings

    warnings.simplefilter("ignore")  # dynamo itself uses what it deprecates

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right, self.last = (randomize(GlobalBatchNorm2d(C)) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.last((self.left(x * 2).relu() * self.right(x.tanh())).sigmoid())

    steps = [batches(shards, (4, 3), steps=1)[0][rank] for shards in ([5, 3], [4, 6], [2, 3])]
    block = Block().double()
    eager = run(copy.deepcopy(block), steps)
    compare([run(torch.compile(copy.deepcopy(block), backend="aot_eager"), steps)], eager, **EXACT)
    empty = torch.zeros(0, C, 4, 3, dtype=torch.float64)
    with pytest.raises(ValueError, match="an empty batch in a compiled model"):
        torch.compile(block, backend="aot_eager")(empty)


def test_torch_compile_of_changing_batches_and_of_empty_ones():
    run_processes(2, compiled_block)


class SplitKernels:
    """What the kernels of torch's SyncBatchNorm compute on CUDA, in a few lines that run anywhere."""

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
def test_cuda_path_around_its_kernels(shards, options, monkeypatch):
    """Everything of the CUDA path but the kernels themselves, which the tests marked gpu need a GPU for."""
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
    assert calls == dict.fromkeys(names, 2 * ranks_with_data), "a kernel a rank and step"
