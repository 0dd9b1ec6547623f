"""Ranks whose loaders have different numbers of batches, without a validation: nobody waits for the timeout."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

from lightning_dp import KrizhevskyHybridStrategy
from lightning_dp.strategies import PowerSGD
from tests.ranks import run_processes
from tests.strategies.krizhevsky_hybrid.modules import StepNet, batches, fit_with
from tests.strategies.layered_sgd.modules import fit, layered
from tests.strategies.modules import Net


class FewerOnRank1(Net):
    def on_train_batch_start(self, batch, batch_idx):
        return -1 if self.global_rank == 1 and batch_idx == 3 else None


def end_early(rank, compression):
    try:
        fit(layered(1, compression=compression, timeout=timedelta(seconds=60)), 2, FewerOnRank1())
    except RuntimeError as error:
        return str(error)
    return "ended"


@pytest.mark.parametrize("compression", ["int8", PowerSGD(rank=1)])
def test_a_rank_with_fewer_batches_ends_and_waits_for_nobody(compression):
    of_rank_0, of_rank_1 = run_processes(2, end_early, compression)
    assert "failed: one of these ranks has died" in of_rank_0
    assert of_rank_1 == "ended"


class WithBuffers(StepNet):
    """DDP broadcasts the buffers of batch norm in the forward, before the head is called."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk.append(nn.BatchNorm1d(6).double())


class LogsOfEpochs(StepNet):
    """At the end of an epoch its metric is reduced over ranks."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss


def _unequal(rank: int, shorter: int, net: type[StepNet], evaluation: Any) -> str:
    loader = batches(rank, 2, steps=4)
    if rank == shorter:
        loader = DataLoader(Subset(loader.dataset, range(6)), batch_size=3)
    strategy = KrizhevskyHybridStrategy(timeout=timedelta(minutes=10), evaluation=evaluation)
    try:
        with pytest.raises(RuntimeError) as error:
            fit_with(loader, strategy, 2, net, {})
    finally:
        dist.destroy_process_group()  # as the end of the process does, for which the other rank may wait
    return str(error.value)


@pytest.mark.parametrize("shorter", [0, 1])
@pytest.mark.parametrize("net", [StepNet, WithBuffers, LogsOfEpochs])
@pytest.mark.parametrize("evaluation", ["gathered", "sharded"])
def test_ranks_with_different_numbers_of_batches_are_told_so_at_once(shorter, net, evaluation):
    # Long before the strategy's timeout. Where one rank raises first, the other may find it gone.
    said = run_processes(2, _unequal, shorter, net, evaluation)
    assert any("Ranks whose loaders have different numbers of batches do so, too" in text for text in said)
