"""What users do, with sums on a device that is as late as it may be. Each fit ends as under DDP, or raises an error.

The other tests of layered SGD run the same code with sums on the host.
"""

from __future__ import annotations

from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import WeightAveraging
from pytorch_lightning.strategies import DDPStrategy
from torch import nn

from lightning_dp.strategies.layered_sgd.update import UpdateQueue
from tests.ranks import RankError, run_processes
from tests.strategies.layered_sgd.late_sums import sum_late
from tests.strategies.layered_sgd.modules import OVERLAPS, Unused
from tests.strategies.layered_sgd.user_cases import Case, Manual, compare, fit, layered
from tests.strategies.modules import Net, TogglesOptimizers, assert_same, data, optimizers, snapshot

UNUSED = {"ddp": {"find_unused_parameters": True}}


class InPlace(Manual):
    """Zeroes gradients in place, clips them and steps by hand, and accumulates over two batches."""

    def training_step(self, batch, batch_idx):
        self.manual_backward(self.loss(batch))
        optimizer = self.optimizers()
        if batch_idx % 2:
            self.clip_gradients(optimizer, 0.01, "norm")
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)


class Adversaries(TogglesOptimizers):
    """Two optimizers, whose parameters are frozen in turn."""

    def configure_optimizers(self) -> Any:
        first = [*self.first.parameters(), *self.shared.parameters()]
        return torch.optim.AdamW(first, lr=0.01), torch.optim.SGD(self.last.parameters(), lr=0.1, momentum=0.9)


class Images(Net):
    """Gradients that are not contiguous, and parameters of two types."""

    def __init__(self) -> None:
        super().__init__("adamw")
        self.images = nn.Conv2d(2, 3, 3, padding=1).double().to(memory_format=torch.channels_last)
        self.rounded = nn.Linear(6, 6).bfloat16()

    def forward(self, x):
        x = x + self.rounded(x.bfloat16()).double()
        y = self.images(x.view(-1, 2, 1, 3).to(memory_format=torch.channels_last))
        return super().forward(x) + y.mean((2, 3))


class ReadsOnRank0(pl.Callback):
    def on_after_backward(self, trainer: Any, module: Any) -> None:
        if trainer.global_rank == 0:
            float(module.last.weight.grad.norm())

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == 0:
            float(module.last.weight.detach().sum())
            module.first.weight.grad  # noqa: B018


class SkipsBatches(Manual):
    """Goes on after an exception between two steps."""

    def training_step(self, batch, batch_idx):
        try:
            self.manual_backward(self.loss(batch))
            self.optimizers().step()
            if batch_idx % 3 == 1:
                raise ArithmeticError
        except ArithmeticError:
            self.last.bias.data.mul_(0.5)
        self.optimizers().zero_grad()


class Average(WeightAveraging):
    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return step_idx is not None


class Validated(Net):
    def val_dataloader(self):
        return data(2, steps=1)


CASES: dict[str, Case] = {
    "in place": (InPlace, (), {}),
    "adversaries": (Adversaries, (), UNUSED),
    "images": (Images, (ReadsOnRank0,), {}),
    "skips batches": (SkipsBatches, (), {}),
    "averaged and validated": (Validated, (Average,), {"val_check_interval": 3}),
    "unused, accumulated, clipped": (Unused, (ReadsOnRank0,), {"accumulate_grad_batches": 2, **UNUSED}),
    "static graph": (Net, (), {"gradient_clip_val": 0.1, "ddp": {"static_graph": True}}),
}


def compare_late(rank, names, break_it=False):
    made = sum_late()
    if break_it:
        UpdateQueue.wait_for_gradients = lambda self: None
    for name in names:
        try:
            compare(CASES[name])
        except Exception as error:
            raise AssertionError(f"{name}: {error}") from error
    assert len(made) == len(names) * len(OVERLAPS)


@pytest.mark.ci
def test_equals_ddp():
    run_processes(2, compare_late, list(CASES))


def test_a_wait_that_is_left_out_is_seen():
    with pytest.raises(RankError, match="first.weight|was changed while it was summed"):
        run_processes(2, compare_late, ["in place"], True)


class UnfreezesAndAccumulates(InPlace):
    """The first layer is frozen for two batches. DDP must have wrapped it as trainable, to reduce it afterwards."""

    def __init__(self, freezes_in: str) -> None:
        super().__init__()
        self.freezes_in = freezes_in

    def setup(self, stage: str) -> None:
        self.first.requires_grad_(self.freezes_in != "setup")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.first.requires_grad_(batch_idx >= 2)

    def configure_optimizers(self) -> Any:
        parts = (self.first, self.shared, self.last)
        return optimizers("momentum", [parameter for part in parts for parameter in part.parameters()])


def compare_unfrozen(rank):
    sum_late()
    module = UnfreezesAndAccumulates("on_train_batch_start")
    expected = snapshot(module, fit(DDPStrategy(find_unused_parameters=True), module))
    for overlap in OVERLAPS:
        module = UnfreezesAndAccumulates("setup")
        assert_same(snapshot(module, fit(layered(overlap), module)), expected)


@pytest.mark.ci
def test_an_accumulation_in_which_a_layer_is_unfrozen_equals_ddp():
    run_processes(2, compare_unfrozen)
