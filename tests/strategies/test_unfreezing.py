"""Parameters that become trainable while fitting are reduced from then on; plain DDP trains the ranks apart."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from lightning_fabric.utilities.warnings import PossibleUserWarning
from pytorch_lightning.callbacks import BaseFinetuning
from pytorch_lightning.strategies import DDPStrategy

from lightning_dp.strategies import KrizhevskyHybridStrategy, LayeredSGDStrategy
from lightning_dp.strategies.unfreezing import ReducedParameters
from tests.ranks import SYNC_BUFFERS, RankError, run_processes
from tests.strategies.modules import SMALL_BUCKETS_MB, Net, assert_same, data, snapshot, trainer

EPOCHS, STEPS = 4, 6


class Counted(list):
    num_iterations = 0

    def __iter__(self):
        self.num_iterations += 1
        return super().__iter__()


def test_what_others_take_care_of_is_looked_through_once():
    """Not once for each parameter of the module."""
    module = Net()
    others = Counted(module.first.parameters())
    ReducedParameters(module, others)
    assert others.num_iterations == 1


class FrozenAtFirst(Net):
    """The first two layers are frozen until epoch 2; the optimizer has held them from the start."""

    def __init__(self) -> None:
        super().__init__()
        self.body = [*self.first.parameters(), *self.shared.parameters()]
        for parameter in self.body:
            parameter.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        parameters = [p for name, p in self.named_parameters() if not name.startswith("frozen")]
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 2:
            self.unfreeze_body()

    def unfreeze_body(self) -> None:
        for parameter in self.body:
            parameter.requires_grad_(True)


class UnfrozenInMidEpoch(FrozenAtFirst):
    def on_train_epoch_start(self) -> None:
        pass

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == STEPS + 2:
            self.unfreeze_body()


class Finetuning(BaseFinetuning):
    """Lightning's callback, which adds a parameter group when it unfreezes."""

    def freeze_before_training(self, module: pl.LightningModule) -> None:
        self.freeze([module.first, module.shared])

    def finetune_function(self, module: pl.LightningModule, epoch: int, optimizer: Any) -> None:
        if epoch == 2:
            self.unfreeze_and_add_param_group([module.first, module.shared], optimizer, lr=0.05)


class FinetunedNet(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(filter(lambda p: p.requires_grad, self.parameters()), lr=0.1, momentum=0.9)


class Toggled(FrozenAtFirst):
    """Freezes another parameter in every other batch, before and after the body is unfrozen."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.last.weight.requires_grad_(batch_idx % 2 == 0)


def strategies(**options: Any) -> list[Any]:
    options = {"bucket_cap_mb": SMALL_BUCKETS_MB, **options}
    return [
        LayeredSGDStrategy(1, overlap="step", **options),
        LayeredSGDStrategy(1, overlap="load", **options),
        LayeredSGDStrategy(2, **options),  # a single group: DDP reduces
    ]


def fit(strategy: Any, module: pl.LightningModule, world_size: int = 2, callbacks: Any = ()) -> pl.Trainer:
    t = trainer(strategy, world_size, max_epochs=EPOCHS, callbacks=list(callbacks))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PossibleUserWarning)
        t.fit(module, data(world_size, STEPS))
    return t


class Batches(torch.utils.data.Sampler):
    """On one process the batches that two ranks have together, in the order of their samplers."""

    def __init__(self, dataset: Any, t: pl.Trainer, world_size: int = 2) -> None:
        self.samplers = [
            torch.utils.data.DistributedSampler(dataset, world_size, rank, shuffle=True) for rank in range(world_size)
        ]
        self.trainer = t

    def __iter__(self):
        for sampler in self.samplers:
            sampler.set_epoch(self.trainer.current_epoch)
        of_ranks = [torch.tensor(list(sampler)).view(STEPS, -1) for sampler in self.samplers]
        for step in range(STEPS):
            yield torch.cat([each[step] for each in of_ranks]).tolist()

    def __len__(self) -> int:
        return STEPS


def fit_on_one_process(module: pl.LightningModule, callbacks: Any = ()) -> pl.Trainer:
    dataset = data(2, STEPS).dataset
    t = trainer("auto", 1, max_epochs=EPOCHS, callbacks=list(callbacks))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PossibleUserWarning)
        t.fit(module, torch.utils.data.DataLoader(dataset, batch_sampler=Batches(dataset, t)))
    return t


CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "by the module": (FrozenAtFirst, None, {}),
    "in mid-epoch": (UnfrozenInMidEpoch, None, {}),
    "by BaseFinetuning": (FinetunedNet, Finetuning, {}),
    "while others are toggled": (Toggled, None, {"find_unused_parameters": True}),
}


def compare(rank, name, expected):
    make, callback, options = CASES[name]
    for strategy in strategies(**options):
        module = make()
        t = fit(strategy, module, callbacks=[] if callback is None else [callback()])
        assert_same(snapshot(module, t), expected)


@pytest.mark.ci
@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(name):
    make, callback, _ = CASES[name]
    module = make()
    t = fit_on_one_process(module, [] if callback is None else [callback()])
    run_processes(2, compare, name, snapshot(module, t))


class FirstOfTwo(FrozenAtFirst):
    """Unfreezes before a batch whose gradients wait for those of the next one, and then notes when DDP reduces."""

    def __init__(self) -> None:
        super().__init__()
        self.reduces: list[bool] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.current_epoch >= 2:
            self.reduces.append(self.trainer.strategy.model.require_backward_grad_sync)
        return super().training_step(batch, batch_idx)


def accumulate(rank):
    results = {}
    for name, strategy in {"layered": LayeredSGDStrategy(1), "hybrid": KrizhevskyHybridStrategy("last")}.items():
        module = FirstOfTwo()
        t = trainer(strategy, 2, max_epochs=EPOCHS, accumulate_grad_batches=2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PossibleUserWarning)
            t.fit(module, data(2, STEPS))
        results[name] = module.reduces
    return results


@pytest.mark.ci
def test_a_batch_that_accumulates_is_not_reduced_when_parameters_are_unfrozen_before_it():
    """The sum of the first batch would be under way while backward of the second adds to it."""
    expected = [False, True] * ((EPOCHS - 2) * STEPS // 2)
    for results in run_processes(2, accumulate):
        assert results == {"layered": expected, "hybrid": expected}


class Remembers(FrozenAtFirst):
    """Has a buffer of what this rank has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen += batch[0].sum()
        return super().training_step(batch, batch_idx)


def remember(rank):
    def seen(strategy: Any) -> torch.Tensor:
        module = Remembers()
        fit(strategy, module)
        return module.seen

    own_buffers = {SYNC_BUFFERS: False}
    expected = seen(DDPStrategy(**own_buffers))
    for strategy in [*strategies(**own_buffers), KrizhevskyHybridStrategy("last", **own_buffers)]:
        torch.testing.assert_close(seen(strategy), expected)
    return expected


@pytest.mark.ci
def test_each_rank_keeps_the_buffers_that_ddp_is_told_to_leave_to_it():
    first, second = run_processes(2, remember)
    assert first != second


def drift(rank):
    module = FrozenAtFirst()
    fit(DDPStrategy(), module)
    return module.first.weight.detach()


def test_under_plain_ddp_the_ranks_drift_apart():
    first, second = run_processes(2, drift)
    assert not torch.allclose(first, second)


class UnfrozenInTheStep(FrozenAtFirst):
    def on_train_epoch_start(self) -> None:
        pass

    def training_step(self, batch, batch_idx):
        if self.global_step == 2:
            self.unfreeze_body()
        return super().training_step(batch, batch_idx)


def unfreeze_in_the_step(rank):
    for strategy in strategies():
        message = "first.weight has become trainable within training_step.*unfreeze parameters in on_train_epoch_start"
        with pytest.raises(RuntimeError, match=message):
            fit(strategy, UnfrozenInTheStep())


def test_unfreezing_within_the_step_is_refused_by_name():
    run_processes(2, unfreeze_in_the_step)


class UnfrozenOnRank1(FrozenAtFirst):
    def unfreeze_body(self) -> None:
        if self.global_rank == 1:
            super().unfreeze_body()


def unfreeze_on_one_rank(rank):
    from datetime import timedelta

    fit(LayeredSGDStrategy(1, timeout=timedelta(seconds=5)), UnfrozenOnRank1())


@pytest.mark.ci
def test_unfreezing_on_one_rank_alone_ends_with_an_error_within_the_timeout():
    with pytest.raises(RankError, match="failed: one of these ranks has died, or has been silent"):
        run_processes(2, unfreeze_on_one_rank)


def test_a_frozen_parameter_that_is_averaged_with_gradients_enabled_is_not_unfrozen():
    """A teacher's average over steps becomes part of the graph. It is no leaf, so DDP could not reduce it."""
    module = Net()
    reduced = ReducedParameters(module)
    module.frozen.weight.lerp_(module.shared.weight, 0.1)
    assert module.frozen.weight.requires_grad
    assert reduced.unfrozen() == []
