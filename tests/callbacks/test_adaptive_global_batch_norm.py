"""Training with adaptive global batch norm: exact while global, and the same decision on all ranks."""

from __future__ import annotations

import csv
import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning_fabric.utilities.warnings import PossibleUserWarning
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

from lightning_dp.callbacks import AdaptiveGlobalBatchNorm, Plateau, adaptive_global_batch_norm
from lightning_dp.collectives.small_all_gather import small_all_gather
from lightning_dp.layers import GlobalBatchNorm1d, global_batch_norm_layers
from lightning_dp.strategies import LayeredSGDStrategy
from tests.ranks import RankError, run_processes

FEATURES, CLASSES, STEPS, LOCAL_BATCH = 5, 3, 4, 3


class Net(pl.LightningModule):
    """Two batch norm layers; what it logs as ``train_loss`` is given."""

    def __init__(self, losses: tuple[float, ...] = ()) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.losses = losses
        self.net = nn.Sequential(
            nn.Linear(FEATURES, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, CLASSES), nn.BatchNorm1d(CLASSES)
        )
        self.double()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        if self.losses:
            self.log("train_loss", self.losses[self.current_epoch], on_step=False, on_epoch=True, sync_dist=True)
        return F.cross_entropy(self.net(x), y)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", F.cross_entropy(self.net(x), y), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9)


def dataset(world_size: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    count = world_size * STEPS * LOCAL_BATCH
    x = torch.randn(count, FEATURES, dtype=torch.float64, generator=generator)
    x = x * (1 + torch.arange(count) % world_size)[:, None] + torch.arange(count)[:, None] % world_size  # by rank
    return TensorDataset(x, torch.randint(CLASSES, (count,), generator=generator))


class Batches(Sampler):
    """The batches given, each by its rows."""

    def __init__(self, batches: list[list[int]]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def rank_loader(world_size: int) -> DataLoader:
    """This rank's rows; those of all ranks in one step are the rows of the large batch."""
    rank = int(os.environ.get("RANK", 0))
    rows = [torch.arange(LOCAL_BATCH) + step * LOCAL_BATCH for step in range(STEPS)]
    return DataLoader(dataset(world_size), batch_sampler=Batches([(r * world_size + rank).tolist() for r in rows]))


class Probe(pl.Callback):
    """What each training step and each validation saw."""

    def __init__(self) -> None:
        self.is_global: list[bool] = []
        self.validated: list[list[Tensor]] = []
        self.trained: list[Tensor] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        (value,) = {layer.is_global for layer in global_batch_norm_layers(pl_module)}
        self.is_global.append(value)
        self.trained = [b.clone() for b in pl_module.buffers()]

    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.validated.append([b.clone() for b in pl_module.buffers()])


def fit(
    world_size: int,
    *callbacks: pl.Callback,
    net: Net | None = None,
    loader: Any = None,
    strategy: Any = "ddp",
    **options: Any,
) -> tuple[Net, pl.Trainer]:
    net = net or Net()
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": world_size,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": any(isinstance(c, ModelCheckpoint) for c in callbacks),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "use_distributed_sampler": False,
    }
    validate = options.pop("validate", False)
    ckpt_path = options.pop("ckpt_path", None)
    trainer = pl.Trainer(strategy=strategy, callbacks=list(callbacks), **{**defaults, **options})
    loader = loader or rank_loader(world_size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PossibleUserWarning)  # advice: more loader workers, ...
        warnings.filterwarnings("ignore", "You defined a `validation_step` but have no `val_dataloader`")
        warnings.filterwarnings("ignore", "Be aware that when using `ckpt_path`")
        warnings.filterwarnings("ignore", "Checkpoint directory .* exists and is not empty")
        trainer.fit(net, loader, loader if validate else None, ckpt_path=ckpt_path)
    return net, trainer


def alone(world_size: int, accumulate: int = 1) -> dict[str, Tensor]:
    """One process, plain batch norm, the ranks' batches laid together."""
    net = Net()
    optimizer = net.configure_optimizers()
    for index, batch in enumerate(DataLoader(dataset(world_size), batch_size=world_size * LOCAL_BATCH)):
        x, y = batch
        (F.cross_entropy(net.net(x), y) / accumulate).backward()
        if (index + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    return {k: v.clone() for k, v in net.state_dict().items()}


def state_of(net: nn.Module) -> dict[str, Tensor]:
    return {k: v.clone() for k, v in net.state_dict().items()}


STRATEGIES = {
    "ddp": lambda: "ddp",
    "ddp, static graph": lambda: pl.strategies.DDPStrategy(static_graph=True),
    "layered sgd": lambda: LayeredSGDStrategy(group_size=1),
}


def train_exactly(rank: int, world_size: int, strategy: str, accumulate: int, **options: Any) -> dict[str, Tensor]:
    callback = AdaptiveGlobalBatchNorm(**options)
    net, _ = fit(world_size, callback, strategy=STRATEGIES[strategy](), accumulate_grad_batches=accumulate)
    assert isinstance(net.net[1], GlobalBatchNorm1d)
    return state_of(net)


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(("strategy", "accumulate"), [(s, 1) for s in STRATEGIES] + [("ddp", 2)])
def test_trains_as_one_process_on_the_concatenated_batch(strategy, accumulate):
    for state in run_processes(2, train_exactly, 2, strategy, accumulate):
        assert_same(state, alone(2, accumulate))


def train_locally(rank: int) -> dict[str, Tensor]:
    return train_exactly(rank, 2, "ddp", 1, max_batch_size=1)


def test_local_statistics_train_otherwise():
    with pytest.raises(AssertionError, match="not close"):
        assert_same(run_processes(2, train_locally)[0], alone(2))


def test_one_process_needs_no_process_group():
    net, _ = fit(1, AdaptiveGlobalBatchNorm(max_batch_size=100), strategy="auto", validate=True)
    assert_same(state_of(net), alone(1))
    assert not dist.is_initialized()


# --- the phases ---


class OnlyHere:
    """A criterion that each rank would answer differently, and that knows how often it was asked."""

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
        records: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record, records=records: records.append(record.getMessage())
        logger = logging.getLogger("lightning_dp.callbacks")
        logger.setLevel(logging.INFO)
        logger.addHandler(handler)
        fit(
            2,
            callback,
            probe,
            net=Net((1.0,) * 4),
            max_epochs=4,
            logger=CSVLogger("logs", phase, ""),
            log_every_n_steps=1,
        )
        logger.removeHandler(handler)
        results[phase] = probe.is_global, criterion.asked, records
        if rank == 0:
            with open(Path("logs", phase, "metrics.csv")) as file:
                results[phase] += ([row["agbn/is_global"] for row in csv.DictReader(file) if row["agbn/is_global"]],)
    results["always"] = Probe()
    fit(2, AdaptiveGlobalBatchNorm(global_phase="always"), results["always"], max_epochs=2)
    results["always"] = results["always"].is_global
    return results


def test_rank_0_decides_once_an_epoch_and_every_switch_is_logged():
    ranks = run_processes(2, train_phases)
    two_epochs = 2 * STEPS
    for phase, first in (("until_converged", True), ("after_converged", False)):
        flags = [first] * two_epochs + [not first] * two_epochs
        assert [rank[phase][0] for rank in ranks] == [flags, flags]
        assert [rank[phase][1] for rank in ranks] == [2, 0], "not asked any more once it has converged"
        names = {True: "global", False: "local"}
        assert ranks[0][phase][2] == [
            "AdaptiveGlobalBatchNorm: 2 batch norm layers, statistics over 2 of 2 ranks",
            f"statistics are {names[first]} from step 0 (epoch 0) on: not converged, global_phase={phase!r}",
            f"statistics are {names[not first]} from step 8 (epoch 2) on: converged, global_phase={phase!r}",
        ]
        assert ranks[1][phase][2] == []
        assert [float(value) for value in ranks[0][phase][3]] == [first, first, not first, not first]
    assert [rank["always"] for rank in ranks] == [[True] * two_epochs] * 2


SIZES = [[2, 5, 2, 6, 4], [3, 2, 7, 2, 3]]  # by rank: 5, 7, 9, 8 and 7 together


def train_sizes(rank: int, max_batch_size: int) -> tuple[list[bool], float, list[int]]:
    loader = DataLoader(dataset(2), batch_sampler=Batches([list(range(size)) for size in SIZES[rank]]))
    probe, callback, groups = Probe(), AdaptiveGlobalBatchNorm(max_batch_size=max_batch_size), []

    def counted(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        assert group is callback._batch_size_group
        groups.append(tensor.numel())
        return small_all_gather(tensor, group)

    adaptive_global_batch_norm.small_all_gather = counted
    _, trainer = fit(2, callback, probe, loader=loader)
    return probe.is_global, trainer.callback_metrics["agbn/is_global"].item(), groups


@pytest.mark.parametrize("limit", [5, 6, 8, 9, 10])
def test_the_global_batch_size_is_compared_as_it_is_in_each_step(limit):
    expected = [sum(sizes) < limit for sizes in zip(*SIZES, strict=True)]
    for flags, share, collectives in run_processes(2, train_sizes, limit):
        assert flags == expected
        assert share == pytest.approx(sum(expected) / len(expected))
        assert collectives == [1] * len(expected), "one number a step"


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
    for rank in ranks:  # for validation all ranks have the mean of the groups
        torch.testing.assert_close(rank[1][0][0], (ranks[0][0][0] + ranks[2][0][0]) / 2, rtol=1e-10, atol=1e-10)


# --- running statistics of the local phase, and checkpoints ---


def train_validate_save(rank: int, folder: str) -> dict[str, Any]:
    probe = Probe()
    # In the middle of the epoch, at validation, and weights only at the end of the epoch.
    callbacks = [
        ModelCheckpoint(folder, "middle", every_n_train_steps=3, save_on_train_epoch_end=False),
        ModelCheckpoint(folder, "validated", monitor="val_loss"),
        ModelCheckpoint(folder, "weights", save_weights_only=True, save_on_train_epoch_end=True),
    ]
    middle: list[list[Tensor]] = []

    class Middle(pl.Callback):  # before the checkpoint of step 3, and so before that averages
        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
            if trainer.global_step == 3:
                middle.append([b.clone() for b in pl_module.buffers()])

    callback = AdaptiveGlobalBatchNorm(max_batch_size=1)
    net, _ = fit(2, callback, probe, Middle(), *callbacks, validate=True)
    return {"middle": middle[0], "trained": probe.trained, "validated": probe.validated[-1], "final": state_of(net)}


def test_all_ranks_contribute_to_validation_and_checkpoints(tmp_path):
    ranks = run_processes(2, train_validate_save, str(tmp_path))

    def mean(key: str) -> list[Tensor]:
        first, second = (rank[key] for rank in ranks)
        assert not torch.allclose(first[0], second[0]), "each rank has its own statistics in the local phase"
        return [torch.stack([a.double(), b.double()]).mean(0).to(a.dtype) for a, b in zip(first, second, strict=True)]

    for rank in ranks:
        torch.testing.assert_close(rank["validated"], mean("trained"), rtol=1e-12, atol=1e-12)
        assert_same(rank["final"], ranks[0]["final"])
    for name, expected in (("middle", mean("middle")), ("validated", mean("trained")), ("weights", mean("trained"))):
        checkpoint = torch.load(tmp_path / f"{name}.ckpt", weights_only=True)
        saved = [v for k, v in checkpoint["state_dict"].items() if "running" in k or "tracked" in k]
        torch.testing.assert_close(saved, expected, rtol=1e-12, atol=1e-12)


LOSSES = (3.0, 2.0, 2.0, 2.0, 2.0, 2.0)


def train_and_resume(rank: int, folder: str, at_validation: bool) -> dict[str, Any]:
    def callback() -> AdaptiveGlobalBatchNorm:
        return AdaptiveGlobalBatchNorm(convergence=Plateau("train_loss", patience=2))

    through, before, after = Probe(), Probe(), Probe()
    net, _ = fit(2, callback(), through, net=Net(LOSSES), max_epochs=6)
    save = ModelCheckpoint(folder, "{epoch}", save_top_k=-1, save_on_train_epoch_end=not at_validation)
    fit(2, callback(), before, save, net=Net(LOSSES), max_epochs=5, validate=at_validation)
    results = {"through": through.is_global, "net": state_of(net)}
    for epoch in (2, 3, 4):
        net, _ = fit(
            2, callback(), after, net=Net(LOSSES), max_epochs=6, validate=at_validation,
            ckpt_path=str(Path(folder, f"epoch={epoch}.ckpt")),
        )  # fmt: skip
        results[epoch], after.is_global, results[f"net{epoch}"] = after.is_global, [], state_of(net)
    return results


def test_a_resumed_run_is_where_it_was(tmp_path):
    for rank in run_processes(2, train_and_resume, str(tmp_path), False):
        assert rank["through"] == [True] * 4 * STEPS + [False] * 2 * STEPS
        for epoch in (2, 3, 4):
            assert rank[epoch] == rank["through"][(epoch + 1) * STEPS :]
            assert_same(rank[f"net{epoch}"], rank["net"])


def test_a_checkpoint_of_the_validation_lacks_the_epochs_training_metrics(tmp_path):
    """Lightning reduces them after validation: the phase is kept, but the criterion does not hear of that epoch."""
    for rank in run_processes(2, train_and_resume, str(tmp_path), True):
        assert rank[2] == [True] * 2 * STEPS + [False] * STEPS
        assert rank[3] == [True] * STEPS + [False] * STEPS
        assert rank[4] == [False] * STEPS


def train_twice(rank: int) -> tuple[list[bool], dict[str, Tensor]]:
    callback, probe, net = AdaptiveGlobalBatchNorm(), Probe(), Net()
    net._ddp_params_and_buffers_to_ignore = []
    fit(2, callback, net=net, max_steps=1)
    assert net._ddp_params_and_buffers_to_ignore == []
    fit(2, callback, probe, net=net, max_steps=2)
    return probe.is_global, state_of(net)


def test_a_second_fit_of_the_same_model_works():
    first, second = run_processes(2, train_twice)
    assert first[0] == [True, True]
    assert_same(first[1], second[1])


def test_a_failed_fit_leaves_nothing_to_the_next_one():
    """Lightning tears no callback down after an exception."""

    class Failing(pl.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            raise RuntimeError("as a user's code may")

    net = Net()
    net._ddp_params_and_buffers_to_ignore = ["of the user"]
    with pytest.raises(RuntimeError, match="as a user's code may"):
        fit(1, AdaptiveGlobalBatchNorm(), Failing(), net=net, strategy="auto")
    assert len(net._ddp_params_and_buffers_to_ignore) > 1
    fit(1, AdaptiveGlobalBatchNorm(), net=net, strategy="auto")
    assert net._ddp_params_and_buffers_to_ignore == ["of the user"]


# --- what cannot work says so ---


def train_wrongly(rank: int, case: str) -> None:
    net, callback, options = Net(), AdaptiveGlobalBatchNorm(), {}
    if case == "no batch norm":
        net.net = nn.Linear(FEATURES, CLASSES).double()
    elif case == "groups":
        callback = AdaptiveGlobalBatchNorm(group_size=3)
    elif case == "sync_batchnorm":
        options["sync_batchnorm"] = True
    elif case == "monitor":
        net = Net(LOSSES)
        callback = AdaptiveGlobalBatchNorm(convergence=Plateau("val_acc"))
    fit(2, callback, net=net, **options)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("no batch norm", "ValueError: Net has no BatchNorm1d, 2d or 3d for AdaptiveGlobalBatchNorm to work on"),
        ("groups", "world_size=2 is not a multiple of group_size=3; use 1 or 2"),
        ("sync_batchnorm", "ValueError: Trainer(sync_batchnorm=True) would replace the layers of this callback"),
        ("monitor", "monitor='val_acc' was not logged; available: agbn/is_global, train_loss"),
    ],
)
def test_what_cannot_work_says_so_on_every_rank(case, message):
    with pytest.raises(RankError) as error:
        run_processes(2, train_wrongly, case)
    assert str(error.value).count(message) >= 1
    assert "rank 0" in str(error.value)
