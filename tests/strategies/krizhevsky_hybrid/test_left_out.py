"""A loss that leaves out, on one rank, what the head has returned; or, on all, the trunk."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_dp import KrizhevskyHybridStrategy
from tests.ranks import run_processes
from tests.strategies.krizhevsky_hybrid.modules import STEPS, HybridNet, Result, StepNet, all_batches, batches, fit_with
from tests.strategies.modules import CLASSES, assert_same


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


class Alternates(HybridNet):
    """Every other batch trains the head alone. Accumulation ends with such a batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        features = self.trunk(batch[0])
        return self.cost(self.head(features.detach() if batch_idx % 2 else features), batch[1])


class AlternatesStep(StepNet):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        features = self.trunk(batch[0])
        return self.head_step(features.detach() if batch_idx % 2 else features, batch[1])


class TrainsHeadFirst(StepNet):
    """The trunk joins in epoch 1, and one layer of it, which was frozen, in epoch 2."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk[0].requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        self.trunk[0].requires_grad_(self.current_epoch > 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.set_grad_enabled(self.current_epoch != 0):
            features = self.trunk(batch[0])
        if self.current_epoch == 2 and batch_idx % 2:
            features = features.detach()
        return self.head_step(features, batch[1])


HEAD_ALONE = (Alternates, AlternatesStep, TrainsHeadFirst)
OPTIONS = {"accumulate_grad_batches": 2, "max_epochs": 3}


def _train_head_alone(rank: int) -> list[Result]:
    def make() -> KrizhevskyHybridStrategy:
        return KrizhevskyHybridStrategy(scheme="c", find_unused_parameters=True)

    return [fit_with(batches(rank, 2), make(), 2, net, OPTIONS) for net in HEAD_ALONE]


@pytest.mark.ci
def test_a_batch_may_train_the_head_alone():
    of_ranks = run_processes(2, _train_head_alone)
    for index, net in enumerate(HEAD_ALONE):
        expected = fit_with(all_batches(2), "auto", 1, net, OPTIONS)
        for of_rank in of_ranks:
            assert_same(of_rank[index], expected, 1e-10)


class OnlySome(StepNet):
    """A loss of the samples of one class. Where there is none it has no graph: in some passes, and in whole steps."""

    def head_step(self, features: Tensor, target: Tensor) -> Tensor:
        chosen = target == self.trainer.global_step % 4
        if not chosen.any():
            return features.new_zeros(())
        return F.cross_entropy(self.head(features), target, reduction="none")[chosen].sum() / len(target)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        features = self.trunk(batch[0])
        return self.head_step(features, batch[1]) + features.square().mean()


class OnlyNone(StepNet):
    def head_step(self, features: Tensor, target: Tensor) -> Tensor:
        return self.cost(self.head(features), target).detach()


def _only_some(rank: int, scheme: str) -> Result:
    with pytest.raises(RuntimeError, match="does not require grad"):  # as in plain training
        fit_with(batches(rank, 2), KrizhevskyHybridStrategy(scheme=scheme), 2, OnlyNone, {})
    return fit_with(batches(rank, 2), KrizhevskyHybridStrategy(scheme=scheme), 2, OnlySome, {})


@pytest.mark.parametrize("scheme", ["a", "b", "c"])
def test_the_loss_of_a_pass_may_have_no_graph(scheme):
    expected = fit_with(all_batches(2), "auto", 1, OnlySome, {})
    for actual in run_processes(2, _only_some, scheme):
        assert_same(actual, expected, 1e-10)


class NoClass(StepNet):
    """In one step a target is no class. All ranks raise in the first pass, and train the trunk alone."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        features = self.trunk(batch[0])
        try:
            return self.head_step(features, batch[1] + CLASSES * (self.global_step == 1))
        except IndexError:
            return 0 * features.sum()


def _catch(rank: int, scheme: str) -> tuple[Result, int]:
    strategy, stages = KrizhevskyHybridStrategy(scheme=scheme), []
    strategy.on_stage = lambda name, *_: stages.append(name)
    return fit_with(batches(rank, 2), strategy, 2, NoClass, {}), stages.count("features")


@pytest.mark.ci
@pytest.mark.parametrize("scheme", ["b", "c"])
def test_an_exception_of_head_step_on_all_ranks_may_be_caught(scheme):
    """The features of the next pass, which are on their way, are received. Nobody would wait for them."""
    expected = fit_with(all_batches(2), "auto", 1, NoClass, {})
    for actual, num_received in run_processes(2, _catch, scheme):
        assert_same(actual, expected, 1e-10)
        assert num_received == 2 * STEPS


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
