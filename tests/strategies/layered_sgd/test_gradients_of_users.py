"""Gradients stay until somebody zeroes them. Each module is fitted under DDP and under both overlaps."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.ranks import run_cases
from tests.strategies.layered_sgd.user_cases import Case, Manual, compare_on_a_slow_network
from tests.strategies.modules import Net


class NeverZeroed(Manual):
    def training_step(self, batch, batch_idx):
        self.manual_backward(self.loss(batch))
        self.optimizers().step()


class ZeroedEverySecond(Manual):
    def training_step(self, batch, batch_idx):
        self.manual_backward(self.loss(batch))
        self.optimizers().step()
        if batch_idx % 2:
            self.optimizers().zero_grad()


class ZeroedFirst(Manual):
    def training_step(self, batch, batch_idx):
        self.optimizers().zero_grad()
        self.manual_backward(self.loss(batch))
        self.optimizers().step()


class TwoStepsOnOneGradient(Manual):
    def training_step(self, batch, batch_idx):
        self.optimizers().zero_grad()
        self.manual_backward(self.loss(batch))
        self.optimizers().step()
        self.optimizers().step()


class TwoOptimizersOverTheSameParameters(Manual):
    def configure_optimizers(self):
        parameters = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9), torch.optim.AdamW(parameters, lr=0.01)

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        self.manual_backward(self.loss(batch))
        first.step()
        second.step()
        first.zero_grad()


class ZeroGradOverriddenToNothing(Net):
    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        pass


class ChangesGradientsAfterTheStep(Manual):
    def training_step(self, batch, batch_idx):
        self.manual_backward(self.loss(batch))
        self.optimizers().step()
        for parameter in self.first.parameters():
            parameter.grad.mul_(0.5)  # what is left of them goes into the next step


class KeepsGradients(Manual):
    """Adds the gradients of two batches, without copies of them."""

    def training_step(self, batch, batch_idx):
        self.manual_backward(super().training_step(batch, batch_idx))
        kept = [parameter.grad for parameter in self.parameters()]
        self.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx).square())
        for parameter, gradient in zip(self.parameters(), kept, strict=True):
            if gradient is not None:
                parameter.grad = parameter.grad + gradient
        self.optimizers().step()
        self.zero_grad()


class ReplacesGradientData(Net):
    """Filters gradients, as Grokfast does."""

    def on_after_backward(self):
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.data = 0.5 * parameter.grad.data


class ReadsGradientsInInferenceMode(Net):
    """A norm for a log, before gradients are clipped in place."""

    @torch.inference_mode()
    def on_after_backward(self):
        self.norm = sum(float(p.grad.norm()) for p in self.parameters() if p.grad is not None)


class ZeroesAccumulator(Manual):
    """Steps with a buffer in the gradient's place, and zeroes the buffer after the step."""

    def on_train_start(self) -> None:
        self.sums = {p: torch.zeros_like(p) for p in self.parameters() if p.requires_grad}

    def training_step(self, batch, batch_idx):
        self.manual_backward(super().training_step(batch, batch_idx))
        for parameter, gradient_sum in self.sums.items():
            gradient_sum += parameter.grad
            parameter.grad = gradient_sum
        if batch_idx % 2:
            self.optimizers().step()
            torch._foreach_zero_(list(self.sums.values()))
        self.zero_grad()


class OwnBackward(Manual):
    """Steps on every second batch. Each has a backward of its own, as for adversarial inputs, past Lightning."""

    def training_step(self, batch, batch_idx):
        self.manual_backward(super().training_step(batch, batch_idx))
        if batch_idx % 2:
            self.optimizers().step()
            self.zero_grad()
        else:
            self(batch[0]).square().mean().backward(inputs=list(self.last.parameters()))


class TwoLossesOnOneGraph(Manual):
    """The second backward runs through a graph that was built before the first step was staged."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.first.parameters(), lr=0.1), torch.optim.SGD(self.last.parameters(), lr=0.1)

    def training_step(self, batch, batch_idx):
        first, last = self.optimizers()
        loss = self.loss(batch)
        penalty = self.first.bias.sum() + self.last.bias.sum()  # linear: nothing is saved that a step changes
        first.zero_grad()
        last.zero_grad()
        self.manual_backward(loss)
        first.step()
        self.manual_backward(0.1 * penalty)  # makes a node of the graph while the first step's update is pending
        last.step()


class ChangesSavedTensors(TwoLossesOnOneGraph):
    """Backward of the second loss reads weights that the first step has changed, and gets them as they were."""

    def training_step(self, batch, batch_idx):
        first, last = self.optimizers()
        with torch.autograd.graph.allow_mutation_on_saved_tensors():
            x = torch.tanh(self.first(batch[0]))
            logits = self.last(x)
            last.zero_grad()
            self.manual_backward(F.cross_entropy(logits, batch[1]), retain_graph=True)
            last.step()
            first.zero_grad()
            self.manual_backward(logits.square().mean())
            first.step()


CASES: dict[str, Case] = {
    "gradients are never zeroed": (NeverZeroed, (), {}),
    "zeroed every second batch": (ZeroedEverySecond, (), {}),
    "zeroed before backward": (ZeroedFirst, (), {}),
    "two steps on one gradient": (TwoStepsOnOneGradient, (), {}),
    "two optimizers over the same parameters": (TwoOptimizersOverTheSameParameters, (), {}),
    "zero_grad overridden to nothing": (ZeroGradOverriddenToNothing, (), {}),
    "gradients changed after the step": (ChangesGradientsAfterTheStep, (), {}),
    "gradients are kept": (KeepsGradients, (), {}),
    "the gradients' data is replaced": (ReplacesGradientData, (), {}),
    "read in inference mode": (ReadsGradientsInInferenceMode, (), {"gradient_clip_val": 0.1}),
    "an accumulator that is zeroed": (ZeroesAccumulator, (), {}),
    "a backward of one's own": (OwnBackward, (), {}),
    "saved tensors that change": (ChangesSavedTensors, (), {"ddp": {"find_unused_parameters": True}}),
    "two losses on one graph": (TwoLossesOnOneGraph, (), {"ddp": {"find_unused_parameters": True}}),
}  # fmt: skip


def compare_case(rank, name):
    compare_on_a_slow_network(CASES[name])


@pytest.mark.ci
def test_equals_ddp():
    run_cases(2, compare_case, CASES)
