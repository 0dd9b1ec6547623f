"""The communicator on the device, over gloo and in host memory: NCCL is not needed for its order and its sums."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pytorch_lightning.plugins.environments import LightningEnvironment
from pytorch_lightning.strategies import DDPStrategy

from lightning_dp.collectives.groups import RankTopology
from lightning_dp.strategies import LayeredSGDStrategy
from lightning_dp.strategies.layered_sgd import device_communicator
from lightning_dp.strategies.layered_sgd.device_communicator import DeviceAllReduce, DeviceCommunicator
from lightning_dp.strategies.layered_sgd.options import CommunicatorOptions
from tests.ranks import run_processes
from tests.strategies.layered_sgd.modules import OVERLAPS, Unused, fit, layered
from tests.strategies.modules import Net, assert_same, snapshot

CPU = torch.device("cpu")
SIZES = (0, 1, 2, 7, 4100)
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex128)


def values(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [
        torch.randn(size, dtype=torch.complex128, generator=generator).to(dtype)
        if dtype.is_complex
        else torch.randn(size, dtype=torch.float64, generator=generator).to(dtype)
        for dtype in DTYPES
        for size in SIZES
    ]


def all_reduce(rank, topologies):
    dist.init_process_group("gloo")
    results = []
    for topology in topologies:
        collective = DeviceAllReduce(topology, rank)
        buffers = values(rank)
        for buffer in buffers:
            collective.all_reduce(buffer)
        collective.close()
        results.append(buffers)
    return results


@pytest.mark.ci
@pytest.mark.parametrize(("world_size", "group_sizes"), [(4, (1, 2, 4)), (3, (1, 3))])
def test_sums_over_all_ranks(world_size, group_sizes):
    """Also with fewer elements than ranks in a group, and with a rest."""
    topologies = [RankTopology(world_size, group_size) for group_size in group_sizes]
    results = run_processes(world_size, all_reduce, topologies)
    addends = zip(*([v.to(torch.complex128) for v in values(rank)] for rank in range(world_size)), strict=True)
    for index, exact in enumerate(map(sum, addends)):
        for topology in range(len(topologies)):
            first = results[0][topology][index]
            epsilon = torch.finfo(first.dtype).eps
            torch.testing.assert_close(first.to(torch.complex128), exact, rtol=4 * epsilon, atol=8 * epsilon)
            assert all(torch.equal(rank[topology][index], first) for rank in results)


CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "momentum": (Net, {}, {}),
    "all together": (
        lambda: Net("adamw", "step"),
        {"gradient_clip_val": 0.1, "accumulate_grad_batches": 3},
        {},
    ),
    "unused parameters": (Unused, {}, {"find_unused_parameters": True}),
}


def sum_on_device() -> list[DeviceCommunicator]:
    """Let the strategy choose this way on the CPU; return the communicators that it then makes."""
    CommunicatorOptions.sums_on_device = lambda self, backend: True
    made: list[DeviceCommunicator] = []
    make = CommunicatorOptions.make_communicator
    CommunicatorOptions.make_communicator = lambda *args: made.append(make(*args)) or made[-1]
    return made


def compare_with_ddp(rank):
    made = sum_on_device()
    for make, options, ddp_options in CASES.values():
        expected = snapshot(*fit(DDPStrategy(**ddp_options), 4, make(), **options))
        for overlap in OVERLAPS:
            strategy = layered(2, overlap=overlap, **ddp_options)
            assert_same(snapshot(*fit(strategy, 4, make(), **options)), expected)
            assert type(made[-1]) is DeviceCommunicator
            assert made[-1]._early == (overlap == "step" and not ddp_options)


@pytest.mark.ci
def test_equals_ddp():
    run_processes(4, compare_with_ddp)


class Peeking(Net):
    """Reads a gradient in backward, when it is final."""

    def configure_optimizers(self):
        self.first.weight.register_hook(self.peek)
        return super().configure_optimizers()

    def peek(self, gradient: torch.Tensor) -> None:
        self.last.bias.grad  # noqa: B018


def peek(rank):
    sum_on_device()
    with pytest.raises(RuntimeError, match="bucket 0 is used during backward, and its sum starts only after backward"):
        fit(LayeredSGDStrategy(1, overlap="load", bucket_cap_mb=100 / 2**20), 2, Peeking())


def test_a_sum_that_has_not_been_issued_is_not_waited_for():
    """Issued by the rank that asks for it, it would take another place among the collectives than on its peers."""
    run_processes(2, peek)


# --- the choice, and NCCL's settings ---


@pytest.mark.parametrize(
    ("options", "backend", "expected"),
    [
        ({}, "nccl", True),
        ({}, "cpu:gloo,cuda:nccl", True),
        ({}, "gloo", False),
        ({"communicator_device": "cpu"}, "nccl", False),
        ({"communicator_device": "gpu"}, "gloo", True),
        ({"compression": "bf16"}, "nccl", False),
        ({"all_reduce": "ring"}, "nccl", False),
    ],
)
def test_by_default_nccl_sums_on_the_device_and_the_host_does_all_else(options, backend, expected):
    assert LayeredSGDStrategy(**options)._options.sums_on_device(backend) == expected


def test_a_ring_on_the_device_is_refused():
    with pytest.raises(ValueError, match="all_reduce='ring' works in host memory, and communicator_device='gpu'"):
        LayeredSGDStrategy(all_reduce="ring", communicator_device="gpu")


GPUS = [torch.device("cuda", index) for index in range(2)]


@pytest.mark.parametrize(
    ("options", "devices", "backend", "expected"),
    [
        ({}, GPUS, None, "1"),
        ({}, GPUS, "nccl", "1"),
        ({}, GPUS, "gloo", None),
        ({}, [CPU, CPU], None, None),
        ({"communicator_device": "cpu"}, GPUS, None, "1"),
    ],
)
def test_the_launch_order_is_requested_where_nccl_takes_part(options, devices, backend, expected, monkeypatch):
    monkeypatch.delenv(device_communicator.LAUNCH_ORDER, raising=False)
    LayeredSGDStrategy(**options)._options.prepare_environment(devices, backend, "LayeredSGDStrategy")
    assert os.environ.get(device_communicator.LAUNCH_ORDER) == expected


@pytest.mark.parametrize(("group_size", "expected"), [(1, "1"), (2, None)])
def test_the_strategy_requests_it_before_any_process_starts(group_size, expected, monkeypatch):
    """With a single group, DDP sums."""
    monkeypatch.delenv(device_communicator.LAUNCH_ORDER, raising=False)
    strategy = LayeredSGDStrategy(group_size, parallel_devices=GPUS, cluster_environment=LightningEnvironment())
    strategy._configure_launcher()
    assert os.environ.get(device_communicator.LAUNCH_ORDER) == expected


def test_a_launch_order_that_comes_too_late_is_warned_of(monkeypatch, caplog):
    monkeypatch.delenv(device_communicator.LAUNCH_ORDER, raising=False)
    prepare = LayeredSGDStrategy()._options.prepare_environment
    with monkeypatch.context() as patch:
        patch.setattr(dist, "is_initialized", lambda: True)
        prepare(GPUS, None, "LayeredFSDPStrategy")
    assert "LayeredFSDPStrategy: a process group exists already, so NCCL may not read NCCL_LAUNCH" in caplog.text
    caplog.clear()
    prepare(GPUS, None, "LayeredFSDPStrategy")
    assert not caplog.text


def test_the_users_launch_order_stays_and_is_warned_of(monkeypatch, caplog):
    def warn() -> str:
        caplog.clear()
        device_communicator.request_launch_order()
        LayeredSGDStrategy()._options._warn_of_backend("nccl", 0, GPUS[0], "LayeredSGDStrategy")
        return caplog.text

    monkeypatch.setenv(device_communicator.LAUNCH_ORDER, "0")
    assert "ranks may wait for each other for ever, because NCCL_LAUNCH_ORDER_IMPLICIT is 0; set it to 1" in warn()
    monkeypatch.delenv(device_communicator.LAUNCH_ORDER)
    assert not warn()


# --- on GPUs ---


def sum_beside_busy_kernels(rank):
    """One rank: the sum is the buffer itself, for code that waits for the kernels that fill it."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    device_communicator.request_launch_order()
    dist.init_process_group("nccl", device_id=device)
    collective = DeviceAllReduce(RankTopology(1, 1), rank)
    communicator = DeviceCommunicator(collective, True, device)
    matrix = torch.full((2048, 2048), 1 / 2048, device=device)
    for step in range(20):
        busy = torch.full_like(matrix, float(step))
        for _ in range(20):
            busy = busy @ matrix
        expected = busy.clone()
        bucket = communicator.submit(0, busy.view(-1))
        with torch.cuda.stream(torch.cuda.Stream(device)):
            bucket.wait()
            result = busy.clone()
        torch.cuda.synchronize(device)
        assert torch.equal(result, expected)
    communicator.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_nccl_waits_for_queued_kernels():
    run_processes(1, sum_beside_busy_kernels)
