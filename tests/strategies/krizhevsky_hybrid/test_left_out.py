"""A loss that leaves out, on one rank, what the head has returned."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from torch import Tensor

from lightning_dp import KrizhevskyHybridStrategy
from tests.ranks import run_processes
from tests.strategies.krizhevsky_hybrid.modules import HybridNet, StepNet, batches, fit_with


class LeavesLogitsOut:
    """In the third batch, rank 1 has another loss than rank 0."""

    remedy = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)  # type: ignore[misc]
        if batch_idx < 2 or self.global_rank == 0:  # type: ignore[attr-defined]
            return loss
        other = self.trunk(batch[0]).square().mean()  # type: ignore[attr-defined]
        return other + 0 * loss if self.remedy else other


class LeavesOut(LeavesLogitsOut, HybridNet): ...


class LeavesStepOut(LeavesLogitsOut, StepNet): ...


class Remedied(LeavesOut):
    remedy = True


class AccuracyBeside(StepNet):
    """Calls the head once more, for a metric: with gradients, though nobody wants them."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.correct = (self(batch[0]).argmax(1) == batch[1]).sum()
        return super().training_step(batch, batch_idx)


def _train(rank: int, net: type[HybridNet]) -> None:
    fit_with(batches(rank, 2, steps=4), KrizhevskyHybridStrategy(timeout=timedelta(seconds=30)), 2, net, {})


def _leave_out(rank: int, net: type[HybridNet]) -> str:
    with pytest.raises((ValueError, RuntimeError)) as error:
        _train(rank, net)
    return str(error.value)


@pytest.mark.parametrize("net", [LeavesOut, LeavesStepOut])
def test_a_rank_whose_loss_leaves_the_logits_out_says_so_before_the_others_wait_for_it(net):
    _, text = run_processes(2, _leave_out, net)
    assert "the loss of rank 1 does not depend on what 'head' has returned in this training step" in text


@pytest.mark.ci
@pytest.mark.parametrize("net", [Remedied, AccuracyBeside])
def test_a_result_of_the_head_need_not_matter(net):
    run_processes(2, _train, net)
