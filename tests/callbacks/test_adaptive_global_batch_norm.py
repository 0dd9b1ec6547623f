"""Training with adaptive global batch norm: exact while global, and the same decision on all ranks."""

from __future__ import annotations

import csv
import logging
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_dp.callbacks import AdaptiveGlobalBatchNorm, Plateau, adaptive_global_batch_norm
from lightning_dp.collectives.small_all_gather import small_all_gather
from lightning_dp.strategies import LayeredSGDStrategy
from tests.callbacks.training import (
    CLASSES,
    FEATURES,
    LOCAL_BATCH,
    STEPS,
    Batches,
    Net,
    Probe,
    alone,
    assert_same,
    dataset,
    fit,
    state_of,
)
from tests.ranks import RankError, logged, run_processes

STRATEGIES = {
    "ddp": lambda: "ddp",
    "ddp, static graph": lambda: pl.strategies.DDPStrategy(static_graph=True),
    "layered sgd": lambda: LayeredSGDStrategy(group_size=1),
}


def train_exactly(rank: int, world_size: int, strategy: str, accumulate: int, **options: Any) -> dict[str, Tensor]:
    callback = AdaptiveGlobalBatchNorm(**options)
    net, _ = fit(world_size, callback, strategy=STRATEGIES[strategy](), accumulate_grad_batches=accumulate)
    return state_of(net)


@pytest.mark.parametrize(("strategy", "accumulate"), [(s, 1) for s in STRATEGIES] + [("ddp", 2)])
def test_trains_as_one_process_on_the_concatenated_batch(strategy, accumulate):
    for state in run_processes(2, train_exactly, 2, strategy, accumulate):
        assert_same(state, alone(2, accumulate))


def train_locally(rank: int) -> dict[str, Tensor]:
    return train_exactly(rank, 2, "ddp", 1, max_batch_size=1)


def test_the_comparison_fails_with_local_statistics():
    with pytest.raises(AssertionError, match="not close"):
        assert_same(run_processes(2, train_locally)[0], alone(2))


def test_one_process_needs_no_process_group():
    net, _ = fit(1, AdaptiveGlobalBatchNorm(max_batch_size=100), strategy="auto", validate=True)
    assert_same(state_of(net), alone(1))
    assert not dist.is_initialized()


# --- the phases ---


class OnlyHere:
    """A criterion that would be met on rank 0 only, and that counts its evaluations."""

    def __init__(self, rank: int) -> None:
        self.rank, self.asked = rank, 0

    def update(self, metrics: dict[str, Any]) -> bool:
        self.asked += 1
        assert float(metrics["train_loss"]) > 0
        return self.rank == 0 and self.asked == 2


def train_phases(rank: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for phase in ("until_converged", "after_converged"):
        criterion, probe = OnlyHere(rank), Probe()
        callback = AdaptiveGlobalBatchNorm(convergence=criterion, global_phase=phase)
        logging.getLogger("lightning_dp.callbacks").setLevel(logging.INFO)
        options = {"max_epochs": 4, "logger": CSVLogger("logs", phase, ""), "log_every_n_steps": 1}
        with logged("lightning_dp.callbacks") as records:
            fit(2, callback, probe, net=Net((1.0,) * 4), **options)
        results[phase] = probe.is_global, criterion.asked, records
        if rank == 0:
            with open(Path("logs", phase, "metrics.csv")) as file:
                results[phase] += ([row["agbn/is_global"] for row in csv.DictReader(file) if row["agbn/is_global"]],)
    results["always"] = Probe()
    fit(2, AdaptiveGlobalBatchNorm(global_phase="always"), results["always"], max_epochs=2)
    results["always"] = results["always"].is_global
    return results


@pytest.mark.ci
def test_rank_0_decides_once_per_epoch_and_every_switch_is_logged():
    ranks = run_processes(2, train_phases)
    two_epochs = 2 * STEPS
    for phase, first in (("until_converged", True), ("after_converged", False)):
        flags = [first] * two_epochs + [not first] * two_epochs
        assert [rank[phase][0] for rank in ranks] == [flags, flags]
        assert [rank[phase][1] for rank in ranks] == [2, 0], "the criterion is not evaluated after it was met"
        names = {True: "statistics are global", False: "statistics are local"}
        assert ranks[0][phase][2] == [
            "AdaptiveGlobalBatchNorm: 2 batch norm layers, statistics over 2 of 2 ranks",
            f"AdaptiveGlobalBatchNorm: {names[first]} from step 0 (epoch 0) on: not converged, global_phase={phase!r}",
            f"AdaptiveGlobalBatchNorm: {names[not first]} from step 8 (epoch 2) on: converged, global_phase={phase!r}",
        ]
        assert ranks[1][phase][2] == []
        assert [float(value) for value in ranks[0][phase][3]] == [first, first, not first, not first]
    assert [rank["always"] for rank in ranks] == [[True] * two_epochs] * 2


SIZES = [[2, 5, 2, 6, 4], [3, 2, 7, 2, 3]]  # by rank: 5, 7, 9, 8 and 7 together


def train_sizes(rank: int, max_batch_size: int) -> tuple[list[bool], float, list[int]]:
    loader = DataLoader(dataset(2), batch_sampler=Batches([list(range(size)) for size in SIZES[rank]]))
    probe, callback, groups = Probe(), AdaptiveGlobalBatchNorm(max_batch_size=max_batch_size), []

    def counted(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
        if group is callback._batch_size_group:
            groups.append(tensor.numel())
        return small_all_gather(tensor, group)

    adaptive_global_batch_norm.small_all_gather = counted
    _, trainer = fit(2, callback, probe, loader=loader)
    return probe.is_global, trainer.callback_metrics["agbn/is_global"].item(), groups


@pytest.mark.parametrize("limit", [5, 6, 8, 9, 10])
def test_the_global_batch_size_of_each_step_is_compared_with_the_limit(limit):
    expected = [sum(sizes) < limit for sizes in zip(*SIZES, strict=True)]
    for flags, share, collectives in run_processes(2, train_sizes, limit):
        assert flags == expected
        assert share == pytest.approx(sum(expected) / len(expected))
        assert collectives == [1] * len(expected), "one number per step"


def train_in_groups(rank: int) -> tuple[dict[str, Tensor], list[list[Tensor]]]:
    net, probe = Net(), Probe()
    net.net[0].requires_grad_(False)
    fit(4, AdaptiveGlobalBatchNorm(group_size=2), probe, net=net, limit_train_batches=1, validate=True)
    return probe.trained, probe.validated


def test_statistics_over_groups_of_ranks():
    ranks = run_processes(4, train_in_groups)
    net = Net()
    x = next(iter(DataLoader(dataset(4), batch_size=4 * LOCAL_BATCH)))[0]
    for group in ((0, 1), (2, 3)):
        rows = [row for row in range(len(x)) if row % 4 in group]
        running = 0.9 * 0 + 0.1 * net.net[0](x[rows]).mean(0)
        for rank in group:
            torch.testing.assert_close(ranks[rank][0][0], running.detach(), rtol=1e-10, atol=1e-10)
    assert not torch.allclose(ranks[0][0][0], ranks[2][0][0])
    for rank in ranks:  # in validation all ranks have the mean over the groups
        torch.testing.assert_close(rank[1][0][0], (ranks[0][0][0] + ranks[2][0][0]) / 2, rtol=1e-10, atol=1e-10)


# --- unusable configurations ---


def train_wrongly(rank: int, case: str) -> None:
    net, callback, options = Net(), AdaptiveGlobalBatchNorm(), {}
    if case == "no batch norm":
        net.net = nn.Linear(FEATURES, CLASSES).double()
    elif case == "groups":
        callback = AdaptiveGlobalBatchNorm(group_size=3)
    elif case == "sync_batchnorm":
        options["sync_batchnorm"] = True
    elif case == "monitor":
        net = Net((3.0,))
        callback = AdaptiveGlobalBatchNorm(convergence=Plateau("val_acc"))
    fit(2, callback, net=net, **options)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("no batch norm", "ValueError: Net has no BatchNorm1d, 2d or 3d for AdaptiveGlobalBatchNorm to work on"),
        ("groups", "world_size=2 is not a multiple of group_size=3; use 1 or 2"),
        (
            "sync_batchnorm",
            "ValueError: Trainer(sync_batchnorm=True) would replace the layers of AdaptiveGlobalBatchNorm",
        ),
        ("monitor", "monitor='val_acc' was not logged; available: agbn/is_global, train_loss"),
    ],
)
def test_unusable_configurations_are_refused_on_every_rank(case, message):
    with pytest.raises(RankError) as error:
        run_processes(2, train_wrongly, case)
    assert str(error.value).count(message) >= 1
    assert "rank 0" in str(error.value)
