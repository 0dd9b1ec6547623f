"""Input of global layers: what PyTorch's layer accepts and refuses, and empty batches."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_dp.layers import GlobalBatchNorm1d, GlobalBatchNorm2d, apply_global_batch_norm
from tests.layers.oracle import PLAIN, SPATIAL, C, against_oracle, batches, randomize
from tests.ranks import RankError, run_processes, run_threads


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("kind", PLAIN, ids=lambda kind: kind.__name__)
def test_batches_that_are_empty_on_all_ranks_leave_the_buffers_as_pytorch_does(kind, momentum):
    data = torch.randn(2, 4, C, *SPATIAL[kind], dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    empty = torch.empty(0, C, *SPATIAL[kind], dtype=torch.float64)

    def work(rank: int, group: dist.ProcessGroup) -> list[Tensor]:
        layer = randomize(kind(C, momentum=momentum, group=group)).double()
        for x in (data[rank], empty, empty, data[rank] + 1):
            layer(x)
        return list(layer.buffers())

    plain = randomize(PLAIN[kind](C, momentum=momentum)).double()
    whole = data.flatten(0, 1)
    for x in (whole, empty, empty, whole + 1):
        plain(x)
    for buffers in run_threads(2, work):
        torch.testing.assert_close(buffers, list(plain.buffers()), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_layer_without_num_batches_tracked_updates_its_buffers_as_pytorch_does(momentum):
    data = torch.randn(2, 4, C, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def work(rank: int, group: dist.ProcessGroup) -> list[Tensor]:
        layer = GlobalBatchNorm1d(C, momentum=momentum, group=group).double()
        layer.num_batches_tracked = None
        layer(data[rank])
        return [layer.running_mean, layer.running_var]

    plain = nn.BatchNorm1d(C, momentum=momentum).double()
    plain.num_batches_tracked = None
    plain(data.flatten(0, 1))
    for buffers in run_threads(2, work):
        torch.testing.assert_close(buffers, [plain.running_mean, plain.running_var], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("channels", [1, C + 1])
@pytest.mark.parametrize("options", [{}, {"affine": False}, {"track_running_stats": False}], ids=str)
def test_another_number_of_channels_is_refused(options, channels):
    def work(rank: int, group: dist.ProcessGroup) -> None:
        layer = GlobalBatchNorm2d(C, **options, group=group)
        with pytest.raises(ValueError, match=rf"has {channels} channels, but (weight|running_mean) has {C}"):
            layer(torch.randn(4, channels, 2, 2))
        layer(torch.randn(4, C, 2, 2))  # nothing was sent, so that the group can still be used

    run_threads(2, work)
    with pytest.raises(RuntimeError):
        nn.BatchNorm2d(C, **options)(torch.randn(4, channels, 2, 2))


def test_without_parameters_and_statistics_any_number_of_channels_is_accepted():
    def work(rank: int, group: dist.ProcessGroup) -> Tensor:
        layer = GlobalBatchNorm2d(C, affine=False, track_running_stats=False, group=group)
        return layer(torch.randn(4, 5, 2, 2))

    assert nn.BatchNorm2d(C, affine=False, track_running_stats=False)(torch.randn(4, 5, 2, 2)).shape[1] == 5
    assert [output.shape[1] for output in run_threads(2, work)] == [5, 5]


TOLERANCES = {torch.float16: 2e-2, torch.bfloat16: 1e-1, torch.float32: 1e-4, torch.float64: 1e-10}


@pytest.mark.parametrize("options", [{}, {"affine": False}, {"track_running_stats": False}], ids=str)
@pytest.mark.parametrize(("parameter", "input"), list(itertools.product(TOLERANCES, TOLERANCES)), ids=str)
def test_the_layer_and_its_input_may_have_any_two_dtypes(parameter, input, options):
    """Also those that PyTorch's layer refuses, so local statistics do: no number is wrong."""
    tolerance = max(TOLERANCES[parameter], TOLERANCES[input])
    inputs = batches([5, 3], SPATIAL[GlobalBatchNorm2d], input)
    ranks = against_oracle(GlobalBatchNorm2d, [5, 3], inputs, options, parameter, rtol=tolerance, atol=tolerance)
    assert {output.dtype for rank in ranks for output in rank["outputs"]} == {input}


def test_a_single_value_per_channel_is_noted():
    def work(rank: int, group: dist.ProcessGroup) -> list[bool]:
        layer = GlobalBatchNorm2d(C, group=group)
        noted = []
        for shape in ((0, C, 2, 2), (1, C, 2, 1), (2, C, 1, 1), (1 + rank, C, 1, 1), (4, C, 2, 2)):
            layer(torch.randn(shape))
            noted.append(layer.had_single_value)
        return noted

    assert run_threads(2, work) == [[False, False, False, True, True], [False] * 5]


TRANSFORMS = {
    "grad": lambda model, x: torch.func.grad(lambda x: model(x).sin().sum())(x),
    "vmap": lambda model, x: torch.vmap(model)(x[None]),
    "grad of parameters": lambda model, x: torch.func.grad(
        lambda parameters: torch.func.functional_call(model, parameters, x).sin().sum()
    )(dict(model.named_parameters())),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_function_transforms_are_refused(name):
    def work(rank: int, group: dist.ProcessGroup) -> None:
        model = nn.Sequential(nn.Linear(C, C), nn.BatchNorm1d(C, track_running_stats=False))
        apply_global_batch_norm(model, group)
        x = torch.randn(4, C)
        TRANSFORMS[name](model.eval(), x)  # local
        with pytest.raises(RuntimeError, match="functorch transforms"):
            TRANSFORMS[name](model.train(), x)
        torch.func.functional_call(model, dict(model.named_parameters()), x).sum().backward()

    run_threads(2, work)


def test_inputs_with_wrong_number_of_dimensions_are_refused():
    def work(rank: int, group: dist.ProcessGroup) -> None:
        GlobalBatchNorm2d(C, group=group)(torch.zeros(2, C))

    with pytest.raises(RankError, match="expected 4D input"):
        run_threads(2, work)


def compiled(rank: int) -> list[bool]:
    import warnings

    warnings.simplefilter("ignore")  # dynamo uses functions that it has deprecated
    dist.init_process_group("gloo")
    layer = GlobalBatchNorm1d(C)
    forward = torch.compile(layer, backend="aot_eager")
    noted = []
    for size in (4, 3, 1 + rank):
        forward(torch.randn(size, C))
        noted.append(layer.had_single_value)
    with pytest.raises(Exception, match="channels, but weight has"):
        forward(torch.randn(4, C + 1))
    return noted


@pytest.mark.slow
def test_compiled_layers_check_their_input():
    assert run_processes(2, compiled) == [[False, False, True], [False] * 3]
