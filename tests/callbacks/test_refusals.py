"""Ranks that are stuck, batches that local statistics would refuse, and advice that Lightning would give."""

from __future__ import annotations

import copy
import os
from datetime import timedelta
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.strategies import DDPStrategy
from pytorch_lightning.trainer.connectors.logger_connector import result
from torch import nn
from torch.utils.data import DataLoader

from lightning_dp._private.torch_names import group_timeout
from lightning_dp.callbacks import AdaptiveGlobalBatchNorm, Plateau, StepTimer
from lightning_dp.collectives import PeerError, RingState, ring_all_reduce_hook
from lightning_dp.strategies import KrizhevskyHybridStrategy, LayeredSGDStrategy
from tests.callbacks.training import CLASSES, Batches, Net, dataset, fit
from tests.ranks import run_processes

# --- a rank that is stuck ---


class StuckOnRank1(pl.Callback):
    """Rank 1 does not begin its third step before rank 0 has raised an error."""

    def __init__(self, store: dist.Store) -> None:
        self.store = store

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, index: int) -> None:
        if trainer.global_rank == 1 and index == 2:  # after DDP has rebuilt its buckets
            self.store.wait(["rank 0 has raised"], timedelta(seconds=60))
            raise RuntimeError("released")


def train_with_a_stuck_rank(rank: int, options: dict[str, Any]) -> str:
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]))
    callbacks = [StuckOnRank1(store), AdaptiveGlobalBatchNorm(**options)]
    strategy = DDPStrategy(timeout=timedelta(seconds=4))
    with pytest.raises((PeerError, RuntimeError)) as error:
        fit(2, *callbacks, strategy=strategy)
    store.set("rank 0 has raised", "")
    return f"{type(error.value).__name__}: {error.value}"


@pytest.mark.ci
@pytest.mark.parametrize("options", [{"max_batch_size": 100}, pytest.param({}, marks=pytest.mark.slow)], ids=str)
def test_a_stuck_rank_is_named_within_the_timeout_of_the_strategy(options):
    """torch's default timeout, 30 minutes, would be longer than `run_processes` waits."""
    first, second = run_processes(2, train_with_a_stuck_rank, options)
    assert first.startswith("PeerError: rank 0 could not receive from rank 1 of the group (global rank 1)")
    assert second == "RuntimeError: released"


STRATEGIES = {
    "ddp": lambda timeout: DDPStrategy(timeout=timeout),
    "layered sgd": lambda timeout: LayeredSGDStrategy(2, timeout=timeout),
    "hybrid": lambda timeout: KrizhevskyHybridStrategy(head="net.5", timeout=timeout),
}
# The default group, two of the callback, and: one of the ring; three of the communicator; two of the head.
NUM_GROUPS = {"ddp": 4, "layered sgd": 6, "hybrid": 5}


class Timeouts(pl.Callback):
    """Record of the timeout of each process group that this rank is a member of (s)."""

    def __init__(self, ring: RingState | None) -> None:
        self.ring = ring

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.ring is not None:
            trainer.strategy.model.register_comm_hook(self.ring, ring_all_reduce_hook)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        groups = dist.distributed_c10d._world.pg_map
        self.seconds = [group_timeout(group, torch.device("cpu")).total_seconds() for group in groups]


def train_and_read_timeouts(rank: int, strategy: str) -> list[float]:
    net = Net()
    net.net.append(nn.Linear(CLASSES, CLASSES, dtype=torch.float64))
    callback = AdaptiveGlobalBatchNorm(max_batch_size=100, group_size=2)
    timeouts = Timeouts(RingState() if strategy == "ddp" else None)
    fit(4, callback, timeouts, net=net, strategy=STRATEGIES[strategy](timedelta(seconds=77)), max_steps=1)
    return timeouts.seconds


@pytest.mark.ci
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_all_groups_have_the_timeout_of_the_strategy(strategy):
    """Those of the callback, of the strategy and of the ring."""
    for seconds in run_processes(4, train_and_read_timeouts, strategy):
        assert set(seconds) == {77}
        assert len(seconds) >= NUM_GROUPS[strategy]


# --- a single value per channel ---

PLATEAU = {"convergence": Plateau("train_loss", patience=9)}


def train_sizes(rank: int, sizes: list[list[int]], options: dict[str, Any]) -> int:
    loader = DataLoader(dataset(2), batch_sampler=Batches([list(range(size)) for size in sizes[rank]]))
    net = Net((1.0,) * 2)
    fit(2, AdaptiveGlobalBatchNorm(**copy.deepcopy(options)), net=net, loader=loader, max_epochs=2)
    return net.trainer.global_step


def error_of_sizes(rank: int, sizes: list[list[int]]) -> str:
    with pytest.raises(ValueError, match="single value") as error:
        train_sizes(rank, sizes, PLATEAU)
    return str(error.value)


@pytest.mark.parametrize(
    ("sizes", "where"),
    [
        ([[1, 3], [1, 3]], "rank 0: 'net.1', 'net.4'; rank 1: 'net.1', 'net.4'"),
        ([[3, 3], [1, 3]], "rank 1: 'net.1', 'net.4'"),
        ([[3, 3, 1], [3, 3, 2]], "rank 0: 'net.1', 'net.4'"),
    ],
    ids=["first batch", "first batch of one rank", "last batch of one rank"],
)
def test_what_local_statistics_would_refuse_is_refused_on_all_ranks_in_the_first_epoch(sizes, where):
    for error in run_processes(2, error_of_sizes, sizes):
        assert error.startswith(f"batch norm layers had a single value per channel ({where}). Global statistics")


ALLOWED = {
    "statistics stay global": {},
    "always global": {"global_phase": "always"},
    "small batches stay global": {"max_batch_size": 5},
}


@pytest.mark.parametrize("options", ALLOWED.values(), ids=ALLOWED.keys())
def test_a_single_value_is_accepted_where_statistics_stay_global(options):
    assert run_processes(2, train_sizes, [[1, 3, 1], [2, 4, 1]], options) == [6, 6]


# --- advice ---


def train_and_log(rank: int) -> tuple[list[str], dict[str, float]]:
    messages: list[str] = []
    result.warning_cache.warn = lambda message, **_: messages.append(message)
    _, trainer = fit(2, AdaptiveGlobalBatchNorm(), StepTimer(), net=Net((1.0,)))
    return messages, {name: float(value) for name, value in trainer.callback_metrics.items() if "/" in name}


def test_lightning_does_not_advise_to_reduce_what_the_callbacks_log():
    for messages, metrics in run_processes(2, train_and_log):
        assert {"agbn/is_global", "time/step_s", "time/compute_s", "time/data_wait_s"} <= metrics.keys()
        assert messages == []
