"""The communicator on the CPU: buckets are copied to host memory and summed there by gloo."""

from __future__ import annotations

import os
import re
import warnings
from datetime import timedelta
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from lightning_fabric.utilities.warnings import PossibleUserWarning
from pytorch_lightning.strategies import DDPStrategy

from lightning_dp.collectives.hierarchical import HierarchicalAllReduce
from lightning_dp.strategies import LayeredSGDStrategy
from lightning_dp.strategies.layered_sgd import device_communicator
from lightning_dp.strategies.layered_sgd import options as layered_sgd
from lightning_dp.strategies.layered_sgd.host_communicator import Communicator, HostCopy
from tests.ranks import RankError, run_processes
from tests.strategies.modules import SMALL_BUCKETS_MB, Net, assert_same, data, snapshot, trainer

OVERLAPS, COMMUNICATORS = ("load", "step"), ("leader", "sharded")
STEPS = 7
gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


class OnHost(Communicator):
    """Copies buckets that are in host memory already, as it would those of a GPU."""

    def __init__(self, collective, prioritized, timeout, device, on_host, on_stage, compressed):
        assert not on_host, "on a CPU there is nothing to copy"
        super().__init__(collective, prioritized, timeout, device, True, on_stage, compressed)


class ReducesFirst(HierarchicalAllReduce):
    """Reduces within groups in the communication hook, as NCCL does it. The rest is done by gloo in a thread."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments[:-1], True, **options)


def layered(group_size: int = 1, **options: Any) -> LayeredSGDStrategy:
    return LayeredSGDStrategy(group_size, bucket_cap_mb=SMALL_BUCKETS_MB, **options)


def fit(strategy: Any, world_size: int, module: pl.LightningModule | None = None, **options: Any):
    module = module or Net()
    t = trainer(strategy, world_size, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PossibleUserWarning)
        t.fit(module, data(world_size, STEPS))
    return module, t


class Accumulating(Net):
    """By hand, with a clipped gradient, and a last backward that no step follows."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.manual_backward(self.loss(batch) / 3)
        if batch_idx % 3 == 2:
            optimizer = self.optimizers()
            self.first.weight.grad.clamp_(-1e-3, 1e-3)
            optimizer.step()
            optimizer.zero_grad()


def gradients(module):
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


CASES: dict[str, tuple[type[Net], dict[str, Any]]] = {
    "plain": (Net, {}),
    "clip, accumulate": (Net, {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}),
    "by hand": (Accumulating, {}),
}


def compare_with_ddp(rank, world_size, group_size, case):
    layered_sgd.Communicator = OnHost
    make, options = CASES[case]
    module, t = fit(DDPStrategy(), world_size, make(), **options)
    expected, left = snapshot(module, t), gradients(module)
    for overlap in OVERLAPS:
        for communicator in COMMUNICATORS:
            strategy = layered(group_size, communicator=communicator, overlap=overlap)
            module, t = fit(strategy, world_size, make(), **options)
            assert_same(snapshot(module, t), expected)
            if make is Accumulating:
                assert left
                assert_same(gradients(module), left)


@pytest.mark.parametrize("case", CASES)
def test_equals_ddp(case):
    run_processes(4, compare_with_ddp, 4, 2, case)


def compare_reduced_first(rank, lost):
    layered_sgd.HierarchicalAllReduce = ReducesFirst
    if lost:
        ReducesFirst.reduce_on_device = lambda self, buffer: slice(None)
    compare_with_ddp(rank, 4, 2, "clip, accumulate")


@pytest.mark.ci
def test_equals_ddp_if_groups_are_reduced_before_the_carriers_copy_their_part():
    run_processes(4, compare_reduced_first, False)


@pytest.mark.ci
def test_differs_from_ddp_if_groups_are_not_reduced():
    with pytest.raises(RankError, match="first.weight"):
        run_processes(4, compare_reduced_first, True)


@pytest.mark.parametrize(
    ("backend", "find_unused_parameters", "launch_order", "expected"),
    [
        ("nccl", False, "1", True),
        ("cpu:gloo,cuda:nccl", False, "1", True),
        ("gloo", False, "1", False),
        (None, False, "1", False),
        ("nccl", True, "1", False),
        ("nccl", False, "0", False),
    ],
)
def test_groups_are_reduced_on_gpus_where_nccl_keeps_the_order_of_the_hooks(
    backend, find_unused_parameters, launch_order, expected, monkeypatch
):
    monkeypatch.setenv(device_communicator.LAUNCH_ORDER, launch_order)
    assert layered_sgd._may_reduce_on_device(backend, find_unused_parameters) == expected


def compare_without_copying_back(rank):
    HostCopy.copy_back = lambda self: None
    compare_with_ddp(rank, 2, 1, "plain")


def test_differs_from_ddp_if_the_sums_do_not_come_back():
    with pytest.raises(RankError, match="first.weight"):
        run_processes(2, compare_without_copying_back)


class Dying(Net):
    def training_step(self, batch, batch_idx):
        if self.global_rank == 1 and batch_idx == 3:
            os._exit(3)
        return super().training_step(batch, batch_idx)


def outlive_a_peer(rank):
    layered_sgd.Communicator = OnHost
    with pytest.raises(RuntimeError) as caught:
        fit(layered(timeout=timedelta(seconds=20)), 2, Dying())
    raise AssertionError(f"survived: {caught.value}")


def test_a_dead_peer_is_named():
    with pytest.raises(RankError) as caught:
        run_processes(2, outlive_a_peer)
    said = (
        r"survived: the (sum|order) of .*, between rank 0 and rank 1 \(group 1\), failed: one of these ranks has died"
    )
    assert re.search(said, str(caught.value))


def test_a_communicator_on_gpus_is_refused_where_there_are_none():
    with pytest.raises(ValueError, match="communicator_device='gpu' needs gradients on GPUs, but this job"):
        trainer(layered(communicator_device="gpu"), 2)
    with pytest.raises(ValueError, match="communicator_device='tpu' is not known; use one of 'auto', 'cpu', 'gpu'"):
        layered(communicator_device="tpu")


# --- on GPUs ---


def compare_on_gpus(rank, world_size, backend, communicator_device, one_device):
    """Ranks are nodes of one process each where they share a device."""
    options: dict[str, Any] = {"accelerator": "cuda", "num_nodes": world_size if one_device else 1}

    def fit_on_gpus(strategy):
        return snapshot(*fit(strategy, world_size, **options))

    expected = fit_on_gpus(DDPStrategy(process_group_backend=backend))
    for overlap in OVERLAPS:
        for communicator in COMMUNICATORS:
            strategy = layered(
                world_size // 2,
                communicator=communicator,
                overlap=overlap,
                communicator_device=communicator_device,
                process_group_backend=backend,
            )
            assert_same(fit_on_gpus(strategy), expected, rtol=1e-8)


@gpu
@needs_gpu
@pytest.mark.parametrize("communicator_device", ["cpu", "gpu"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_equals_ddp_on_one_gpu(world_size, communicator_device):
    """Over gloo, for NCCL refuses two ranks on one device."""
    run_processes(world_size, compare_on_gpus, world_size, "gloo", communicator_device, True, num_nodes=world_size)


@gpu
@needs_two_gpus
@pytest.mark.parametrize("communicator_device", ["cpu", "auto"])
def test_equals_ddp_with_nccl(communicator_device):
    run_processes(2, compare_on_gpus, 2, "nccl", communicator_device, False)
