"""Basis of the accuracy benchmark: slices of a batch on one device equal several devices with local batch norm."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.sliced_batch_norm import SlicedBatchNorm2d, slice_batch_norm
from torch import Tensor, nn

from lightning_dp.layers import apply_global_batch_norm, average_running_statistics, global_batch_norm_layers
from lightning_dp.models import resnet20
from tests.ranks import run_threads

BATCH, STEPS = 8, 6
EXACT = {"rtol": 1e-10, "atol": 1e-10}
PHASES = {
    "local": [False] * STEPS,
    "until_converged": [True] * 3 + [False] * 3,
    "after_converged": [False] * 3 + [True] * 3,
}


def small_net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 5, 3, stride=2, bias=False),
        nn.BatchNorm2d(5, momentum=0.3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(5 * 3 * 3, 4),
    ).double()


def batches() -> list[tuple[Tensor, Tensor]]:
    """Global batches whose images differ in mean and standard deviation, so that each slice has other statistics."""
    generator = torch.Generator().manual_seed(5)
    scale = torch.linspace(0.5, 3, BATCH, dtype=torch.float64).view(-1, 1, 1, 1)
    images = torch.randn(STEPS, BATCH, 3, 8, 8, generator=generator, dtype=torch.float64) * scale + 2 * scale
    return list(zip(images, torch.randint(4, (STEPS, BATCH), generator=generator), strict=True))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-2)


def on_ranks(world_size: int, is_global: list[bool], average_gradients: bool = True) -> list[dict[str, Tensor]]:
    """Parameters and averaged running statistics of ranks that each train on a part of the batches."""
    model, data = small_net(), batches()

    def work(rank: int, group: dist.ProcessGroup) -> dict[str, Tensor]:
        ours = copy.deepcopy(model)
        apply_global_batch_norm(ours, group)
        optimizer = optimizer_of(ours)
        for (x, y), switch in zip(data, is_global, strict=True):
            for layer in global_batch_norm_layers(ours):
                layer.is_global = switch
            optimizer.zero_grad()
            F.cross_entropy(ours(x.chunk(world_size)[rank]), y.chunk(world_size)[rank]).backward()
            for parameter in ours.parameters():
                if average_gradients:
                    dist.all_reduce(parameter.grad, group=group)
                    parameter.grad /= world_size
            optimizer.step()
        average_running_statistics(ours, group)
        return ours.state_dict()

    return run_threads(world_size, work)


def on_one_device(num_slices: int, is_global: list[bool]) -> dict[str, Tensor]:
    """The same for one device that trains on the whole batches, in slices while statistics are local."""
    model = small_net()
    layers = slice_batch_norm(model)
    assert len(layers) == 2
    optimizer = optimizer_of(model)
    for (x, y), switch in zip(batches(), is_global, strict=True):
        for layer in layers:
            layer.num_slices = 1 if switch else num_slices
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model.state_dict()


def compare(ranks: list[dict[str, Tensor]], sliced: dict[str, Tensor], only: str = "") -> None:
    for rank in ranks:
        assert rank.keys() == sliced.keys()
        for name in (name for name in sliced if only in name):
            torch.testing.assert_close(rank[name], sliced[name], **EXACT, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("world_size", [*(pytest.param(n, marks=pytest.mark.slow) for n in (2, 8)), 4])
def test_slices_on_one_device_train_as_ranks_with_local_statistics(world_size, phase):
    compare(on_ranks(world_size, PHASES[phase]), on_one_device(world_size, PHASES[phase]))


def test_four_ranks_differ_from_any_other_number_of_slices():
    ranks = on_ranks(4, PHASES["local"])
    for num_slices in (1, 2, 8):
        sliced = on_one_device(num_slices, PHASES["local"])
        for only in ("weight", "running_mean", "running_var"):
            with pytest.raises(AssertionError, match="not close"):
                compare(ranks, sliced, only)


def test_the_comparison_needs_averaged_gradients():
    with pytest.raises(AssertionError, match="not close"):
        compare(on_ranks(4, PHASES["local"], average_gradients=False), on_one_device(4, PHASES["local"]))


def run_resnet(num_slices: int, batch_size: int, size: int) -> Any:
    torch.manual_seed(2)
    model = resnet20()
    for layer in slice_batch_norm(model):
        layer.num_slices = num_slices
    model(torch.randn(batch_size, 3, size, size)).square().sum().backward()
    return model


def test_one_image_per_slice_works_if_it_has_several_pixels():
    model = run_resnet(num_slices=4, batch_size=4, size=32)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    with pytest.raises(ValueError, match="more than 1 value per channel"):  # as on a device of its own
        run_resnet(num_slices=4, batch_size=4, size=4)
    with pytest.raises(ValueError, match="10 images cannot be cut into 4 equal slices"):
        run_resnet(num_slices=4, batch_size=10, size=32)


def test_with_one_slice_or_in_evaluation_it_equals_the_pytorch_layer():
    x = torch.randn(4, 3, 5, 5)
    ours, plain = SlicedBatchNorm2d(3), nn.BatchNorm2d(3)
    assert torch.equal(ours(x), plain(x))
    torch.testing.assert_close(ours.state_dict(), plain.state_dict())
    ours.num_slices = 3
    torch.testing.assert_close(ours.eval()(x), plain.eval()(x))


@pytest.mark.parametrize("num_slices", [1, 2, 4])
def test_whole_var_is_the_variance_of_the_whole_batch_for_any_number_of_slices(num_slices):
    x = torch.randn(4, 3, 5, 5) + torch.arange(4).view(4, 1, 1, 1)
    ours, plain = SlicedBatchNorm2d(3), nn.BatchNorm2d(3)
    ours.num_slices = num_slices
    ours(x), plain(x)
    torch.testing.assert_close(ours.whole_var, plain.running_var)
    torch.testing.assert_close(ours.running_mean, plain.running_mean)
    assert torch.allclose(ours.running_var, plain.running_var) == (num_slices == 1)
