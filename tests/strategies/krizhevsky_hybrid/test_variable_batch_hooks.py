"""With variable_batch every update of the head runs Lightning's hooks on gradients, as the update of the trunk does."""

from __future__ import annotations

from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor

from lightning_dp import KrizhevskyHybridStrategy
from tests.ranks import run_processes
from tests.strategies.krizhevsky_hybrid.modules import StepNet, batches, fit_with
from tests.strategies.krizhevsky_hybrid.test_strategy import variable_batch_loop
from tests.strategies.modules import assert_same, trainer

HOOKS = ["on_after_backward", "on_before_optimizer_step"]


class Doubling(pl.Callback):
    """Doubles all gradients in one hook, and notes the names of the parameters that have one in each call."""

    def __init__(self, hook: str) -> None:
        self.seen: list[set[str]] = []
        setattr(self, hook, self.double)

    def double(self, trainer: Any, module: pl.LightningModule, *_: Any) -> None:
        with_gradient = {name: p for name, p in module.named_parameters() if p.grad is not None}
        self.seen.append({name.partition(".")[0] for name in with_gradient})
        for parameter in with_gradient.values():
            parameter.grad.mul_(2)


class Logging(StepNet):
    """Logs in the hook, as Lightning's example for norms of gradients does, and has half of a learning rate."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=2e-2)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("num_gradients", float(sum(p.grad is not None for p in self.parameters())))


def _doubled(rank: int, hook: str) -> tuple[dict[str, Tensor], list[set[str]], int]:
    callback, module = Doubling(hook), Logging()
    strategy = KrizhevskyHybridStrategy(scheme="c", variable_batch=True)
    runner = trainer(strategy, 2, use_distributed_sampler=False, callbacks=[callback])
    runner.fit(module, batches(rank, 2))
    return {name: p.detach() for name, p in module.named_parameters()}, callback.seen, runner.global_step


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_changes_the_gradients_of_each_update(hook):
    # Half of the learning rate, twice the gradient and twice the decay make the same steps.
    expected = {name: p.detach() for name, p in variable_batch_loop("c", 2, "momentum").named_parameters()}
    for result, seen, num_steps in run_processes(2, _doubled, hook):
        assert_same(result, expected, 1e-9)
        assert seen == [{"head"}, {"head"}, {"trunk"}] * num_steps


class Accumulating(StepNet):
    """Accumulates the gradients of two batches for the trunk, and notes those of the trunk between batches."""

    def __init__(self) -> None:
        super().__init__()
        self.between: list[Tensor] = []
        self.hidden: list[bool] = []

    def on_after_backward(self) -> None:
        if self.head[-1].weight.grad is not None:
            self.hidden.append(all(p.grad is None for p in self.trunk.parameters()))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        gradient = self.trunk[0].weight.grad
        self.between.append(torch.zeros(()) if gradient is None else gradient.norm())


def _accumulating(rank: int) -> tuple[list[Tensor], list[bool]]:
    module = Accumulating()
    strategy = KrizhevskyHybridStrategy(scheme="c", variable_batch=True, gradient_as_bucket_view=True)
    runner = trainer(strategy, 2, use_distributed_sampler=False, accumulate_grad_batches=2)
    runner.fit(module, batches(rank, 2, steps=4))
    return module.between, module.hidden


@pytest.mark.ci
def test_hooks_do_not_see_gradients_that_the_trunk_accumulates():
    for between, hidden in run_processes(2, _accumulating):
        assert hidden == [True] * 8
        assert between[0] > 0  # and they are still there afterwards
        assert between[2] > 0


def _thirds(rank: int) -> None:
    options = {"precision": "bf16-true", "accumulate_grad_batches": 3}
    fit_with(batches(rank, 2), KrizhevskyHybridStrategy(variable_batch=True), 2, StepNet, options)


@pytest.mark.ci
def test_a_third_that_is_rounded_to_bfloat16_is_no_other_factor():
    run_processes(2, _thirds)
