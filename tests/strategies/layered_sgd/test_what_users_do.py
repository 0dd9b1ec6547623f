"""What people do with optimizers, gradients and functions around a step ends as under DDP, or is refused by name.

Each case is a module (and callbacks) that is fitted under DDPStrategy and under both overlaps of layered SGD.
"""

from __future__ import annotations

import logging
import multiprocessing
import warnings
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from lightning_fabric.utilities.warnings import PossibleUserWarning
from pytorch_lightning.callbacks import StochasticWeightAveraging
from pytorch_lightning.strategies import DDPStrategy
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lightning_dp.strategies import LayeredSGDStrategy
from lightning_dp.strategies.layered_sgd import stale_use
from lightning_dp.strategies.layered_sgd.bucket import BucketReduction
from tests.ranks import RankError, run_processes
from tests.strategies.modules import SMALL_BUCKETS_MB, Net, assert_same, data, snapshot, trainer

OVERLAPS = ("load", "step")
STEPS = 8


def layered(overlap: str = "step", **options: Any) -> LayeredSGDStrategy:
    return LayeredSGDStrategy(1, overlap=overlap, **{"bucket_cap_mb": SMALL_BUCKETS_MB, **options})


def on_a_slow_network() -> None:
    """Let no bucket have arrived when another is needed: each update then goes as far as it must and no further."""
    BucketReduction.has_arrived = property(lambda self: False)


def fit(strategy: Any, module: pl.LightningModule, callbacks: Any = (), **options: Any) -> pl.Trainer:
    t = trainer(strategy, 2, callbacks=list(callbacks), **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PossibleUserWarning)
        warnings.filterwarnings("ignore", ".torch.jit.[a-z]*. is deprecated")
        warnings.filterwarnings("ignore", r".*\.grad attribute of a Tensor that is not a leaf")  # Dynamo looks at it
        t.fit(module, data(2, STEPS))
    return t


class Manual(Net):
    automatic_optimization = False


# --- gradients stay until somebody zeroes them ---


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


class TwoLossesOnOneGraph(Manual):
    """The second backward runs through a graph that was built before the first step was staged."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.first.parameters(), lr=0.1), torch.optim.SGD(self.last.parameters(), lr=0.1)

    def training_step(self, batch, batch_idx):
        first, last = self.optimizers()
        loss = self.loss(batch)
        penalty = 0.1 * (self.first.bias.sum() + self.last.bias.sum())  # linear: nothing is saved that a step changes
        first.zero_grad()
        last.zero_grad()
        self.manual_backward(loss)
        first.step()
        self.manual_backward(penalty)
        last.step()


# --- optimizers and their hooks ---


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


# --- functions that hide the parameters they use ---


class ScalarParameters(Net):
    def __init__(self) -> None:
        super().__init__()
        self.p, self.q = (nn.Parameter(torch.tensor(value, dtype=torch.float64)) for value in (0.5, 2.0))

    def training_step(self, batch, batch_idx):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch's, of losing the gradient
            matrix = torch.tensor([[self.p, self.q], [self.q, self.p]], dtype=torch.float64)
        return self.loss(batch) * matrix.square().mean() + self.p * self.q


class CompiledMethod(Net):
    def __init__(self) -> None:
        super().__init__()
        self.encode = torch.compile(self._encode, backend="eager")

    def _encode(self, x):
        return torch.tanh(self.shared(torch.tanh(self.first(x))))

    def forward(self, x):
        return self.last(torch.tanh(self.shared(torch.tanh(self.frozen(self.encode(x))))))


class CompiledAfterSetup(Net):
    def on_train_start(self) -> None:
        self.shared.compile(backend="eager")


class CompiledBetweenSteps(pl.Callback):
    def __init__(self) -> None:
        self.norm = torch.compile(lambda weight: weight.detach().square().sum(), backend="eager")
        self.norms: list[float] = []

    def on_train_batch_end(self, t: Any, module: Any, *_: Any) -> None:
        module.log("norm", self.norm(module.first.weight), sync_dist=True)
        self.norms.append(self.norm(module.first.weight).item())

    def on_train_end(self, t: Any, module: Any) -> None:
        with torch.no_grad():
            module.first.bias.fill_(sum(self.norms))  # so that the comparison of parameters sees the norms


class SelectiveCheckpoint(Net):
    """Saves what the optimizer computes with, too; the update runs inside the forward, under the checkpoint's mode."""

    def __init__(self) -> None:
        super().__init__(optimizer="adamw")

    def forward(self, x):
        def keep(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            return CheckpointPolicy.MUST_SAVE

        x = checkpoint(
            lambda x: torch.tanh(self.first(x)) * 2,
            x,
            use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(keep),
        )
        return self.last(torch.tanh(self.frozen(torch.tanh(self.shared(x)))))


class FunctionalFirst(Net):
    """A functional transform captures parameters before the plain forward uses them."""

    def training_step(self, batch, batch_idx):
        x, _ = batch
        slope = torch.func.grad(lambda x: torch.tanh(x @ self.first.weight.T).sum())(x)
        jacobian = torch.func.jacrev(lambda b: self.last.weight @ b)(self.shared.bias.detach())
        return self.loss(batch) + slope.square().mean() + jacobian.square().mean()


class TiedThroughData(Net):
    def __init__(self) -> None:
        super().__init__()
        self.copy = nn.Linear(8, 8).double()
        self.copy.weight.data = self.shared.weight.data

    def forward(self, x):
        return self.last(torch.tanh(self.copy(torch.tanh(self.shared(torch.tanh(self.first(x)))))))


CASES: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "gradients are never zeroed": (NeverZeroed, (), {}),
    "zeroed every second batch": (ZeroedEverySecond, (), {}),
    "zeroed before backward": (ZeroedFirst, (), {}),
    "two steps on one gradient": (TwoStepsOnOneGradient, (), {}),
    "two optimizers over the same parameters": (TwoOptimizersOverTheSameParameters, (), {}),
    "zero_grad overridden to nothing": (ZeroGradOverriddenToNothing, (), {}),
    "gradients changed after the step": (ChangesGradientsAfterTheStep, (), {}),
    "two losses on one graph": (TwoLossesOnOneGraph, (), {"ddp": {"find_unused_parameters": True}}),
    "SAM": (WithSAM, (), {}),
    "an optimizer's own attribute": (WithOwnAttribute, (), {}),
    "a tensor as rate": (TensorRate, (), {}),
    "a patched step": (PatchedStep, (), {}),
    "a step hook": (StepPreHook, (), {}),
    "a global step hook": (Net, (GlobalStepHook,), {}),
    "ZeRO, read on rank 0": (WithZeRO, (ReadsOnRank0,), {}),
    "read on rank 0": (Net, (ReadsOnRank0,), {}),
    "the state cleared": (Net, (ClearsState,), {"max_epochs": 3}),
    "the state put back": (Net, (ReloadsState,), {}),
    "the state loaded": (Net, (LoadsState,), {}),
    "stochastic weight averaging": (
        Net, (lambda: StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1),), {"max_epochs": 3}
    ),
    "scalars in a nested list": (ScalarParameters, (), {}),
    "a compiled method": (CompiledMethod, (), {}),
    "compiled after set-up": (CompiledAfterSetup, (), {}),
    "compiled code between steps": (Net, (CompiledBetweenSteps,), {}),
    "a selective checkpoint": (SelectiveCheckpoint, (), {}),
    "a functional transform": (FunctionalFirst, (), {}),
    "weights tied through data": (TiedThroughData, (), {"ddp": {"find_unused_parameters": True}}),
}  # fmt: skip


COMPILED = {"a compiled method", "compiled after set-up", "compiled code between steps"}


def compare(rank, name):
    on_a_slow_network()
    make, callbacks, options = CASES[name]
    options = dict(options)
    ddp_options = options.pop("ddp", {})
    if name in COMPILED:
        ddp_options["bucket_cap_mb"] = 2  # torch splits compiled code at the buckets, and wants no small ones
    module = make()
    expected = snapshot(module, fit(DDPStrategy(**ddp_options), module, [each() for each in callbacks], **options))
    for overlap in OVERLAPS:
        module = make()
        t = fit(layered(overlap, **ddp_options), module, [each() for each in callbacks], **options)
        assert_same(snapshot(module, t), expected)


@pytest.mark.parametrize("name", CASES)
def test_equals_ddp(name):
    run_processes(2, compare, name, timeout=120)


# --- uses that nobody sees are found in backward ---


class Scripted(Net):
    """PyTorch shows no call of a scripted function, so that its use of the bias goes unseen."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(8, dtype=torch.float64))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".torch.jit.[a-z]*. is deprecated")
            self.add_and_squash = torch.jit.script(add_and_squash)

    def forward(self, x):
        x = self.add_and_squash(self.first(x), self.bias)
        return self.last(torch.tanh(self.shared(x)))


def add_and_squash(x: Tensor, bias: Tensor) -> Tensor:
    return torch.tanh(x + bias)


class ThroughAView(Net):
    """A view that was made before training is used in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(8, dtype=torch.float64))
        self.flat = self.bias.view(-1)

    def forward(self, x):
        return self.last(torch.tanh(self.shared(torch.tanh(self.first(x) + self.flat))))


def find_stale_use(rank, make):
    on_a_slow_network()
    module = make()
    expected = snapshot(module, fit(DDPStrategy(), module))
    module = make()
    assert_same(snapshot(module, fit(layered("load"), module)), expected)
    module = make()
    with pytest.raises(RuntimeError, match=r"bias was used in this forward without its last update.*overlap=.load."):
        fit(layered("step", bucket_cap_mb=1e-6), module)  # each parameter in a bucket of its own
    # The first step leaves something pending, all of it in the one bucket that DDP starts with; the third must raise.
    assert module.trainer.global_step == 2


@pytest.mark.parametrize("make", [Scripted, ThroughAView])
def test_a_use_that_nobody_sees_raises_by_name_and_overlap_load_is_the_remedy(make):
    run_processes(2, find_stale_use, make)


# --- what is not postponed, or not in the forward, says why ---


def say_why(rank, make, callback):
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("lightning_dp").addHandler(handler)
    fit(LayeredSGDStrategy(1), make(), [] if callback is None else [callback()])
    return [record for record in records if "LayeredSGDStrategy:" in record]


@pytest.mark.parametrize(
    ("make", "callback", "reason"),
    [
        (WithSAM, None, "SAM.step, which is not PyTorch's own, must run within its own step"),
        (WithZeRO, None, "ZeroRedundancyOptimizer.step, which is not PyTorch's own, must run"),
        (PatchedStep, None, "SGD.step, which somebody has replaced, must run"),
        (StepPreHook, None, "a hook before or after SGD.step must run"),
        (Net, GlobalStepHook, "a hook before or after SGD.step must run"),
        (CompiledMethod, None, "training_step runs compiled code, so a use of parameters can go unseen"),
        (Net, CompiledBetweenSteps, "compiled code that runs between two training steps must run"),
        (TiedThroughData, None, "copy.weight and shared.weight share memory, so a use"),
    ],
)
def test_a_warning_names_what_costs_the_overlap_once(make, callback, reason):
    for records in run_processes(2, say_why, make, callback):
        assert [reason in record for record in records] == [True], records


# --- the watch and others ---


class Mode(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class OwnMode(pl.Callback):
    """A mode of the user's, over an epoch with a validation in its middle."""

    def on_train_epoch_start(self, t: Any, module: Any) -> None:
        self.mode = Mode()
        self.mode.__enter__()

    def on_train_epoch_end(self, t: Any, module: Any) -> None:
        assert torch.overrides._get_current_function_mode() is self.mode
        self.mode.__exit__(None, None, None)


class Validated(Net):
    def val_dataloader(self):
        return data(2, steps=1)


def keep_own_mode(rank):
    for overlap in OVERLAPS:
        fit(layered(overlap), Validated(), [OwnMode()], val_check_interval=2)


def test_a_mode_of_the_user_s_stays_where_it_is():
    run_processes(2, keep_own_mode)


class Reading(torch.utils.data.Dataset):
    """Reads the module in each sample: in loader workers, which are forked at the start of an epoch."""

    def __init__(self, module: Net) -> None:
        self.module = module
        self.samples = data(2, STEPS).dataset

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index):
        x, y = self.samples[index]
        return x + 0.1 * self.module.first.weight.detach().sum(), y


def read_in_workers(rank):
    on_a_slow_network()
    multiprocessing.current_process()._config["daemon"] = False  # else it may start no workers

    def fit_with_workers(strategy):
        module = Net()
        loader = torch.utils.data.DataLoader(
            Reading(module), batch_size=3, num_workers=1, multiprocessing_context="fork"
        )
        t = trainer(strategy, 2, max_epochs=3, reload_dataloaders_every_n_epochs=1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # advice, and Python's about forking beside threads
            t.fit(module, loader)
        return snapshot(module, t)

    expected = fit_with_workers(DDPStrategy())
    for overlap in OVERLAPS:
        assert_same(fit_with_workers(layered(overlap)), expected)


def test_forked_loader_workers_find_the_module_up_to_date_and_wait_for_nobody():
    run_processes(2, read_in_workers, timeout=120)


def test_a_dead_end_is_named():
    """The twin: without looking at graphs, two losses on one graph would be taken for a stale use."""
    with pytest.raises(RankError, match="without its last update"):
        run_processes(2, suspect_everything)


def suspect_everything(rank):
    on_a_slow_network()
    stale_use._reads = lambda root, parameter: []
    fit(layered("step", find_unused_parameters=True), TwoLossesOnOneGraph())
