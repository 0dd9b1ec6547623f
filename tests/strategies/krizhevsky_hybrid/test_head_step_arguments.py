"""What head_step may read beside features and targets: further arguments, constants, the head's own weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_dp import KrizhevskyHybridStrategy
from lightning_dp.strategies.krizhevsky_hybrid.exchange import StepArguments
from lightning_dp.strategies.krizhevsky_hybrid.passes import _is_same
from tests.ranks import logged, run_processes
from tests.strategies.krizhevsky_hybrid.modules import StepNet, all_batches, batches, fit_with
from tests.strategies.modules import CLASSES, assert_same


class Weighted(StepNet):
    """Further arguments, by position and by name, and a constant, which NumPy may have."""

    def head_step(self, features: Tensor, target: Tensor, weights: Tensor, *, power: int = 1) -> Tensor:
        losses = F.cross_entropy(self.head(features), target, reduction="none")
        return (losses * weights**power).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, target = batch
        weights = x[:, 0].abs()
        features = self.trunk(x)
        if batch_idx % 2:
            return self.head_step(features, target, weights, power=np.int64(2))
        return self.head_step(target=target, features=features, weights=weights)


class InDict(Weighted):
    """Several arguments in a dict, in which rank 1 has them in another order, as if they had been in a set."""

    def head_step(self, features: Tensor, others: Any) -> Tensor:
        (weights, power), target = others["weights"], others["target"]
        assert list(others) == self.order
        return super().head_step(features, target.argmax(1), weights[:, 0], power=power)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, target = batch
        one_hot = F.one_hot(target, CLASSES).to(x.dtype)
        others = {"target": one_hot, "weights": (x[:, :CLASSES].abs(), 2)}
        self.order = sorted(others, reverse=self.global_rank == 1)
        return self.head_step(self.trunk(x), {name: others[name] for name in self.order})


def _without_wraps(function: Any) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return run


class Decorated(Weighted):
    """A decorator hides the parameters."""

    head_step = _without_wraps(Weighted.head_step)


def _train(rank: int, net: type[Weighted]) -> dict[str, Tensor]:
    return fit_with(batches(rank, 2), KrizhevskyHybridStrategy(scheme="c"), 2, net, {})


@pytest.mark.ci
@pytest.mark.parametrize("net", [Weighted, InDict, Decorated])
def test_head_step_may_have_further_arguments(net):
    expected = fit_with(all_batches(2), "auto", 1, net, {})
    for result in run_processes(2, _train, net):
        assert_same(result, expected, 1e-9)


class TwoViews(StepNet):
    """Contrasts two views of each sample with those of all ranks. The views are stacked, so they stay together."""

    def head_step(self, features: Tensor, target: Tensor) -> Tensor:
        first, second = F.normalize(self.head(features), dim=-1).unbind(1)
        return F.cross_entropy(first @ second.T / 0.5, torch.arange(len(first)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, target = batch
        features = self.trunk(torch.cat([x, x + 0.5]))
        return self.head_step(torch.stack(features.chunk(2), dim=1), target)


class JoinedViews(TwoViews):
    def head_step(self, features: Tensor, target: Tensor) -> Tensor:
        return super().head_step(torch.stack(features.chunk(2), dim=1), target)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, target = batch
        return self.head_step(self.trunk(torch.cat([x, x + 0.5])), target.repeat(2))


def _two_views(rank: int) -> list[dict[str, Tensor]]:
    return [fit_with(batches(rank, 2), KrizhevskyHybridStrategy(), 2, net, {}) for net in (TwoViews, JoinedViews)]


@pytest.mark.ci
def test_views_of_a_sample_stay_together_if_they_are_stacked():
    expected = fit_with(all_batches(2), "auto", 1, TwoViews, {})
    assert_same(fit_with(all_batches(2), "auto", 1, JoinedViews, {}), expected, 1e-9)
    for stacked, joined in run_processes(2, _two_views):
        assert_same(stacked, expected, 1e-9)
        with pytest.raises(AssertionError):  # a limit that the docs name: the halves are those of ranks
            assert_same(joined, expected, 1e-9)


class CallsItself(StepNet):
    """MixUp of two targets, for each of which `head_step` calls itself. A sum would count what is there twice."""

    def head_step(self, features: Tensor, target: Tensor, other: Tensor | None = None) -> Tensor:
        if other is not None:
            return 0.3 * self.head_step(features, target) + 0.7 * self.head_step(features, other)
        return F.cross_entropy(self.head(features), target, reduction="sum") / 6

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, target = batch
        return self.head_step(self.trunk(x), target, (target + 1) % CLASSES)


class RunsAgain(CallsItself):
    """The same in manual optimization, whose backward runs `head_step` again."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        step = super().training_step
        x = batch[0].requires_grad_()
        loss = checkpoint(lambda x: step((x, batch[1]), batch_idx), x, use_reentrant=True)
        self.optimizers().zero_grad()
        self.manual_backward(loss)
        self.optimizers().step()


def _calls_itself(rank: int, net: type[StepNet]) -> dict[str, Tensor]:
    return fit_with(batches(rank, 2), KrizhevskyHybridStrategy(), 2, net, {})


@pytest.mark.ci
@pytest.mark.parametrize("net", [CallsItself, RunsAgain])
def test_head_step_may_call_itself(net):
    expected = fit_with(all_batches(2), "auto", 1, CallsItself, {})
    for result in run_processes(2, _calls_itself, net):
        assert_same(result, expected, 1e-9)


class WeightPenalty(StepNet):
    """Each rank adds the sum over its own rows, so the losses differ between ranks and the gradients are right."""

    def head_step(self, features: Tensor, target: Tensor) -> Tensor:
        return super().head_step(features, target) + 0.1 * sum(p.square().sum() for p in self.head.parameters())


def _weight_penalty(rank: int) -> list[tuple[dict[str, Tensor], list[str]]]:
    results = []
    for scheme, variable_batch in (("a", False), ("c", False), ("c", True)):
        strategy = KrizhevskyHybridStrategy(scheme=scheme, variable_batch=variable_batch)
        with logged() as said:
            results.append((fit_with(batches(rank, 2), strategy, 2, WeightPenalty, {}), said))
    return results


@pytest.mark.ci
def test_a_sum_over_the_heads_weights_may_be_a_penalty_and_comes_with_a_warning():
    expected = fit_with(all_batches(2), "auto", 1, WeightPenalty, {})
    first, second = run_processes(2, _weight_penalty)
    for (result, said), (other, _) in zip(first, second, strict=True):
        assert_same(result, other, 0.0)
        assert sum("penalty on its weights must be a sum" in text for text in said) == 1
    for result, _ in first[:2]:  # with variable_batch it is another algorithm
        assert_same(result, expected, 1e-9)


class OtherConstant(Weighted):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, target = batch
        return self.head_step(self.trunk(x), target, x[:, 0], power=self.global_rank)


def _other_constant(rank: int) -> str:
    with pytest.raises(ValueError, match="the ranks pass different things") as error:
        fit_with(batches(rank, 2), KrizhevskyHybridStrategy(), 2, OtherConstant, {})
    return str(error.value)


def test_constants_must_be_the_same_on_all_ranks():
    for rank, said in enumerate(run_processes(2, _other_constant)):
        assert f"('power', {rank})" in said
        assert "as a tensor with a row for each sample" in said


class OtherName(StepNet):
    """In its third batch rank 1 has targets of another kind, of the same shape, when no losses are compared."""

    def head_step(self, features: Tensor, targets: Any) -> Tensor:
        losses = [super(OtherName, self).head_step(features, target) for target in targets.values()]
        return losses[0] * (0.5 if "pseudo" in targets else 1.0)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, target = batch
        is_other = batch_idx == 2 and self.global_rank == 1
        return self.head_step(self.trunk(x), {"pseudo" if is_other else "given": target})


def _other_name(rank: int) -> str:
    with pytest.raises(ValueError, match="the ranks pass different things") as error:
        fit_with(batches(rank, 2), KrizhevskyHybridStrategy(), 2, OtherName, {})
    return str(error.value)


def test_arguments_must_have_the_same_names_on_all_ranks():
    for said, name in zip(run_processes(2, _other_name), ("given", "pseudo"), strict=True):
        assert f"'targets.{name}'" in said


def test_arguments_are_where_the_features_are():
    """Over NCCL a tensor of the CPU cannot be sent, and torch does not say which one."""
    with pytest.raises(
        ValueError, match=r"argument 'weights' is on meta, .* on cpu; pass weights.to\(features.device\)"
    ):
        StepArguments({"weights": torch.zeros(2, device="meta")}, torch.zeros(2, 3))


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_arguments_are_dense(layout):
    target = torch.eye(2, 3).to_sparse(layout=layout)
    with pytest.raises(ValueError, match=rf"'target' contains a tensor of {layout}, .* pass dense tensors"):
        StepArguments({"target": target}, torch.zeros(2, 3))


def test_a_change_of_large_losses_is_compared_up_to_their_rounding():
    changes = torch.tensor([0.0, 5e-4])
    assert _is_same(changes, torch.float32, scale=100.0)
    assert not _is_same(changes, torch.float32, scale=1.0)
