"""What modules do in their steps ends as under DDP: manual optimization, unused parameters, precision, compilation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pytorch_lightning.plugins import MixedPrecision
from pytorch_lightning.strategies import DDPStrategy
from torch import nn

from lightning_dp.strategies import LayeredSGDStrategy
from tests.ranks import run_processes
from tests.strategies.layered_sgd.modules import OVERLAPS, Unused, fit, layered
from tests.strategies.modules import Net, assert_same, snapshot


class ManualAccumulation(Net):
    """Every backward is synchronized, every third is followed by a step; DDP rebuilds its buckets after the first."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch) / 3)
        if batch_idx % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()


def compare_manual_accumulation(rank):
    expected = snapshot(*fit(DDPStrategy(), 2, ManualAccumulation()))
    for overlap in OVERLAPS:
        assert_same(snapshot(*fit(layered(overlap=overlap), 2, ManualAccumulation())), expected)


@pytest.mark.ci
def test_manual_accumulation():
    run_processes(2, compare_manual_accumulation)


class SparseNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 2, sparse=True)


def fit_sparse(rank):
    with pytest.raises(ValueError, match="cannot sum the sparse gradients of 'table'"):
        fit(layered(), 2, SparseNet())


def test_sparse_gradients_are_refused():
    run_processes(2, fit_sparse)


class Manual(Net):
    """Two optimizers, each with its own loss and backward, the second looking at what the first has changed."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.norms: list[float] = []

    def configure_optimizers(self) -> Any:
        return (
            torch.optim.SGD(self.first.parameters(), lr=0.1, momentum=0.9),
            torch.optim.AdamW([*self.shared.parameters(), *self.last.parameters()], lr=0.01),
        )

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        loss = self.loss(batch)
        first.zero_grad()
        self.manual_backward(loss)
        self.norms.append(self.first.weight.grad.norm().item())
        first.step()
        loss = self.loss(batch) + 0.01 * self.first.weight.square().sum()
        second.zero_grad()
        self.manual_backward(loss)
        second.step()
        self.norms.append(self.first.bias.abs().sum().item())


def compare_manual(rank):
    module, t = fit(DDPStrategy(find_unused_parameters=True), 2, Manual())
    expected, norms = snapshot(module, t), module.norms
    for overlap in OVERLAPS:
        module, t = fit(layered(overlap=overlap, find_unused_parameters=True), 2, Manual())
        assert_same(snapshot(module, t), expected)
        torch.testing.assert_close(module.norms, norms, rtol=1e-10, atol=0)


@pytest.mark.ci
def test_manual_optimization_with_two_optimizers():
    run_processes(2, compare_manual)


def compare_unused(rank):
    expected = snapshot(*fit(DDPStrategy(find_unused_parameters=True), 2, Unused()))
    for overlap in OVERLAPS:
        assert_same(snapshot(*fit(layered(overlap=overlap, find_unused_parameters=True), 2, Unused())), expected)


@pytest.mark.ci
def test_unused_parameters():
    run_processes(2, compare_unused)


class EarlyReader(Net):
    """Uses the last layer's weight before the first layer's forward, and a weight outside its own layer's forward."""

    def training_step(self, batch, batch_idx):
        penalty = sum(p.square().sum() for p in reversed(list(self.parameters())))
        return super().training_step(batch, batch_idx) + 1e-3 * penalty

    def forward(self, x):
        return super().forward(x) + torch.tanh(x) @ self.first.weight.T @ self.last.weight.data.T


def compare_early_reader(rank):
    expected = snapshot(*fit(DDPStrategy(), 2, EarlyReader()))
    assert_same(snapshot(*fit(layered(), 2, EarlyReader())), expected)


def test_parameters_used_out_of_order_are_up_to_date():
    run_processes(2, compare_early_reader)


def compare_precision(rank, precision):
    def plugin():
        # Lightning has no fp16 on CPU of its own, but the plugin works there.
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=5) if precision == "16-mixed" else None
        return MixedPrecision(precision, "cpu", scaler)

    ends = [
        snapshot(*fit(strategy, 2, Net().float(), plugins=[plugin()], **clip))
        for clip in ({}, {"gradient_clip_val": 0.1})
        for strategy in (DDPStrategy(), layered(), layered(overlap="load"))
    ]
    for expected, *got in (ends[:3], ends[3:]):
        for each in got:
            assert_same(each, expected, rtol=1e-5)


@pytest.mark.ci
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_mixed_precision(precision):
    run_processes(2, compare_precision, precision)


def compare_in_float32(rank):
    expected = snapshot(*fit(DDPStrategy(), 4, Net().float()))
    for overlap in OVERLAPS:
        assert_same(snapshot(*fit(layered(2, overlap=overlap), 4, Net().float())), expected, rtol=1e-5)


@pytest.mark.ci
def test_in_float32_equals_ddp_to_the_rounding_of_another_order():
    run_processes(4, compare_in_float32)


def compare_compiled(rank):
    expected = snapshot(*fit(DDPStrategy(), 2, max_steps=6))
    for overlap in OVERLAPS:
        module = Net()
        module.shared.compile(backend="eager")
        # Not `layered`: a compiled module under DDP wants its first bucket smaller than the others.
        got, t = fit(LayeredSGDStrategy(1, overlap=overlap), 2, module, max_steps=6)
        assert_same(snapshot(got, t), expected)


@pytest.mark.slow
def test_compiled_parts():
    run_processes(2, compare_compiled)
