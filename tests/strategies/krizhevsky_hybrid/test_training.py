"""Options of Lightning's training under hybrid parallelism: the same as in one process on the concatenated batch."""

from __future__ import annotations

import random
import warnings
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from lightning_fabric.utilities.warnings import PossibleUserWarning
from pytorch_lightning.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_dp import AdaptiveGlobalBatchNorm, KrizhevskyHybridStrategy
from tests.ranks import run_processes
from tests.strategies.krizhevsky_hybrid.modules import (
    HybridNet,
    NamedNet,
    Result,
    ScheduledNet,
    StepNet,
    all_batches,
    batches,
    fit_with,
)
from tests.strategies.modules import CLASSES, FEATURES, assert_same, optimizers, snapshot, trainer


class TwoRatesNet(StepNet):
    """The head in a parameter group of its own."""

    def configure_optimizers(self) -> Any:
        groups = [{"params": self.trunk.parameters()}, {"params": self.head.parameters(), "lr": 0.02}]
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=1e-2)


class ManualNet(StepNet):
    """Two optimizers, stepped by hand, with gradients of two batches."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [optimizers("momentum", self.trunk.parameters()), optimizers("adamw", self.head.parameters())]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(super().training_step(batch, batch_idx) / 2)
        if batch_idx % 2:
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()


class BatchNormNet(StepNet):
    """Batch norm in the trunk."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.trunk.insert(1, nn.BatchNorm1d(8).double())


class RecomputedHeadNet(HybridNet):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.head, self.trunk(x), use_reentrant=False)


class RecomputedNet(HybridNet):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class RecomputedStepNet(StepNet):
    def head_step(self, features: Tensor, target: Tensor) -> Tensor:
        return self.cost(checkpoint(self.head, features, use_reentrant=False), target)


class RecomputedAllNet(StepNet):
    """Trunk and ``head_step`` within one checkpoint."""

    reentrant = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, target = batch
        return checkpoint(lambda x: self.head_step(self.trunk(x), target), x, use_reentrant=self.reentrant)


class RecomputedReentrantNet(RecomputedAllNet):
    reentrant = True

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step((batch[0].requires_grad_(), batch[1]), batch_idx)


class SecondBackwardNet(ManualNet):
    """Two gradients through one call of the head."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, target = batch
        loss = self.loss_of(self.trunk(x), target)
        self.manual_backward(loss, retain_graph=True)
        self.manual_backward(loss / 4)
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()

    def loss_of(self, features: Tensor, target: Tensor) -> Tensor:
        return self.head_step(features, target)


class SecondBackwardOfHeadNet(SecondBackwardNet):
    def loss_of(self, features: Tensor, target: Tensor) -> Tensor:
        return self.cost(self.head(features), target)


class SecondLossNet(StepNet):
    """The head learns from another loss, whose graph is made when that of the first is freed."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.features, self.target = self.trunk(batch[0]), batch[1]
        return self.head_step(self.features, self.target)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(loss)
        self.head_step(-self.features.detach(), self.target).backward()


class CompiledLossNet(StepNet):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.compiled_cost = torch.compile(self.cost, backend="aot_eager")

    def head_step(self, features: Tensor, target: Tensor) -> Tensor:
        return self.compiled_cost(2 * self.head(features), target)


class CompiledStepNet(StepNet):
    """What calls `head_step` is compiled."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.compiled_step = torch.compile(super().training_step, backend="aot_eager")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.compiled_step(batch, batch_idx)


class CompiledForwardNet(HybridNet):
    """What calls the head is compiled, in training steps and where it is gathered."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.compiled_forward = torch.compile(super().forward, backend="aot_eager")

    def forward(self, x: Tensor) -> Tensor:
        return self.compiled_forward(x)

    def on_train_start(self) -> None:
        assert self(torch.zeros(2, FEATURES, dtype=torch.float64)).shape == (2, CLASSES)


def sequences(x: Tensor) -> Tensor:
    return torch.stack([x, 0.5 * x], dim=1)


class SequenceNet(HybridNet):
    """Features (N, T, D), as a model of sequences has them."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(sequences(batch[0]))
        return self.cost(logits.flatten(0, 1), batch[1].repeat_interleave(2))


class SequenceStepNet(StepNet):
    def head_step(self, features: Tensor, target: Tensor) -> Tensor:
        logits = self.head(features)
        assert logits.shape == (len(features), 2, CLASSES)
        return self.cost(logits.flatten(0, 1), target.flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.head_step(self.trunk(sequences(batch[0])), batch[1][:, None].expand(-1, 2))


class FrozenTrunkNet(StepNet):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.trunk.requires_grad_(False)


class InPlaceNet(StepNet):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.trunk[-1] = nn.Identity()  # tanh needs its output again
        self.head[0] = nn.Sequential(nn.Flatten(), nn.ReLU(inplace=True))  # in place on a view


class EvalNet(StepNet):
    """Lightning keeps the mode that a module has."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.eval()


class KeepsGradients(torch.optim.SGD):
    """Its gradients fade in place of being set to zero."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(0.5)


class FadingGradientsNet(StepNet):
    def configure_optimizers(self) -> Any:
        return KeepsGradients(self.parameters(), lr=0.1)


class OwnOptimizerNet(StepNet):
    """Lightning does not know the head's optimizer, which steps with gradients of three batches."""

    def configure_optimizers(self) -> Any:
        self.of_head = torch.optim.SGD(self.head.parameters(), lr=0.1)
        return torch.optim.SGD(self.trunk.parameters(), lr=0.1)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % 3 == 2:
            self.of_head.step()
            self.of_head.zero_grad()


class BuiltEarlyNet(StepNet):
    """Its optimizer is built before `fit`, with a state of the whole head."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.optimizer = torch.optim.Adagrad(self.parameters(), lr=0.1)

    def configure_optimizers(self) -> Any:
        return self.optimizer


CASES: dict[str, tuple[type[HybridNet], dict[str, Any]]] = {
    "clip by norm": (StepNet, {"gradient_clip_val": 0.05}),
    "clip by norm, head only": (HybridNet, {"gradient_clip_val": 0.05}),
    "clip by value": (StepNet, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "accumulation": (StepNet, {"accumulate_grad_batches": 3}),
    "an optimizer that keeps old gradients": (FadingGradientsNet, {}),
    "an optimizer of the head that Lightning does not know": (OwnOptimizerNet, {}),
    "accumulation, head only": (HybridNet, {"accumulate_grad_batches": 3}),
    "schedule": (ScheduledNet, {}),
    "two rates": (TwoRatesNet, {"gradient_clip_val": 0.05}),
    "manual": (ManualNet, {}),
    "recomputed head": (RecomputedHeadNet, {"gradient_clip_val": 0.05}),
    "recomputed net": (RecomputedNet, {"gradient_clip_val": 0.05}),
    "recomputed head in head_step": (RecomputedStepNet, {"gradient_clip_val": 0.05}),
    "recomputed trunk and head_step": (RecomputedAllNet, {"gradient_clip_val": 0.05}),
    "recomputed trunk and head_step, reentrant": (RecomputedReentrantNet, {"gradient_clip_val": 0.05}),
    "two gradients of one loss": (SecondBackwardNet, {}),
    "two gradients through one call": (SecondBackwardOfHeadNet, {}),
    "a second loss in backward": (SecondLossNet, {}),
    "compiled loss": (CompiledLossNet, {}),
    "compiled step": (CompiledStepNet, {"gradient_clip_val": 0.05}),
    "compiled forward": (CompiledForwardNet, {"gradient_clip_val": 0.05}),
    "named loss": (NamedNet, {"gradient_clip_val": 0.05}),
    "sequences": (SequenceStepNet, {"gradient_clip_val": 0.05}),
    "sequences, head only": (SequenceNet, {"gradient_clip_val": 0.05}),
    "frozen trunk": (FrozenTrunkNet, {}),
    "in place": (InPlaceNet, {}),
    "optimizer built early": (BuiltEarlyNet, {}),
    "eval": (EvalNet, {"gradient_clip_val": 0.05}),
    "bf16": (StepNet, {"precision": "bf16-mixed"}),
}


def _cases(rank: int, names: list[str]) -> dict[str, Result]:
    warnings.filterwarnings("ignore", "Found .* in eval mode")
    return {name: fit_with(batches(rank, 2), KrizhevskyHybridStrategy(scheme="c"), 2, *CASES[name]) for name in names}


def assert_close_in_16_bits(actual: Result, expected: Result) -> None:
    assert actual.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], rtol=0.02, atol=0.005)


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore:Found .* in eval mode")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch.compile's own
@pytest.mark.parametrize(
    "names",
    [
        pytest.param([name for name in CASES if "compiled" not in name], id="plain"),
        pytest.param([name for name in CASES if "compiled" in name], id="compiled", marks=pytest.mark.slow),
    ],
)
def test_each_equals_one_process(names):
    of_ranks = run_processes(2, _cases, names, timeout=600)
    plain = fit_with(all_batches(2), "auto", 1, StepNet, {})
    for name in names:
        expected = fit_with(all_batches(2), "auto", 1, *CASES[name])
        for of_rank in of_ranks:
            if name == "bf16":
                assert_close_in_16_bits(of_rank[name], expected)
            else:
                assert_same(of_rank[name], expected, 1e-9)
        with pytest.raises(AssertionError):  # the option does something
            assert_same({k: expected[k].double() for k in plain if k in expected}, plain, 1e-9)


def _clip_in_sub_passes(rank: int) -> Result:
    module = StepNet()
    strategy = KrizhevskyHybridStrategy(scheme="c", variable_batch=True)
    trainer(strategy, 2, use_distributed_sampler=False, gradient_clip_val=0.05).fit(module, batches(rank, 2))
    return {name: p.detach() for name, p in module.named_parameters()}


@pytest.mark.ci
def test_variable_batch_clips_each_update_by_the_norm_of_what_it_updates():
    from tests.strategies.krizhevsky_hybrid.test_strategy import variable_batch_loop

    expected = {name: p.detach() for name, p in variable_batch_loop("c", 2, "momentum", clip=0.05).named_parameters()}
    for result in run_processes(2, _clip_in_sub_passes):
        assert_same(result, expected, 1e-9)


class OverflowNet(StepNet):
    """In steps 1 and 4 the last rank's slice of the first layer overflows: the trunk's gradients do not show it."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.overflows = batch_idx in (1, 4) and self.trainer.global_rank == 1
        return super().training_step(batch, batch_idx)

    def on_after_backward(self) -> None:
        if self.overflows:
            self.head[1].bias.grad.fill_(torch.inf)


class FusedOverflowNet(OverflowNet):
    """Its optimizer divides the gradients by the scale itself, and skips the step."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, fused=True)


def _half() -> MixedPrecision:
    # Lightning has no fp16 on CPU of its own, but the plugin works there.
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**10))


def _fp16(rank: int) -> list[tuple[Result, float]]:
    results = []
    for net in (OverflowNet, FusedOverflowNet, StepNet, HybridNet):
        plugin = _half()
        result = fit_with(batches(rank, 2), KrizhevskyHybridStrategy(scheme="c"), 2, net, {"plugins": [plugin]})
        results.append((result, plugin.scaler.get_scale()))
        assert type(plugin.scaler) is torch.amp.GradScaler
    return results


@pytest.mark.ci
def test_fp16_skips_a_step_on_all_ranks_where_one_slice_overflows():
    first, second = run_processes(2, _fp16)
    expected = fit_with(all_batches(2), "auto", 1, StepNet, {"precision": "bf16-mixed"})
    for (ours, scale), (others, other_scale), num_skipped in zip(first, second, (2, 2, 0, 0), strict=True):
        assert scale == other_scale == 2.0 ** (10 - num_skipped)
        assert_same(ours, others, 0.0)
        assert all(value.isfinite().all() for value in ours.values())
        if not num_skipped:
            assert_close_in_16_bits(ours, expected)


def _dropout(rank: int, net: type[HybridNet]) -> list[Result]:
    results = []
    for seed in (1, 1, 2):
        module = net(dropout=0.5)
        pl.seed_everything(seed, verbose=False)
        runner = trainer(KrizhevskyHybridStrategy(scheme="c"), 2, use_distributed_sampler=False)
        runner.fit(module, batches(rank, 2))
        results.append(snapshot(module, runner))
    return results


def _unscaled(rank: int) -> bool:
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", enabled=False))
    fit_with(batches(rank, 2), KrizhevskyHybridStrategy(), 2, StepNet, {"plugins": [plugin]})
    return plugin.scaler.is_enabled()


def test_a_scaler_that_is_switched_off_stays_so():
    assert run_processes(2, _unscaled) == [False, False]


NETS = [pytest.param(HybridNet, marks=pytest.mark.slow), StepNet]


@pytest.mark.ci
@pytest.mark.parametrize("net", NETS, ids=lambda net: net.__name__)
def test_seeds_make_dropout_reproducible(net):
    first, second = run_processes(2, _dropout, net)
    assert_same(first[0], first[1], 0.0)
    assert_same(first[0], second[0], 0.0)
    with pytest.raises(AssertionError):
        assert_same(first[0], first[2])


def _batch_norm(rank: int) -> tuple[Result, dict[str, Tensor]]:
    warnings.simplefilter("ignore", PossibleUserWarning)  # advice on logging
    module = BatchNormNet()
    callback = AdaptiveGlobalBatchNorm(global_phase="always")
    runner = trainer(KrizhevskyHybridStrategy(scheme="c"), 2, use_distributed_sampler=False, callbacks=[callback])
    runner.fit(module, batches(rank, 2))
    assert not getattr(module, "_ddp_params_and_buffers_to_ignore", None)
    return snapshot(module, runner), dict(module.state_dict())


@pytest.mark.ci
def test_global_batch_norm_in_the_trunk():
    module = BatchNormNet()
    runner = trainer("auto", 1)
    runner.fit(module, all_batches(2))
    for result, state in run_processes(2, _batch_norm):
        assert_same(result, snapshot(module, runner), 1e-9)
        assert_same(state, dict(module.state_dict()), 1e-9)


class NormedFeaturesNet(StepNet):
    """Batch norm in ``head_step``, where each rank has the samples of all."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.norm = nn.BatchNorm1d(6, affine=False).double()

    def head_step(self, features: Tensor, target: Tensor) -> Tensor:
        return super().head_step(self.norm(features), target)


def _norm_in_head_step(rank: int) -> dict[str, Tensor]:
    warnings.simplefilter("ignore", PossibleUserWarning)  # advice on logging
    module, callback = NormedFeaturesNet(), AdaptiveGlobalBatchNorm(global_phase="always")
    trainer(KrizhevskyHybridStrategy(), 2, use_distributed_sampler=False, callbacks=[callback]).fit(
        module, batches(rank, 2)
    )
    return dict(module.state_dict())


@pytest.mark.ci
def test_global_batch_norm_in_head_step_counts_each_sample_once():
    module = NormedFeaturesNet()
    trainer("auto", 1).fit(module, all_batches(2))
    for state in run_processes(2, _norm_in_head_step):
        assert_same(state, dict(module.state_dict()), 1e-10)


class RandomNet(StepNet):
    """Its cost draws random numbers, and calls the head twice."""

    def head_step(self, features: Tensor, target: Tensor) -> Tensor:
        self.drawn = torch.tensor([*torch.rand(3), np.random.rand(), random.random()])
        first, second = (self.head(features).clone() for _ in range(2))
        assert not torch.equal(first, second)
        return self.cost(self.head(features), target)


def _random(rank: int) -> Tensor:
    module = RandomNet(dropout=0.5)
    for seed in (torch.manual_seed, np.random.seed, random.seed):  # the ranks' own generators are not alike
        seed(rank)
    trainer(KrizhevskyHybridStrategy(scheme="c"), 2, use_distributed_sampler=False).fit(module, batches(rank, 2))
    assert random.random() == random.Random(rank).random()  # and go on as if nothing had been drawn
    assert np.random.rand() == np.random.RandomState(rank).rand()
    return module.drawn


@pytest.mark.ci
def test_ranks_draw_the_same_within_head_step():
    first, second = run_processes(2, _random)
    assert torch.equal(first, second)
