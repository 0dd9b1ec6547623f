"""Ranks with batches of different sizes, down to none."""

from __future__ import annotations

from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from pytorch_lightning.strategies import DDPStrategy
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from lightning_dp import KrizhevskyHybridStrategy
from tests.ranks import run_processes
from tests.strategies.krizhevsky_hybrid.modules import HybridNet, Result, StepNet, all_batches, batches, fit_with
from tests.strategies.modules import CLASSES, FEATURES, assert_same, snapshot, trainer


def _uneven(rank: int, world_size: int, net: type[HybridNet], scheme: str) -> tuple[Result, list[Tensor]]:
    """Rank r has r + 1 of every 6 samples in training, and batches down to none in prediction."""
    dataset = all_batches(1).dataset
    own = [i for i in range(len(dataset)) if (i % 6) in {0: (0,), 1: (1, 2), 2: (3, 4, 5)}[rank]]
    module = net()
    strategy = KrizhevskyHybridStrategy(scheme=scheme)
    runner = trainer(strategy, world_size, use_distributed_sampler=False, limit_val_batches=2)
    loader = DataLoader(Subset(dataset, own), batch_size=rank + 1)
    evaluation = DataLoader(Subset(dataset, range(7)), batch_size=[4, 1, 2][rank])
    runner.fit(module, loader)
    state = snapshot(module, runner)
    evaluated = _while_fitting(module, world_size, scheme, [x for x, _ in evaluation])
    return state, evaluated


def _while_fitting(module: HybridNet, world_size: int, scheme: str, own: list[Tensor]) -> list[Tensor]:
    """Logits of batches of different sizes in validation, with the head divided: the last batches are empty."""
    seen: list[Tensor] = []
    longest = 7

    class Look(pl.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            assert len(pl_module.head[-1].weight) < CLASSES
            pl_module.eval()
            with torch.no_grad():
                for index in range(longest):
                    x = own[index] if index < len(own) else torch.empty(0, FEATURES, dtype=torch.float64)
                    seen.append(pl_module(x))
            pl_module.train()

    strategy = KrizhevskyHybridStrategy(scheme=scheme)
    again = trainer(strategy, world_size, use_distributed_sampler=False, max_steps=1, callbacks=[Look()])
    again.fit(module, batches(0, world_size))
    return seen


@pytest.mark.ci
@pytest.mark.parametrize("scheme", ["a", "b", "c"])
def test_uneven_batches(scheme):
    results = run_processes(3, _uneven, 3, StepNet, scheme)
    loader = DataLoader(all_batches(1).dataset, batch_size=6)
    expected = StepNet()
    single = trainer("auto", 1)
    single.fit(expected, loader)
    x = torch.stack([all_batches(1).dataset[i][0] for i in range(7)])
    with torch.no_grad():
        logits = expected.eval()(x)
    for state, evaluated in results:
        assert_same(state, snapshot(expected, single), 1e-9)
        torch.testing.assert_close(torch.cat(evaluated), logits, rtol=1e-9, atol=1e-12)


def _unequal_own_batches(rank: int, strategy: str) -> Result:
    """Without head_step each rank's loss is the mean over its own samples, and ranks count equally, as under DDP."""
    dataset = all_batches(1).dataset
    own = [i for i in range(len(dataset)) if (i % 3 == 0) == (rank == 0)]
    module = HybridNet()
    runner = trainer(
        KrizhevskyHybridStrategy(scheme="c") if strategy == "hybrid" else "ddp", 2, use_distributed_sampler=False
    )
    runner.fit(module, DataLoader(Subset(dataset, own), batch_size=1 + rank))
    return snapshot(module, runner)


@pytest.mark.ci
def test_without_head_step_ranks_count_equally_as_under_ddp():
    for ours, theirs in zip(
        run_processes(2, _unequal_own_batches, "hybrid"), run_processes(2, _unequal_own_batches, "ddp"), strict=True
    ):
        assert_same(ours, theirs, 1e-9)


class Sums(StepNet):
    """Its loss of no samples is 0."""

    def cost(self, logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits, target, reduction="sum") / max(1, len(target))


class SumsOfLogits(Sums):
    training_step = HybridNet.training_step


def _with_nothing_between(net: type[HybridNet], strategy: Any, world_size: int) -> Result:
    """All ranks have the same samples, so that one process needs no others."""
    x = torch.randn(3, FEATURES, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    y = torch.tensor([0, 1, 2])
    module = net()
    runner = trainer(strategy, world_size, use_distributed_sampler=False)
    own: Any = [(x, y), (x[:0], y[:0]), (x, y)]
    runner.fit(module, DataLoader(own, batch_size=None))
    return snapshot(module, runner)


def _each_with_nothing_between(rank: int) -> list[Result]:
    return [
        _with_nothing_between(net, KrizhevskyHybridStrategy(scheme=scheme), 2)
        for net in (Sums, SumsOfLogits)
        for scheme in ("a", "c")
    ]


@pytest.mark.ci
def test_momentum_goes_on_where_no_rank_has_a_sample():
    expected = _with_nothing_between(Sums, "auto", 1)
    for results in run_processes(2, _each_with_nothing_between):
        for result in results:
            assert_same(result, expected, 1e-10)


class _ReadsIterator(StepNet):
    """Reads an iterator in `training_step`. Its end is that of the epoch, also of one that Lightning passes there."""

    def on_train_epoch_start(self) -> None:
        self.numbers = iter(range(3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return next(self.numbers) * super().training_step(batch, batch_idx)


def _ends_within(rank: int) -> Result:
    return fit_with(batches(rank, 2), KrizhevskyHybridStrategy(), 2, _ReadsIterator, {"max_epochs": 2})


@pytest.mark.ci
def test_an_epoch_may_end_within_a_training_step():
    expected = fit_with(all_batches(2), "auto", 1, _ReadsIterator, {"max_epochs": 2})
    for result in run_processes(2, _ends_within):
        assert_same(result, expected, 1e-9)


class _ReadsLoader(StepNet):
    """Takes batches itself from the loader. Lightning then begins to accumulate anew one batch later."""

    def training_step(self, dataloader_iter: Any) -> Tensor:
        batch, *_ = next(dataloader_iter)
        return super().training_step(batch, 0)


def _accumulates_what_it_reads(rank: int) -> list[Result]:
    options = {"accumulate_grad_batches": 2, "max_epochs": 2}
    strategies = KrizhevskyHybridStrategy(), DDPStrategy()
    return [fit_with(batches(rank, 2, steps=5), strategy, 2, _ReadsLoader, options) for strategy in strategies]


@pytest.mark.filterwarnings("ignore:.*`dataloader_iter`")
def test_a_step_that_reads_the_loader_accumulates_as_under_ddp():
    for result, expected in run_processes(2, _accumulates_what_it_reads):
        assert_same(result, expected, 1e-9)
