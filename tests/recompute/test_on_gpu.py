"""Recomputation on a GPU: bitwise as plain training, with fewer bytes, in what only a GPU has.

That is: cuDNN's batch norm and recurrent kernels, fused attention, autocast to float16, random numbers of the device,
and a backward pass that runs in a thread of its own. The same tests run on the CPU among the slow ones.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.backends import cudnn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_dp.recompute import apply_recompute
from tests.recompute.counting import differing, state_of
from tests.recompute.models import MODELS, batch, residual
from tests.recompute.test_random_programs import POLICIES as ALL_POLICIES
from tests.recompute.test_random_programs import check

POLICIES = ("cheap", "sublinear")
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.slow),
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
    ),
]
on_each_device = pytest.mark.parametrize("device", DEVICES)


@pytest.fixture(autouse=True)
def deterministic_kernels() -> Iterator[None]:
    """Else two plain trainings on a GPU differ already."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    with cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=True):
        yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


class Attention(nn.Module):
    """A layer of a transformer, with dropout in its attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 64, 3, stride=3)
        self.norm = nn.LayerNorm(64)
        self.qkv = nn.Linear(64, 3 * 64)
        self.out = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Dropout(0.2), nn.Linear(128, 64), nn.SiLU())
        self.head = nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2)
        q, k, v = self.qkv(self.norm(x)).unflatten(2, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        x = x + F.scaled_dot_product_attention(q, k, v, dropout_p=0.1).transpose(1, 2).flatten(2)
        return self.head((x + self.out(x)).mean(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(36, 16), nn.Tanh())
        self.lstm = nn.LSTM(16, 16, num_layers=2, dropout=0.3, batch_first=True)
        self.gru = nn.GRU(16, 16, batch_first=True)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.lstm(torch.sigmoid(self.embed(x.transpose(1, 2).flatten(2))))
        x, _ = self.gru(F.relu(x))
        return self.head(torch.tanh(x[:, -1]))


class Other(nn.Module):
    """Layers of segmentation networks and of small ones."""

    def __init__(self) -> None:
        super().__init__()
        self.depthwise = nn.Sequential(nn.Conv2d(3, 12, 3, groups=3), nn.BatchNorm2d(12), nn.Hardswish())
        self.up = nn.Sequential(nn.ConvTranspose2d(12, 8, 2, stride=2), nn.InstanceNorm2d(8, affine=True), nn.PReLU())
        self.gate = nn.Sequential(nn.Conv2d(8, 8, 1), nn.GroupNorm(2, 8), nn.SiLU(), nn.Dropout2d(0.2), nn.Mish())
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(F.max_pool2d(self.depthwise(x), 2))
        x = self.gate(x).sigmoid() * x + F.softmax(x, 1)
        return self.head(F.avg_pool2d(F.pad(x, (1, 1)), 2).flatten(2).logsumexp(-1))


NETWORKS: dict[str, Callable[[], nn.Module]] = {**MODELS, "recurrent": Recurrent, "other": Other}
AUTOCASTS = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}


def made(name: str, device: str, layout: torch.memory_format = torch.contiguous_format) -> nn.Module:
    torch.manual_seed(3)
    network = NETWORKS[name]() if name in NETWORKS else Attention()
    return network.to(device).to(memory_format=layout)


def train(model: nn.Module, device: str, autocast: torch.dtype | None = None, *contexts: Any) -> dict[str, Tensor]:
    """Train three steps, with a scaled loss as in mixed precision; return the state with the last gradients."""
    torch.manual_seed(5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(3):
        x, y = (part.to(device) for part in batch(step))
        with ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context())
            with torch.autocast(device, autocast) if autocast is not None else nullcontext():
                loss = F.cross_entropy(model(x), y) * 64
            loss.backward()
        optimizer.step()
        if step < 2:
            optimizer.zero_grad()
    found = state_of(model)
    return found if device == "cpu" else found | {"random numbers of the GPU": torch.cuda.get_rng_state()}


def compare(model: nn.Module, policy: str, *args: Any) -> None:
    plain, again = copy.deepcopy(model), copy.deepcopy(model)
    apply_recompute(model, policy)
    expected = train(plain, *args)
    assert differing(train(again, *args), expected) == [], "plain training differs from itself"
    assert differing(train(model, *args), expected) == []


@on_each_device
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("autocast", AUTOCASTS)
@pytest.mark.parametrize("name", NETWORKS)
def test_training_is_bitwise_the_same(name, autocast, policy, device):
    for layout in (torch.contiguous_format, torch.channels_last):
        compare(made(name, device, layout), policy, device, AUTOCASTS[autocast])


@on_each_device
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kernel", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH"])
def test_each_kernel_of_attention_is_bitwise_the_same(kernel, policy, device):
    if device == "cpu" and kernel in ("EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "FLASH_ATTENTION"):
        pytest.skip("CPUs have no such kernel with dropout")

    def chosen() -> Any:
        return sdpa_kernel([getattr(SDPBackend, kernel)])

    compare(made("attention", device), policy, device, torch.bfloat16, chosen)


def bytes_of_a_step(device: str, policy: str | None) -> tuple[int, int]:
    """Return the bytes between forward and backward, and the peak, without parameters and images."""
    torch.manual_seed(3)
    model = residual(num_blocks=12).to(device).to(memory_format=torch.channels_last)
    if policy:
        apply_recompute(model, policy)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    images = torch.randn(32, 3, 96, 96, device=device)
    model(images).square().mean().backward()  # the libraries take their workspaces
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss = model(images).square().mean()
    kept = torch.cuda.memory_allocated() - before
    loss.backward()
    return kept, torch.cuda.max_memory_allocated() - before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_allocator_of_the_gpu_sees_fewer_bytes():
    plain_kept, plain_peak = bytes_of_a_step("cuda", None)
    for policy, share in (("cheap", 0.75), ("sublinear", 0.5)):
        kept, peak = bytes_of_a_step("cuda", policy)
        assert kept <= share * plain_kept, policy
        assert peak <= plain_peak, policy


@on_each_device
@pytest.mark.parametrize("piece", range(4))
def test_random_programs_are_bitwise_those_of_plain_training(piece, device):
    """Bytes are counted on the CPU alone: there the counter sees backward, too."""
    for seed in range(50 * piece, 50 * piece + 50):
        check(seed, ALL_POLICIES, device)
