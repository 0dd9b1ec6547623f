"""What Lightning does around a fit: going on in mid-epoch, stopping early, a compiled LightningModule."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning_fabric.utilities.warnings import PossibleUserWarning
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint
from pytorch_lightning.strategies import DDPStrategy
from torch import Tensor

from lightning_dp.strategies import LayeredSGDStrategy
from tests.ranks import RankError, run_processes
from tests.strategies.modules import SMALL_BUCKETS_MB, Net, assert_same, data, snapshot, trainer

OVERLAPS = ("load", "step")


def layered(overlap: str) -> LayeredSGDStrategy:
    return LayeredSGDStrategy(1, overlap=overlap, bucket_cap_mb=SMALL_BUCKETS_MB)


def fit(strategy: Any, module: Any, loader: Any, ckpt_path: str | None = None, **options: Any):
    t = trainer(strategy, 2, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PossibleUserWarning)  # advice: loader workers, a loader that cannot resume
        warnings.filterwarnings("ignore", "Checkpoint directory .* exists and is not empty")
        warnings.filterwarnings("ignore", r".*\.grad attribute of a Tensor that is not a leaf")  # dynamo looks at it
        t.fit(module, loader, ckpt_path=ckpt_path, weights_only=None if ckpt_path is None else True)
    return t


# --- going on in mid-epoch ---

STEPS, EVERY = 7, 5  # a checkpoint in each of two epochs, in mid-epoch


class Resumable:
    """This rank's batches, in an order that differs between epochs; a checkpoint holds how far it has come."""

    def __init__(self) -> None:
        self.batches = list(data(2, STEPS))
        self.epoch, self.done = 0, 0

    def __len__(self) -> int:
        return STEPS

    def __iter__(self) -> Iterator[Any]:
        if self.done == STEPS:
            self.epoch, self.done = self.epoch + 1, 0
        generator = torch.Generator().manual_seed(self.epoch)
        own = torch.randperm(len(self.batches), generator=generator)[dist.get_rank() :: 2].tolist()
        while self.done < STEPS:
            self.done += 1
            yield self.batches[own[self.done - 1]]

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.done = state["epoch"], state["done"]


def two_epochs(strategy: Any, loader: Any, folder: Path, resume_at: int | None = None) -> dict[str, Tensor]:
    """Two epochs, with checkpoints in ``folder``; or what is left of them after one of those."""
    module = Net(optimizer="adamw", schedule="step")
    checkpoint = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=EVERY, save_top_k=-1)
    path = None if resume_at is None else str(folder / f"step={resume_at}.ckpt")
    t = fit(strategy, module, loader, path, callbacks=[checkpoint], enable_checkpointing=True, max_epochs=2)
    assert t.global_step == 2 * STEPS
    return snapshot(module, t)


def resume_where_the_loader_can(rank, folder, steps=(EVERY, 2 * EVERY)):
    expected = two_epochs(DDPStrategy(), Resumable(), folder / "ddp")
    for overlap in OVERLAPS:
        assert_same(two_epochs(layered(overlap), Resumable(), folder / overlap), expected)
        for step in steps:
            assert_same(two_epochs(layered(overlap), Resumable(), folder / overlap, step), expected)


@pytest.mark.ci
def test_resumed_in_mid_epoch_it_ends_as_ddp_does_without_interruption(tmp_path):
    run_processes(2, resume_where_the_loader_can, tmp_path)


def lose_the_pending_update(rank, folder):
    saved = LayeredSGDStrategy.lightning_module_state_dict

    def save_what_is_there(self):
        self.finish_update, finish = lambda: None, self.finish_update
        with torch._C.DisableTorchFunction():
            state = {name: value.clone() for name, value in saved(self).items()}
        self.finish_update = finish
        return state

    LayeredSGDStrategy.lightning_module_state_dict = save_what_is_there
    resume_where_the_loader_can(rank, folder, [EVERY])


@pytest.mark.ci
def test_resuming_differs_from_ddp_if_a_checkpoint_lacks_the_pending_update(tmp_path):
    with pytest.raises(RankError, match="first.weight"):
        run_processes(2, lose_the_pending_update, tmp_path)


def resume_where_the_loader_cannot(rank, folder):
    """Then Lightning makes up the number of steps with data from the start of the epoch; so must we."""
    whole = two_epochs(DDPStrategy(), data(2, STEPS), folder / "ddp")
    resumed = two_epochs(DDPStrategy(), data(2, STEPS), folder / "ddp", EVERY)
    assert not torch.allclose(resumed["first.weight"], whole["first.weight"])
    for overlap in OVERLAPS:
        assert_same(two_epochs(layered(overlap), data(2, STEPS), folder / overlap), whole)
        for of in (overlap, "ddp"):
            assert_same(two_epochs(layered(overlap), data(2, STEPS), folder / of, EVERY), resumed)


@pytest.mark.ci
def test_resumed_with_a_plain_loader_it_does_what_ddp_does(tmp_path):
    run_processes(2, resume_where_the_loader_cannot, tmp_path)


# --- stopping early ---


class Validated(Net):
    def val_dataloader(self):
        return data(2, steps=2)


class Trained(Net):
    """Stops by a value that is logged in training."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss


# In mid-epoch; at the end of an epoch by a value of validation; by one of training.
STOPS: dict[str, tuple[type[Net], str, dict[str, Any]]] = {
    "mid-epoch": (Validated, "val_loss", {"val_check_interval": 4}),
    "validation": (Validated, "val_loss", {}),
    "training": (Trained, "loss", {}),
}


def stop_early(rank, name):
    make, monitor, options = STOPS[name]
    ends = []
    for strategy in (DDPStrategy(), *(layered(overlap) for overlap in OVERLAPS)):
        module, stopping = make(), EarlyStopping(monitor, min_delta=0.02, patience=1)  # so much that it stops soon
        t = fit(strategy, module, data(2, STEPS), callbacks=[stopping], max_epochs=50, **options)
        ends.append((stopping.stopped_epoch, t.global_step, snapshot(module, t)))
    for end in ends[1:]:
        assert end[:2] == ends[0][:2]
        assert_same(end[2], ends[0][2])
    return ends[0][1]


@pytest.mark.ci
@pytest.mark.parametrize("name", STOPS)
def test_early_stopping_stops_where_ddp_does_and_loses_no_update(name):
    for steps in run_processes(2, stop_early, name):
        assert steps < 50 * STEPS, "nothing stopped it"
        assert (steps % STEPS != 0) == (name == "mid-epoch")


# --- a compiled LightningModule ---


class ManualNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


def compare_compiled(rank, make):
    runs = 0

    def backend(graph, inputs):
        def call(*args):
            nonlocal runs
            runs += 1
            return graph.forward(*args)

        return call

    module = make()
    expected = snapshot(module, fit(DDPStrategy(), module, data(2, STEPS), max_steps=5))
    counts = []
    for overlap in OVERLAPS:
        module, before = make(), runs
        # With buckets of the usual size: torch splits a compiled module at them, and wants no small ones.
        strategy = LayeredSGDStrategy(1, overlap=overlap)
        t = fit(strategy, torch.compile(module, backend=backend), data(2, STEPS), max_steps=5)
        assert_same(snapshot(module, t), expected)
        counts.append(runs - before)
    return counts


@pytest.mark.ci
@pytest.mark.parametrize("make", [Net, pytest.param(ManualNet, marks=pytest.mark.slow)])
def test_a_compiled_lightning_module(make):
    for counts in run_processes(2, compare_compiled, make):
        assert min(counts) >= 5, "nothing compiled was run"
