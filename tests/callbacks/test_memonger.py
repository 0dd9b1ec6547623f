"""`Memonger` with each strategy: bitwise the training without it, and nothing is left behind."""

from __future__ import annotations

import os
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp import AdaptiveGlobalBatchNorm, KrizhevskyHybridStrategy, LayeredSGDStrategy, Memonger
from lightning_dp.layers import NoEffectWarning, batch_statistics
from lightning_dp.recompute import apply_recompute
from tests.callbacks.training import fit
from tests.ranks import run_processes
from tests.recompute.counting import OperatorCounts, differing, recomputed, state_of
from tests.recompute.models import residual

STEPS = 4


class Net(pl.LightningModule):
    """Batch norm, dropout, a frozen part, and a head that can be sharded."""

    def __init__(self, manual: bool = False) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.trunk = residual(num_blocks=3)[:-1]
        self.trunk[1][0].conv2.requires_grad_(False)
        self.head = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 5))
        self.automatic_optimization = not manual

    def loss(self, batch: list[Tensor]) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.head(F.dropout(self.trunk(x), 0.2)), y)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        parameters = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, foreach=False)


class Recorder(pl.Callback):
    """Counts operators of each backward pass, and takes the state of the last step with its gradients."""

    def __init__(self) -> None:
        self.operators = OperatorCounts()
        self.state: dict[str, Tensor] = {}

    # Two hooks of Lightning's are all that there is around backward, so the mode cannot be entered by `with`.
    def on_before_backward(self, *_: Any) -> None:
        self.operators.__enter__()

    def on_after_backward(self, *_: Any) -> None:
        self.operators.__exit__(None, None, None)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        self.state = state_of(pl_module)


def loader(steps: int = STEPS) -> DataLoader:
    generator = torch.Generator().manual_seed(int(os.environ.get("RANK", 0)))
    x = torch.randn(4 * steps, 3, 12, 12, generator=generator)
    return DataLoader(TensorDataset(x, torch.randint(5, (4 * steps,), generator=generator)), batch_size=4)


STRATEGIES: dict[str, Any] = {
    "ddp": lambda: "ddp",
    "layered": lambda: LayeredSGDStrategy(group_size=1),
    "layered load": lambda: LayeredSGDStrategy(group_size=1, overlap="load"),
    "hybrid": lambda: KrizhevskyHybridStrategy(),
    "alone": lambda: "auto",
}


def trained(world_size: int, case: str, policy: str | None, agbn: bool = False, manual: bool = False, **options: Any):
    callbacks: list[pl.Callback] = [] if policy is None else [Memonger(policy)]
    if agbn:
        callbacks.insert(0, AdaptiveGlobalBatchNorm(global_phase="always"))
    recorder = Recorder()
    net = Net(manual)
    torch.manual_seed(11 + int(os.environ.get("RANK", 0)))
    fit(world_size, *callbacks, recorder, net=net, loader=loader(), strategy=STRATEGIES[case](), **options)
    assert "training_step" not in vars(net)
    return recorder


def compare(rank: int, world_size: int, case: str, options: dict[str, Any]) -> list[Any]:
    """Train with each policy and without, and return what differs, with the operators that ran twice."""
    calls = 0
    gather = batch_statistics.small_all_gather

    def counted(*args: Any) -> Tensor:
        nonlocal calls
        calls += 1
        return gather(*args)

    batch_statistics.small_all_gather = counted
    plain = trained(world_size, case, None, **options)
    expected_calls, found = calls, []
    for policy in ("cheap", "sublinear"):
        calls = 0
        recorder = trained(world_size, case, policy, **options)
        counts = recomputed(plain.operators.counts, recorder.operators.counts)
        found.append((differing(recorder.state, plain.state), counts["native_batch_norm"] / STEPS, calls))
    batch_statistics.small_all_gather = gather
    return [expected_calls, *found]


CASES = [
    ("ddp", {}),
    ("ddp", {"agbn": True}),
    ("ddp", {"precision": "bf16-mixed", "accumulate_grad_batches": 2}),
    ("layered", {}),
    ("layered", {"agbn": True}),
    ("layered load", {}),
    ("layered", {"manual": True}),
    ("hybrid", {"agbn": True}),
]


@pytest.mark.ci
@pytest.mark.parametrize(("case", "options"), CASES, ids=lambda value: str(value))
def test_two_ranks_train_bitwise_as_without(case, options):
    for calls, *found in run_processes(2, compare, 2, case, options):
        for differences, num_batch_norms, num_calls in found:
            assert differences == []
            # Of the 7 batch norms of a step: each at least once, without the last, whose result is small.
            assert num_batch_norms >= 6
            assert num_calls == calls == (2 * 7 * STEPS if options.get("agbn") else 0)


def test_one_process_trains_bitwise_as_without_and_manual_optimization_too():
    for options in ({}, {"manual": True}):
        plain = trained(1, "alone", None, **options)
        recorder = trained(1, "alone", "cheap", **options)
        assert differing(recorder.state, plain.state) == []


def test_a_budget_is_planned_from_the_second_step_and_kept():
    pytest.importorskip("scipy")
    plain = trained(1, "alone", None)
    memonger = Memonger("budget", budget_bytes=60_000)
    recorder = Recorder()
    net = Net()
    torch.manual_seed(11)
    fit(1, memonger, recorder, net=net, loader=loader(), strategy="auto")
    assert differing(recorder.state, plain.state) == []
    assert memonger.plan.peak_bytes <= 60_000 < memonger.plan.plain_bytes
    assert 0 < memonger.plan.recompute_s < memonger.plan.forward_s
    # The plan, given as a policy, is the same from the first step on.
    recorder = Recorder()
    net = Net()
    torch.manual_seed(11)
    fit(1, Memonger(memonger.plan), recorder, net=net, loader=loader(), strategy="auto")
    assert differing(recorder.state, plain.state) == []
    assert recomputed(plain.operators.counts, recorder.operators.counts)


class Fails(pl.Callback):
    def on_train_batch_end(self, *_: Any) -> None:
        raise KeyError("on purpose")


def test_the_module_is_plain_again_after_an_exception():
    net = Net()
    with pytest.raises(KeyError, match="on purpose"):
        fit(1, Memonger(), Fails(), net=net, loader=loader(2), strategy="auto")
    assert "training_step" not in vars(net)


class Unfreezing(pl.Callback):
    """As Lightning's BackboneFinetuning; it notes what is planned."""

    def __init__(self) -> None:
        self.plans: list[tuple[int, int]] = []

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for part in (pl_module.trunk[0], pl_module.trunk[1][:2]):
            part.requires_grad_(False)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        plans = [callback.plan for callback in trainer.callbacks if isinstance(callback, Memonger)]
        self.plans += [(plan.plain_bytes, plan.peak_bytes) for plan in plans if plan is not None]
        if trainer.global_step == 4:
            pl_module.trunk.requires_grad_(True)


class AllParameters(Net):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, foreach=False)


def test_a_budget_is_planned_anew_when_a_part_is_unfrozen():
    pytest.importorskip("scipy")
    states = []
    for callbacks in ([], [Memonger("budget", budget_bytes=60_000)]):
        recorder, unfreezing, net = Recorder(), Unfreezing(), AllParameters()
        torch.manual_seed(11)
        fit(1, unfreezing, *callbacks, recorder, net=net, loader=loader(8), strategy="auto")
        states.append(recorder.state)
    assert differing(*states) == []
    frozen, whole = unfreezing.plans[0], unfreezing.plans[-1]
    assert frozen[0] < 60_000 < whole[0], "without recomputation"
    assert whole[1] <= 60_000


class Swapping(Unfreezing):
    """Trains the first layer from the fifth step on, and the head, which has more parameters, no longer."""

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        super().on_train_batch_start(trainer, pl_module)
        if trainer.global_step == 4:
            pl_module.requires_grad_(False)
            pl_module.trunk[0].requires_grad_(True)


def test_a_budget_is_planned_anew_when_other_parts_are_trained():
    pytest.importorskip("scipy")
    swapping, net = Swapping(), AllParameters()
    fit(1, swapping, Memonger("budget", budget_bytes=60_000), net=net, loader=loader(8), strategy="auto")
    frozen, whole = swapping.plans[0], swapping.plans[-1]
    assert frozen[0] < 60_000 < whole[0], "without recomputation"
    assert whole[1] <= 60_000


class Alternating(Net):
    """Trains two models in turn, as a coder and the prior of its codes."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Sequential(nn.Flatten(), nn.Linear(432, 64), nn.ReLU(), nn.LayerNorm(64), nn.Linear(64, 5))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.other(x), y) if batch_idx % 2 else self.loss(batch)


def test_a_plan_stays_when_the_next_step_runs_other_parts_than_the_measured_one():
    pytest.importorskip("scipy")
    plain, recorder = Recorder(), Recorder()
    for callbacks in ([plain], [Memonger("budget", budget_bytes=60_000), recorder]):
        torch.manual_seed(11)
        fit(1, *callbacks, net=Alternating(), loader=loader(6), strategy="auto")
    assert differing(recorder.state, plain.state) == []


class FailsInSecondStep(pl.Callback):
    def on_before_backward(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 1:
            raise MemoryError("as with too large a batch")


def test_a_fit_after_one_that_failed_in_the_measured_step_plans_anew():
    """The failed fit has measured a batch for which the budget is too small."""
    pytest.importorskip("scipy")
    memonger = Memonger("budget", budget_bytes=60_000)
    large = DataLoader(TensorDataset(torch.randn(128, 3, 12, 12), torch.randint(5, (128,))), batch_size=64)
    with pytest.raises(MemoryError, match="as with too large a batch"):
        fit(1, memonger, FailsInSecondStep(), net=Net(), loader=large, strategy="auto")
    fit(1, memonger, net=Net(), loader=loader(), strategy="auto")
    assert memonger.plan.peak_bytes <= 60_000


def test_a_module_without_anything_to_recompute_is_warned_of():
    class Linear(Net):
        def loss(self, batch: list[Tensor]) -> Tensor:
            return self.head[3](batch[0].flatten(1)[:, :16]).square().mean()

    with pytest.warns(NoEffectWarning, match=r"Memonger\(policy='cheap'\) found nothing to recompute"):
        fit(1, Memonger(), net=Linear(), loader=loader(2), strategy="auto")


def test_a_first_step_that_is_left_out_does_not_tell_what_can_be_recomputed(recwarn):
    """As long as a replay buffer is not full, say."""

    class Collects(Net):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
            return super().training_step(batch, batch_idx) if batch_idx else None

    fit(1, Memonger(), net=Collects(), loader=loader(2), strategy="auto")
    assert not [warning for warning in recwarn if warning.category is NoEffectWarning]


class WithHeadStep(Net):
    def head_step(self, features: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.head(features), target)

    def loss(self, batch: list[Tensor]) -> Tensor:
        return self.head_step(self.trunk(batch[0]), batch[1])


def update_within_step(rank: int) -> str:
    strategy = KrizhevskyHybridStrategy(variable_batch=True)
    with pytest.raises(ValueError) as error:  # noqa: PT011  the caller looks at what it says
        fit(1, Memonger(), net=WithHeadStep(), loader=loader(2), strategy=strategy)
    return str(error.value)


def test_updates_within_the_training_step_are_refused_by_name():
    """What backward computes again would be computed from weights that have been updated since."""
    (text,) = run_processes(1, update_within_step)
    assert "with variable_batch=True updates the head within the training step" in text
    assert "use variable_batch=False, or remove Memonger" in text


def test_what_cannot_work_is_refused_by_name():
    with pytest.raises(ValueError, match="budget_bytes=1000 is less than"):
        fit(1, Memonger("budget", 1000), net=Net(), loader=loader(4), strategy="auto")
    with pytest.raises(ValueError, match=r"either torch\.compile or Memonger"):
        pl.Trainer(accelerator="cpu", callbacks=[Memonger()], max_epochs=1, logger=False, barebones=True).fit(
            torch.compile(Net(), backend="eager"), loader(2)
        )
    net = Net()
    net.trunk.compile(backend="eager")
    with pytest.raises(ValueError, match="'trunk', a Sequential, is compiled"):
        fit(1, Memonger(), net=net, loader=loader(2), strategy="auto")
    net = Net()
    apply_recompute(net.trunk)
    with pytest.raises(ValueError, match="'trunk', a Sequential, recomputes already"):
        fit(1, Memonger(), net=net, loader=loader(2), strategy="auto")
