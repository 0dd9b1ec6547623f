"""Optimizers of all kinds, their hooks and their state. Each case is fitted under DDP and under both overlaps."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import StochasticWeightAveraging
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tests.ranks import run_cases
from tests.strategies.layered_sgd.user_cases import Case, compare_on_a_slow_network
from tests.strategies.modules import Net


class SAM(torch.optim.SGD):
    """Sharpness-aware minimization: calls its closure twice."""

    @torch.no_grad()
    def step(self, closure=None):
        with torch.enable_grad():
            loss = closure()
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        moves = [p.grad * (0.05 / norm) for p in parameters]
        for parameter, move in zip(parameters, moves, strict=True):
            parameter.add_(move)
        with torch.enable_grad():
            closure()
        for parameter, move in zip(parameters, moves, strict=True):
            parameter.sub_(move)
        super().step()
        return loss


class WithSAM(Net):
    def configure_optimizers(self):
        return SAM([p for p in self.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


class OwnAttribute(torch.optim.SGD):
    factor = 1.0

    @torch.no_grad()
    def step(self, closure=None):
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(self.factor)
        super().step()
        return loss


class WithOwnAttribute(Net):
    def configure_optimizers(self):
        return OwnAttribute([p for p in self.parameters() if p.requires_grad], lr=0.1)

    def on_train_batch_end(self, *_: Any) -> None:
        self.trainer.optimizers[0].factor *= 0.8


class TensorRate(Net):
    def configure_optimizers(self):
        self.rate = torch.tensor(0.1, dtype=torch.float64)
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=self.rate, momentum=0.9)

    def on_train_batch_end(self, *_: Any) -> None:
        self.rate.mul_(0.7)


class PatchedStep(Net):
    """Clips in a step that was replaced on the instance, under a schedule that patches it again."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)
        step = optimizer.step.__func__

        def clipped(self, closure=None):
            loss = closure()
            nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.05)
            step(self)
            return loss

        optimizer.step = clipped.__get__(optimizer)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def clamping(step, module):
    """Clamp the weights after each step, as a Wasserstein GAN does. It has the name and the marks of ``step``."""

    @functools.wraps(step)
    def clamped(*args, **kwargs):
        result = step(*args, **kwargs)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.clamp_(-0.2, 0.2)
        return result

    return clamped


class WrappedStep(Net):
    """Wraps the step after the schedule has wrapped it."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
        optimizer.step = clamping(optimizer.step, self)
        return [optimizer], [scheduler]


class WrapsTheClass(pl.Callback):
    """Wraps the step of all optimizers of the class, as tools that instrument a program do."""

    def on_train_start(self, trainer, pl_module):
        self._step = torch.optim.SGD.step
        torch.optim.SGD.step = clamping(self._step, pl_module)

    def on_train_end(self, trainer, pl_module):
        torch.optim.SGD.step = self._step


class OwnClipping(Net):
    def clip_gradients(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.clamp_(-0.003, 0.003)


class WithAdafactor(Net):
    def configure_optimizers(self):
        return torch.optim.Adafactor([p for p in self.parameters() if p.requires_grad], lr=0.1)


class StepPreHook(Net):
    """Lightning hands the closure to the optimizer, so that the hook sees what the step before has left."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)
        optimizer.register_step_pre_hook(self._shrink)
        return optimizer

    @staticmethod
    def _shrink(optimizer: Any, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.mul_(0.99) if parameter.grad is None else parameter.sub_(0.01 * parameter.grad)

    _shrink = staticmethod(torch.no_grad()(_shrink.__func__))


class GlobalStepHook(pl.Callback):
    def on_train_start(self, t: Any, module: Any) -> None:
        def clip(optimizer: Any, *_: Any) -> None:
            nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.05)

        self.handle = register_optimizer_step_pre_hook(clip)

    def on_train_end(self, t: Any, module: Any) -> None:
        self.handle.remove()


class WithZeRO(Net):
    def configure_optimizers(self):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".torch.jit.[a-z]*. is deprecated")  # torch's own use of it
            from torch.distributed.optim import ZeroRedundancyOptimizer
        return ZeroRedundancyOptimizer(
            [p for p in self.parameters() if p.requires_grad], torch.optim.SGD, lr=0.1, momentum=0.9
        )


class ReadsOnRank0(pl.Callback):
    """A weight is read on one rank alone, and then all log."""

    def on_train_batch_end(self, t: Any, module: Any, *_: Any) -> None:
        if t.global_rank == 0:
            module.first.weight.sum().item()
        module.log("value", torch.tensor(1.0 + t.global_rank), sync_dist=True)


class ClearsState(pl.Callback):
    def on_train_epoch_start(self, t: Any, module: Any) -> None:
        t.optimizers[0].state.clear()


class ReloadsState(pl.Callback):
    """Puts the optimizer back to its state of some steps before."""

    def on_train_batch_end(self, t: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        optimizer = t.optimizers[0]
        if batch_idx == 2:
            self.saved = {key: value for key, value in optimizer.state_dict().items() if key == "state"}
            self.saved["state"] = {
                index: {name: value.clone() for name, value in of.items() if isinstance(value, Tensor)}
                for index, of in self.saved["state"].items()
            }
        if batch_idx == 4:
            optimizer.load_state_dict({**optimizer.state_dict(), **self.saved})


class AddsAHook(pl.Callback):
    """Sets a hook on the module when training has begun. It changes the gradients, so it must run within the step."""

    def on_train_start(self, trainer, pl_module):
        def halve(optimizer):
            for parameter in pl_module.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)

        pl_module.on_before_optimizer_step = halve


class ChangesClipping(pl.Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        trainer.gradient_clip_val = 0.01 * (batch_idx + 1)


class LoadsState(pl.Callback):
    """Loads without having looked at the state before: the pending step must not change what is loaded."""

    def on_train_batch_end(self, t: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 4:
            optimizer = t.optimizers[0]
            groups = [
                {**{key: value for key, value in group.items() if key != "params"}, "params": list(range(6))}
                for group in optimizer.param_groups
            ]
            optimizer.load_state_dict({"state": {}, "param_groups": groups})


CASES: dict[str, Case] = {
    "SAM": (WithSAM, (), {}),
    "an optimizer's own attribute": (WithOwnAttribute, (), {}),
    "a tensor as rate": (TensorRate, (), {}),
    "a patched step": (PatchedStep, (), {}),
    "a wrapped step": (WrappedStep, (), {}),
    "a step that is wrapped on the class": (Net, (WrapsTheClass,), {}),
    "own clipping": (OwnClipping, (), {}),
    "Adafactor": (WithAdafactor, (), {}),
    "a step hook": (StepPreHook, (), {}),
    "a global step hook": (Net, (GlobalStepHook,), {}),
    "ZeRO, read on rank 0": (WithZeRO, (ReadsOnRank0,), {}),
    "read on rank 0": (Net, (ReadsOnRank0,), {}),
    "the state cleared": (Net, (ClearsState,), {"max_epochs": 3}),
    "the state put back": (Net, (ReloadsState,), {}),
    "a hook that is set later": (Net, (AddsAHook,), {}),
    "clipping changed before each step": (Net, (ChangesClipping,), {"gradient_clip_val": 0.1}),
    "clipping by value": (Net, (ChangesClipping,), {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "the state loaded": (Net, (LoadsState,), {}),
    "stochastic weight averaging": (
        Net, (lambda: StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1),), {"max_epochs": 3}
    ),
}  # fmt: skip


def compare_case(rank, name):
    compare_on_a_slow_network(CASES[name])


@pytest.mark.ci
def test_equals_ddp():
    run_cases(2, compare_case, CASES)
