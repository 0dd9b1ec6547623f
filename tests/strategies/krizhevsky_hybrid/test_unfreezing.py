"""Parameters that become trainable while fitting train as in one process; under plain DDP the ranks drift apart."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.callbacks import BaseFinetuning, ModelCheckpoint
from torch import Tensor

from lightning_dp import KrizhevskyHybridStrategy
from lightning_dp._private.torch_names import ignore_in_ddp
from lightning_dp.strategies import consolidate_checkpoint
from tests.ranks import run_processes
from tests.strategies.krizhevsky_hybrid.modules import HybridNet, Result, StepNet, all_batches, batches
from tests.strategies.modules import assert_same, snapshot, trainer

EPOCHS, STEPS = 3, 2


class FrozenAtFirst(StepNet):
    """Some layers are frozen until epoch 1; the optimizer has held them from the start."""

    frozen: tuple[str, ...] = ("trunk.0",)

    def __init__(self) -> None:
        super().__init__()
        self.set_frozen(True)

    def set_frozen(self, value: bool) -> None:
        for name in self.frozen:
            self.get_submodule(name).requires_grad_(not value)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.set_frozen(False)


class FrozenTrunk(FrozenAtFirst):
    frozen = ("trunk",)


class FrozenHead(FrozenAtFirst):
    frozen = ("head",)


class FrozenBoth(FrozenAtFirst):
    frozen = ("trunk.2", "head.1")


class OwnBatches(HybridNet):
    """Without head_step."""

    frozen = ("trunk.0", "head.1")
    set_frozen = FrozenAtFirst.set_frozen
    on_train_epoch_start = FrozenAtFirst.on_train_epoch_start

    def __init__(self) -> None:
        super().__init__()
        self.set_frozen(True)


class Finetuned(StepNet):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(filter(lambda p: p.requires_grad, self.parameters()), lr=0.1, momentum=0.9)


class Finetuning(BaseFinetuning):
    """Lightning's callback, which adds a parameter group when it unfreezes."""

    def freeze_before_training(self, module: Any) -> None:
        self.freeze([module.trunk, module.head[1]])

    def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group([module.trunk, module.head[1]], optimizer, lr=0.05)


class Anchored(FrozenAtFirst):
    """L2-SP: the head stays near its first weights, of which each rank keeps its local shard in buffers."""

    def on_fit_start(self) -> None:
        for name, p in list(self.head.named_parameters()):
            self.register_buffer(f"first_{name.replace('.', '_')}", p.detach().clone(), persistent=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        named = [(p, self.get_buffer(f"first_{name.replace('.', '_')}")) for name, p in self.head.named_parameters()]
        return super().training_step(batch, batch_idx) + 0.1 * sum((p - first).square().sum() for p, first in named)


class AnchoredBesideBuffer(Anchored):
    """DDP gives all ranks the buffers of rank 0 if it has found one at set-up; among them those of later."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(2), persistent=False)


class AnchoredFrozenTrunk(Anchored):
    """A buffer of before stays under its name."""

    frozen = ("trunk",)

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("first_1_weight", torch.zeros(()), persistent=False)


NETS = [FrozenAtFirst, FrozenTrunk, FrozenHead, FrozenBoth, OwnBatches, Finetuned, Anchored]
NETS += [AnchoredBesideBuffer, AnchoredFrozenTrunk]


def run(strategy: Any, world_size: int, net: type[HybridNet], loader: Any) -> Result:
    callbacks = [Finetuning()] if net is Finetuned else []
    module = net()
    own = trainer(strategy, world_size, use_distributed_sampler=False, max_epochs=EPOCHS, callbacks=callbacks)
    own.fit(module, loader)
    return snapshot(module, own)


def _all(rank: int) -> list[Result]:
    return [run(KrizhevskyHybridStrategy(scheme="c"), 2, net, batches(rank, 2, STEPS)) for net in NETS]


@pytest.mark.ci
def test_equals_one_process():
    of_ranks = run_processes(2, _all)
    for index, net in enumerate(NETS):
        expected = run("auto", 1, net, all_batches(2, STEPS))
        for of_rank in of_ranks:
            assert_same(of_rank[index], expected, 1e-10)


def resume(strategy: Callable[[], Any], world_size: int, loader: Any, folder: Path) -> None:
    """Save after the epoch that unfreezes, and go on from there in another run."""
    path = None
    for epochs in (2, EPOCHS):
        saver = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
        options = {"enable_checkpointing": True, "callbacks": [Finetuning(), saver], "max_epochs": epochs}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the folder is not empty
            own = trainer(strategy(), world_size, use_distributed_sampler=False, **options)
            own.fit(Finetuned(), loader, ckpt_path=path)
        path = str(folder / "epoch=1.ckpt")


def _resume(rank: int, folder: Path) -> None:
    resume(lambda: KrizhevskyHybridStrategy(state_dict_type="sharded"), 2, batches(rank, 2, STEPS), folder)


@pytest.mark.ci
def test_groups_that_a_callback_has_added_are_there_when_a_sharded_checkpoint_is_loaded(tmp_path):
    run_processes(2, _resume, tmp_path / "sharded")
    resume(lambda: "auto", 1, all_batches(2, STEPS), tmp_path / "plain")
    consolidate_checkpoint(tmp_path / "sharded" / "epoch=2.ckpt", tmp_path / "whole.ckpt")
    actual = torch.load(tmp_path / "whole.ckpt", weights_only=True)
    expected = torch.load(tmp_path / "plain" / "epoch=2.ckpt", weights_only=True)
    assert_same(actual["state_dict"], expected["state_dict"], 1e-9)
    of_optimizers = [each["optimizer_states"][0] for each in (actual, expected)]
    assert of_optimizers[0]["param_groups"] == of_optimizers[1]["param_groups"]
    torch.testing.assert_close(of_optimizers[0]["state"], of_optimizers[1]["state"], rtol=1e-9, atol=1e-11)


class UnfrozenInTheStep(FrozenAtFirst):
    def on_train_epoch_start(self) -> None:
        pass

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == 2:
            self.set_frozen(False)
        return super().training_step(batch, batch_idx)


def _in_the_step(rank: int) -> None:
    with pytest.raises(RuntimeError, match=r"trunk.0.weight has become trainable within training_step.*unfreeze"):
        run(KrizhevskyHybridStrategy(), 2, UnfrozenInTheStep, batches(rank, 2, STEPS))


def test_unfreezing_within_the_step_is_refused_by_name():
    run_processes(2, _in_the_step)


class FrozenWithStatistics(StepNet):
    """All of the trunk is frozen, and its batch norm still moves statistics, because it is in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk.append(torch.nn.BatchNorm1d(6).double()).requires_grad_(False)
        self.validated: list[Tensor] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.append(self(batch[0]))


def _with_statistics(rank: int, strategy: Any) -> tuple[Result, list[Tensor]]:
    module = FrozenWithStatistics()
    runner = trainer(strategy, 2, use_distributed_sampler=False, max_epochs=2)
    runner.fit(module, batches(rank, 2, STEPS), batches(rank, 2, 1))
    return dict(module.state_dict()), module.validated


@pytest.mark.ci
def test_a_frozen_trunk_has_the_statistics_that_it_has_under_ddp():
    of_ddp = run_processes(2, _with_statistics, "ddp")
    for actual, expected in zip(run_processes(2, _with_statistics, KrizhevskyHybridStrategy()), of_ddp, strict=True):
        assert_same(actual[0], expected[0], 1e-10)
        torch.testing.assert_close(actual[1], expected[1], rtol=1e-10, atol=1e-12)


class IgnoredInFrozenTrunk(FrozenWithStatistics):
    """DDP is told to leave statistics and a buffer alone, which are each rank's own."""

    def __init__(self) -> None:
        super().__init__()
        rank = int(os.environ.get("RANK", 0))
        self.register_buffer("own", torch.full((2,), float(rank)))
        self.register_buffer("everyones", torch.full((2,), float(rank)))
        ignore_in_ddp(self, ["own", "trunk.4.running_mean", "trunk.4.running_var"])


def _with_ignored(rank: int, strategy: Any) -> Result:
    module = IgnoredInFrozenTrunk()
    trainer(strategy, 2, use_distributed_sampler=False).fit(module, batches(rank, 2, STEPS), batches(rank, 2, 1))
    return {name: value for name, value in module.state_dict().items() if not name.startswith("head.")}


@pytest.mark.ci
def test_a_frozen_trunk_keeps_what_ddp_is_told_to_ignore():
    """The head under DDP has gradients, so that DDP wraps the module. Only the trunk is compared."""
    of_ddp = run_processes(2, _with_ignored, "ddp")
    assert of_ddp[0]["own"].sum() == 0 != of_ddp[1]["own"].sum()
    for actual, expected in zip(run_processes(2, _with_ignored, KrizhevskyHybridStrategy()), of_ddp, strict=True):
        assert_same(actual, expected, 1e-10)


class TableInFrozenTrunk(StepNet):
    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.trunk.requires_grad_(False)
        self.register_buffer("table", table)


def _with_strides(rank: int) -> Tensor:
    table = torch.arange(6.0).view(2, 3) + 10 * rank
    module = TableInFrozenTrunk(table.T.contiguous().T if rank else table)
    trainer(KrizhevskyHybridStrategy(), 2, use_distributed_sampler=False).fit(module, batches(rank, 2, STEPS))
    expanded = TableInFrozenTrunk(torch.zeros(()).expand(1000, 1000))
    with pytest.raises(RuntimeError, match="refers to a single memory location"):  # as under DDP
        trainer(KrizhevskyHybridStrategy(), 2, use_distributed_sampler=False).fit(expanded, batches(rank, 2, STEPS))
    return module.table


def test_a_frozen_trunk_takes_values_and_not_memory():
    """The ranks have laid out one buffer by rows and by columns, and another has many elements in the memory of one."""
    for table in run_processes(2, _with_strides):
        assert table.tolist() == [[0, 1, 2], [3, 4, 5]]


class OwnLayer(HybridNet):
    """Each rank trains a layer of its own, which DDP is told to ignore."""

    def __init__(self) -> None:
        super().__init__()
        self.own = torch.nn.Linear(6, 6).double()
        ignore_in_ddp(self, ["own.weight", "own.bias"])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.cost(self(self.own(batch[0])), batch[1])


def _with_own_layer(rank: int, strategy: Any) -> Result:
    return run(strategy, 2, OwnLayer, batches(rank, 2, STEPS))


@pytest.mark.ci
def test_parameters_that_ddp_is_told_to_ignore_may_differ_between_ranks():
    of_ddp = run_processes(2, _with_own_layer, "ddp")
    assert not torch.equal(of_ddp[0]["own.bias"], of_ddp[1]["own.bias"])
    for actual, expected in zip(run_processes(2, _with_own_layer, KrizhevskyHybridStrategy()), of_ddp, strict=True):
        assert_same(actual, expected, 1e-10)
