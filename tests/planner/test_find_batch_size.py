"""Batch sizes by trial: ranks agree, nothing hangs, and nothing stays changed."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from lightning_dp import AdaptiveGlobalBatchNorm
from lightning_dp.planner import FindBatchSize, try_batch_sizes
from lightning_dp.planner.convolutions import measure
from tests.ranks import RankError, run_processes, run_threads


def out_of_memory_from(limit: int, tried: list[int]):
    def step(size: int) -> None:
        tried.append(size)
        if size >= limit:
            raise torch.OutOfMemoryError("CUDA out of memory")

    return step


def test_sizes_are_tried_from_the_smallest_until_one_does_not_fit():
    tried: list[int] = []
    found = try_batch_sizes(out_of_memory_from(32, tried), (64, 8, 16, 32), repeats=1)
    assert sorted(set(tried)) == [8, 16, 32]
    assert (list(found.images_per_s), found.too_large) == ([8, 16], 32)
    assert found.table().splitlines()[-1] == "| 32 | does not fit |"


def test_the_fastest_size_wins_and_not_the_largest(monkeypatch):
    # 100 images/s with 4, 200 with 8, 160 with 16. A clock of the test's own: the machine may pause.
    seconds = {4: 0.04, 8: 0.04, 16: 0.1}
    now = [0.0]
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def step(size: int) -> None:
        now[0] += seconds[size]

    found = try_batch_sizes(step, seconds, repeats=1)
    assert (found.batch_size, found.too_large) == (8, None)
    assert found.images_per_s == pytest.approx({4: 100.0, 8: 200.0, 16: 160.0})


def trials_of_rank(rank, group, limits):
    return try_batch_sizes(out_of_memory_from(limits[rank], []), (8, 16, 32, 64), group=group, repeats=1)


def test_ranks_agree_if_one_of_them_is_out_of_memory():
    first, second, third = run_threads(3, trials_of_rank, (1000, 32, 64))
    assert first == second == third
    assert (list(first.images_per_s), first.too_large) == ([8, 16], 32)


def test_if_nothing_fits_all_ranks_say_so():
    with pytest.raises(RankError) as caught:
        run_threads(2, trials_of_rank, (1000, 8))
    assert str(caught.value).count("not even 8 images per rank fit") >= 2


def failing(rank, group):
    def step(size: int) -> None:
        if rank == 1 and size == 16:
            raise KeyError("a mistake")

    return try_batch_sizes(step, (8, 16), group=group, repeats=1)


def test_another_error_ends_the_trials_of_all_ranks():
    with pytest.raises(RankError) as caught:
        run_threads(2, failing)
    assert "batch size 16 raised an error on another rank" in str(caught.value)
    assert "KeyError: 'a mistake'" in str(caught.value)


def different(rank, group):
    return try_batch_sizes(lambda size: None, (8, 16 + rank), group=group, repeats=1)


def test_different_sizes_are_refused_on_all_ranks():
    with pytest.raises(RankError) as caught:
        run_threads(2, different)
    assert str(caught.value).count("differ between the ranks") >= 2


def test_memory_that_the_host_does_not_have_is_known():
    tried = try_batch_sizes(lambda size: torch.empty(size, dtype=torch.uint8), (8, 2**60), repeats=1)
    assert tried.too_large == 2**60


# --- the callback ---


class Data(pl.LightningDataModule):
    def __init__(self, num_shares: int = 1) -> None:
        super().__init__()
        self.batch_size, self.num_shares = 2, num_shares

    def train_dataloader(self) -> DataLoader:
        images = TensorDataset(torch.randn(32, 3, 6, 6), torch.arange(32) % 4)
        return DataLoader(images, batch_size=self.batch_size // self.num_shares)


class Net(pl.LightningModule):
    """Runs out of memory at batches of ``limit`` images."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit
        self.net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(), nn.Flatten(), nn.Linear(64, 4))
        self.mean = MeanMetric()
        self.sizes: list[int] = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.sizes.append(len(x))
        if len(x) >= self.limit:
            raise torch.OutOfMemoryError("CUDA out of memory")
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.mean.update(loss.detach())
        self.log("loss", self.mean)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(net: Net, data: Data, *callbacks: pl.Callback, **options) -> pl.Trainer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(
            accelerator="cpu",
            callbacks=list(callbacks),
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            max_epochs=1,
            **options,
        )
        trainer.fit(net, datamodule=data)
    return trainer


class StateAtStart(pl.Callback):
    def on_fit_start(self, trainer, pl_module):
        self.state = {name: value.clone() for name, value in pl_module.state_dict().items()}
        self.random = torch.get_rng_state()
        self.total = float(pl_module.mean.update_count)


def test_training_starts_as_if_nothing_had_been_tried():
    net, data, seen = Net(limit=16), Data(), StateAtStart()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    finder = FindBatchSize((2, 4, 8, 16, 32), repeats=1)
    fit(net, data, finder, seen)
    assert finder.trials.too_large == 16
    assert data.batch_size == finder.trials.batch_size in (2, 4, 8)
    assert all(torch.equal(value, before[name]) for name, value in seen.state.items())
    assert seen.total == 0
    assert net.sizes[-1] == data.batch_size, "training uses the new size"
    assert "log" not in vars(net)


def find_on_rank(rank):
    net, data = Net(limit=(1000, 8)[rank]), Data(num_shares=2)
    finder = FindBatchSize((2, 4, 8, 16), is_global=True, repeats=1)
    trainer = fit(net, data, AdaptiveGlobalBatchNorm(), finder, devices=2, strategy="ddp", limit_train_batches=2)
    return finder.trials, data.batch_size, trainer.world_size


def test_under_ddp_the_ranks_agree_though_one_is_out_of_memory():
    (first, size, world_size), (second, other, _) = run_processes(2, find_on_rank)
    assert first == second
    assert (list(first.images_per_s), first.too_large) == ([2, 4], 8)
    assert size == other == first.batch_size * world_size


def test_what_cannot_be_tried_is_refused_before_training():
    data = Data()
    data.batch_size = None
    with pytest.raises(ValueError, match=r"sets batch_size of the data module, and .* has none that is an integer"):
        fit(Net(100), data, FindBatchSize((2,)))
    net = Net(100)
    net.net[1] = nn.SyncBatchNorm(4)
    with pytest.raises(ValueError, match="cannot try a model with torch.nn.SyncBatchNorm"):
        fit(net, Data(), FindBatchSize((2,)))
    with pytest.raises(ValueError, match="batch_sizes=0"):
        FindBatchSize((0,))
    with pytest.raises(ValueError, match="batch_sizes is empty"):
        try_batch_sizes(lambda size: None, ())
