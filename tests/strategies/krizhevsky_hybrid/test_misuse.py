"""Uses of the head that would go wrong silently, or hang: each raises an error, at once."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_dp import KrizhevskyHybridStrategy
from lightning_dp.losses import Margin, sharded_cross_entropy
from tests.ranks import run_processes
from tests.strategies.krizhevsky_hybrid.modules import HybridNet, NamedNet, StepNet, batches, fit_with
from tests.strategies.modules import CLASSES, trainer


class TemperatureNet(StepNet):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones((), dtype=torch.float64))

    def head_step(self, features: Tensor, target: Tensor) -> Tensor:
        return super().head_step(features * self.temperature, target)


class PenaltyOnGradientNet(StepNet):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        features = self.trunk(batch[0])
        (gradient,) = torch.autograd.grad(self.head_step(features, batch[1]), features, create_graph=True)
        return gradient.square().sum()


class TargetInGraph(StepNet):
    """A trunk activation goes along with the labels."""

    def head_step(self, features: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
        return super().head_step(features, target[0]) + target[1].square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        features = self.trunk(batch[0])
        return self.head_step(features, (batch[1], self.trunk[0](batch[0])))


class DataOnSelf(StepNet):
    """Weights of this rank's samples, used with the samples of a pass."""

    def head_step(self, features: Tensor, target: Tensor) -> Tensor:
        losses = F.cross_entropy(self.head(features), target, reduction="none")
        return (losses * self.weights[: len(losses)]).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.weights = batch[0][:, 0].exp().repeat(4)
        return super().training_step(batch, batch_idx)


class InnerHook(StepNet):
    def __init__(self) -> None:
        super().__init__()
        self.head[2].register_forward_hook(lambda module, args, output: None)


class BackwardHook(StepNet):
    def __init__(self) -> None:
        super().__init__()
        self.head.register_full_backward_hook(lambda module, of_input, of_output: None)


class TensorHook(StepNet):
    def on_train_start(self) -> None:
        self.head[-1].weight.register_hook(lambda gradient: gradient / gradient.norm())


class LateHook(StepNet):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.head[-1].bias.register_hook(lambda gradient: 2 * gradient)


class Summing(StepNet):
    def __init__(self) -> None:
        super().__init__()
        self.total = torchmetrics.SumMetric()

    def head_step(self, features: Tensor, target: Tensor) -> Tensor:
        loss = super().head_step(features, target)
        self.total.update(loss.detach())
        return loss


class Confusing(StepNet):
    def __init__(self) -> None:
        super().__init__()
        self.confusion = torchmetrics.classification.MulticlassConfusionMatrix(CLASSES)

    def head_step(self, features: Tensor, target: Tensor) -> Tensor:
        self.confusion.update(target, target)
        return super().head_step(features, target)


class OwnFactor(StepNet):
    """Multiplies the loss of all ranks' samples by a number of its own batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (1 + batch[0].mean())


class OwnFactorOfSecond(StepNet):
    """Weights the second of two losses by a number of its own batch, as that of unlabeled samples."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        first = super().training_step(batch, batch_idx)
        return first + batch[0].mean() * self.head_step(self.trunk(-batch[0]), batch[1])


class Backward(StepNet):
    """Runs a backward of its own."""

    def head_step(self, features: Tensor, target: Tensor) -> Tensor:
        logits = self.head(features)
        logits.square().mean().backward(retain_graph=True)
        return self.cost(logits, target)


class BackwardOfHead(StepNet):
    """Runs a backward that ends at the head's parameters. Of several passes, each would count as all together."""

    def head_step(self, features: Tensor, target: Tensor) -> Tensor:
        self.head(features.detach()).square().mean().backward()
        return super().head_step(features, target)


class NamedTwice(NamedNet):
    """A penalty on the gradient of a loss that does not keep the logits."""

    def head_step(self, features: Tensor, target: Tensor) -> Tensor:
        loss = super().head_step(features, target)
        (gradient,) = torch.autograd.grad(loss, features, create_graph=True)
        return loss + gradient.square().sum()


class ObjectTarget(StepNet):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.head_step(self.trunk(batch[0]), [batch[1], object()])


class ScalarTarget(StepNet):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.head_step(self.trunk(batch[0]), (batch[1], torch.tensor(0.5)))


class Ragged(StepNet):
    """Sequences that are padded to the longest one of this rank's batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, target = (each[:, None].repeat_interleave(2 + self.global_rank, dim=1) for each in batch)
        return self.head_step(self.trunk(x), target)


class AheadOfTheStep(StepNet):
    """Looks at the losses of its samples first, as a choice of the hardest ones does."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, CLASSES, bias=False).double()

    def head_step(self, features: Tensor, target: Tensor) -> Tensor:
        return sharded_cross_entropy(self.head, features, target, margin=Margin(cosine=0.1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            self.head_step(self.trunk(batch[0]), batch[1])
        return super().training_step(batch, batch_idx)


class ReadsWeight(HybridNet):
    """As ArcFace: the head is not called, its weight is used."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, CLASSES, bias=False).double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.linear(F.normalize(self.trunk(batch[0])), F.normalize(self.head.weight)).square().mean()


class LeavesOut(HybridNet):
    """The second of two backward passes leaves a layer of the trunk out."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.behind = nn.Linear(CLASSES, CLASSES, dtype=torch.float64)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        logits = self(batch[0])
        self.manual_backward(self.cost(self.behind(logits), batch[1]), retain_graph=True)
        self.manual_backward(logits.square().mean())
        self.optimizers().step()


REFUSED: dict[str, tuple[type[HybridNet], str]] = {
    "another parameter": (TemperatureNet, "head_step uses the parameter temperature"),
    "second derivative": (PenaltyOnGradientNet, "differentiated twice"),
    "gradient in the target": (TargetInGraph, "argument 'target' requires a gradient, which would be lost"),
    "data kept on self": (DataOnSelf, "different losses on the ranks for the same samples"),
    "backward within": (Backward, "head_step called backward(), whose gradients cannot reach the trunk"),
    "backward of the head": (BackwardOfHead, "head_step called backward(), whose gradients cannot reach the trunk"),
    "penalty on the gradient of a named loss": (NamedTwice, "this loss cannot be differentiated twice"),
    "factor of the own batch": (OwnFactor, "multiplied by different factors on the ranks"),
    "factor of the second call": (OwnFactorOfSecond, "multiplied by different factors on the ranks"),
    "confusion matrix": (Confusing, "the MulticlassConfusionMatrix confusion is updated within head_step"),
    "inner hook": (InnerHook, "head.2 has hooks, and within the head"),
    "backward hook": (BackwardHook, "head has hooks, and within the head"),
    "tensor hook": (TensorHook, "head.4.weight has hooks on its gradient"),
    "hook of a later step": (LateHook, "head.4.bias has hooks on its gradient"),
    "sum": (Summing, "the SumMetric total is updated within head_step"),
    "object": (ObjectTarget, "argument 'target' contains an object of type object"),
    "single number": (ScalarTarget, r"argument 'target' has shape () beside 3 features"),
    "sequences of different lengths": (Ragged, "on each rank as rows: features.flatten(0, 1)"),
    "margin without gradients": (AheadOfTheStep, "call this in head_step and not under torch.no_grad()"),
    "weight read directly": (
        ReadsWeight,
        "training_step never called it: it seems to read the weights of 'head' directly",
    ),
    "a backward that leaves parameters out": (LeavesOut, "use find_unused_parameters=True"),
}


def _refused(rank: int, scheme: str) -> dict[str, str]:
    said = {}
    for name, (net, _) in REFUSED.items():
        strategy = KrizhevskyHybridStrategy(scheme=scheme, find_unused_parameters=net is TemperatureNet)
        with pytest.raises((ValueError, RuntimeError)) as error:
            fit_with(batches(rank, 2), strategy, 2, net, {})
        said[name] = str(error.value)
    return said


@pytest.mark.ci
@pytest.mark.parametrize("scheme", ["a", "c"])
def test_what_would_go_wrong_silently(scheme):
    for said in run_processes(2, _refused, scheme):
        for name, (_, message) in REFUSED.items():
            assert message in said[name]


def _one_step(rank: int) -> None:
    module = OwnFactor()
    runner = trainer(KrizhevskyHybridStrategy(), 2, use_distributed_sampler=False, max_steps=1)
    callbacks = runner.callbacks
    with pytest.raises(ValueError, match="multiplied by different factors on the ranks"):
        runner.fit(module, batches(rank, 2))
    assert runner.callbacks == callbacks
    with pytest.raises(RuntimeError, match="'head' holds only one rank's local shard"):
        module.head(torch.zeros(2, 6, dtype=torch.float64))


def test_factors_are_compared_in_a_fit_of_one_step():
    """They are compared when the next step begins, or else at the end."""
    run_processes(2, _one_step)


class OwnFactorOfOne(StepNet):
    """Weights batches by their sizes, which differ between the ranks in the third one alone."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (len(batch[0]) / 3)


def _later_factor(rank: int, num_batches: int) -> None:
    own = list(batches(rank, 2, num_batches))
    own[2] = [each[rank:] for each in own[2]]
    runner = trainer(KrizhevskyHybridStrategy(), 2, use_distributed_sampler=False)
    with pytest.raises(ValueError, match=r"multiplied by different factors on the ranks before backward: \[1.0, 0.66"):
        runner.fit(OwnFactorOfOne(), DataLoader(own, batch_size=None))
    assert runner.global_step == 3


@pytest.mark.parametrize("num_batches", [3, 6])
def test_factors_of_each_step_are_compared(num_batches):
    """Each rank would multiply the gradients of its part of the head by its own factor."""
    run_processes(2, _later_factor, num_batches)


class CallsHead(StepNet):
    """Has a head_step, and does not use it."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.cost(self(batch[0]), batch[1])


class Scaled(StepNet):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return 5 * super().training_step(batch, batch_idx)


class PenaltyOutside(StepNet):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + 0.1 * self.head[1].weight.square().sum()


VARIABLE = {
    CallsHead: "training_step did not call it; call self.head_step(features, target)",
    Scaled: "multiplied by 5 before backward",
    PenaltyOutside: "'head' got a gradient outside of head_step",
}


def errors_of(rank: int, nets: Iterable[type[HybridNet]], kind: Any, **options: Any) -> list[str]:
    """Return what is said by the errors of this kind that fits of these modules raise."""
    said = []
    for net in nets:
        with pytest.raises(kind) as error:
            fit_with(batches(rank, 2), KrizhevskyHybridStrategy(**options), 2, net, {})
        said.append(str(error.value))
    return said


class LaterDataOnSelf(DataOnSelf):
    """As an augmentation that is drawn for a few batches."""

    def head_step(self, features: Tensor, target: Tensor) -> Tensor:
        step = super().head_step if self.trainer.global_step == 2 else super(DataOnSelf, self).head_step
        return step(features, target)


class InFirstOfTwoCalls(LaterDataOnSelf):
    """The same in a module of which each step has two calls, of which only the first uses the data."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        first = super().training_step(batch, batch_idx)
        self.weights = torch.ones(99, dtype=torch.float64)
        return first + self.head_step(2 * self.trunk(batch[0]), batch[1])


class OfRoots(DataOnSelf):
    """With features of another sign the loss is NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk.append(nn.Sigmoid())

    def head_step(self, features: Tensor, target: Tensor) -> Tensor:
        return super().head_step(features.sqrt(), target)


DATA_OF_ONE_RANK = (LaterDataOnSelf, InFirstOfTwoCalls, OfRoots)


def _data_of_one_rank(rank: int) -> list[str]:
    return errors_of(rank, DATA_OF_ONE_RANK, ValueError)


@pytest.mark.ci
def test_data_of_one_rank_is_found_in_a_later_step_in_one_of_two_calls_and_where_features_are_positive():
    for said in run_processes(2, _data_of_one_rank):
        for text in said:
            assert "head_step returns different losses on the ranks for the same samples" in text


def _variable(rank: int) -> list[str]:
    said = errors_of(rank, VARIABLE, ValueError, variable_batch=True)
    # Accumulation divides the loss, as it should.
    fit_with(
        batches(rank, 2), KrizhevskyHybridStrategy(variable_batch=True), 2, StepNet, {"accumulate_grad_batches": 3}
    )
    return said


@pytest.mark.ci
def test_with_variable_batch_the_head_is_updated_in_head_step_or_not_at_all():
    for said in run_processes(2, _variable):
        for text, message in zip(said, VARIABLE.values(), strict=True):
            assert message in text


class Twice(HybridNet):
    """Rank 0 calls the head once more than rank 1."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 2 and self.global_rank == 0:
            self(batch[0])
        return super().training_step(batch, batch_idx)


class TwiceInStep(StepNet):
    def head_step(self, features: Tensor, target: Tensor) -> Tensor:
        if self.trainer.global_step == 2 and self.global_rank == 0:
            self.head(features)
        return super().head_step(features, target)


def _one_rank_more(rank: int) -> list[str]:
    return errors_of(rank, (Twice, TwiceInStep), RuntimeError, timeout=timedelta(seconds=30))


@pytest.mark.ci
def test_a_call_on_one_rank_alone_in_a_step_is_named():
    for said in run_processes(2, _one_rank_more):
        assert all("made a call that the other has not" in text or "could not receive from" in text for text in said)
    first, _ = run_processes(2, _one_rank_more)
    assert all("made a call that the other has not" in text for text in first)


class NothingForTheHead(StepNet):
    """In one step rank 1 has no sample with a label. Under DDP with ``find_unused_parameters`` that works."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 2 and self.global_rank == 1:
            return self.trunk(batch[0]).square().mean()
        return super().training_step(batch, batch_idx)


class LessForTheHead(StepNet):
    """In one step rank 1 has no further sample for a second loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 2 and self.global_rank == 1:
            return loss
        return loss + self.head_step(2 * self.trunk(batch[0]), batch[1])


class LessBesideAccuracy(LessForTheHead):
    """It also calls the head itself, for a metric. No gradient comes back from there, so no rank meets another."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.correct = (self(batch[0]).argmax(1) == batch[1]).sum()
        return super().training_step(batch, batch_idx)


def _rank_1_calls_less(rank: int, net: type[StepNet]) -> list[str]:
    return errors_of(rank, [net], RuntimeError, timeout=timedelta(seconds=30), find_unused_parameters=True)


@pytest.mark.parametrize("net", [NothingForTheHead, LessForTheHead, LessBesideAccuracy])
def test_a_rank_that_goes_to_backward_without_a_call_of_the_others_is_named(net):
    (said,), _ = run_processes(2, _rank_1_calls_less, net)
    assert "made a call that the other has not" in said
    assert "'backward'" in said


class FeatureHook(StepNet):
    """Rank 0 looks at the gradient of the features. The other ranks do not know, and have no sum for it."""

    def head_step(self, features: Tensor, target: Tensor) -> Tensor:
        if self.global_rank == 0:
            features.register_hook(lambda gradient: None)
        return super().head_step(features, target)


class RetainedGradient(StepNet):
    def head_step(self, features: Tensor, target: Tensor) -> Tensor:
        loss = super().head_step(features, target)
        if self.global_rank == 0:
            features.retain_grad()
        return loss


class HookOfHead(NamedNet):
    """Rank 0 has a hook that sees whole logits, which the loss of the other ranks does not gather."""

    def on_train_start(self) -> None:
        if self.global_rank == 0:
            self.head.register_forward_hook(lambda module, args, output: None)


class Detached(HybridNet):
    """The trunk of rank 0 is not to learn from its batch."""

    def features_of(self, x: Tensor) -> Tensor:
        features = self.trunk(x)
        return features.detach() if self.global_rank == 0 else features

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.cost(self.head(self.features_of(batch[0])), batch[1])


class DetachedInStep(Detached, StepNet):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.head_step(self.features_of(batch[0]), batch[1])


ON_RANK_0: dict[type[HybridNet], str] = {
    FeatureHook: "So do hooks on the features in head_step, or on the head, that one rank alone has",
    RetainedGradient: "So do hooks on the features in head_step, or on the head, that one rank alone has",
    HookOfHead: "So do hooks on the features in head_step, or on the head, that one rank alone has",
    Detached: "the ranks pass different things to the head",
    DetachedInStep: "the ranks pass different things to the head",
}


def _on_rank_0(rank: int) -> list[str]:
    options = {"timeout": timedelta(seconds=10), "find_unused_parameters": True}
    return errors_of(rank, ON_RANK_0, (RuntimeError, ValueError), **options)


@pytest.mark.ci
def test_what_rank_0_alone_does_and_the_others_cannot_follow():
    for said in run_processes(2, _on_rank_0):
        for text, message in zip(said, ON_RANK_0.values(), strict=True):
            assert message in text


class GradientOfFeatures(StepNet):
    """Rank 0 takes a gradient of its own, and looks at that of the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[float] = []

    def head_step(self, features: Tensor, target: Tensor) -> Tensor:
        logits = self.head(features)
        if self.global_rank == 0 and logits.requires_grad:
            logits.retain_grad()
            logits.register_hook(lambda gradient: self.norms.append(gradient.norm().item()))
        return self.cost(logits, target)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        features = self.trunk(batch[0])
        loss = self.head_step(features, batch[1])
        if self.global_rank == 0:
            (gradient,) = torch.autograd.grad(loss, features, retain_graph=True)
            self.norms.append(gradient.norm().item())
        return loss


def _looking(rank: int) -> Any:
    # Lightning divides the loss before backward, and not before the gradient that rank 0 takes.
    options = {"accumulate_grad_batches": 2}
    strategies = [KrizhevskyHybridStrategy(timeout=timedelta(seconds=10)) for _ in range(2)]
    return [
        fit_with(batches(rank, 2), strategy, 2, net, options)
        for strategy, net in zip(strategies, (StepNet, GradientOfFeatures), strict=True)
    ]


@pytest.mark.ci
def test_what_rank_0_alone_may_look_at():
    for plain, looking in run_processes(2, _looking):
        for name, value in plain.items():
            assert torch.equal(looking[name], value), name
