"""What users do with Lightning, each with DDP and with layered FSDP."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import BaseFinetuning
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torchmetrics import MeanMetric, Metric

from lightning_dp import AdaptiveGlobalBatchNorm, StepTimer
from tests.strategies.layered_fsdp.modules import whole
from tests.strategies.modules import CLASSES, FEATURES, Net, TogglesOptimizers, data, optimizers


class Manual(Net):
    """Two optimizers that step one after the other, with a forward in between."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    def configure_optimizers(self):
        return [
            optimizers("momentum", [*self.first.parameters(), *self.shared.parameters()]),
            optimizers("adamw", self.last.parameters()),
        ]


class TwoBackwards(Manual):
    """One step after two backward passes, the second on top of a gradient that is averaged already."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(self.loss((x[:1], y[:1])))
        self.manual_backward(self.loss((x[1:], y[1:])))
        for optimizer in self.optimizers():
            optimizer.step()


class ManualMetric(Manual):
    """A metric and a loss are parts without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()
        self.criterion = nn.CrossEntropyLoss()

    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        self.mean(self.criterion(self(batch[0]), batch[1]).detach())
        self.log("mean", self.mean, on_step=False, on_epoch=True)


class Distance(Metric):
    """A network of its own judges what it is updated with."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.network = nn.Linear(CLASSES, 1, bias=False).double().requires_grad_(False)
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, x: torch.Tensor) -> None:
        self.total += self.network(x).sum()

    def compute(self) -> torch.Tensor:
        return self.total


class WithDistance(Net):
    """A metric with parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.distance = Distance()

    def training_step(self, batch, batch_idx):
        self.distance.update(self(batch[0]).detach())
        self.log("distance", self.distance, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def on_train_end(self):
        self.register_buffer("seen", self.trainer.callback_metrics["distance"])


class ManualDistance(WithDistance, Manual):
    """The same with manual optimization."""


class AccumulatesByHand(Manual):
    """Gradients stay whole on each rank until the last of three batches, as users of FSDP2 write it."""

    def training_step(self, batch, batch_idx):
        for part in self.children():
            if isinstance(part, FSDPModule):
                part.set_requires_gradient_sync(batch_idx % 3 == 2)
        self.manual_backward(self.loss(batch))
        if batch_idx % 3 == 2:
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()


class Gan(TogglesOptimizers):
    """Half of the parameters do not require gradients in each backward."""

    configure_optimizers = Manual.configure_optimizers


class Tied(Net):
    """The first and the last layer share a weight; a parameter of the module itself scales the output."""

    def __init__(self) -> None:
        super().__init__()
        self.tied = nn.Linear(FEATURES, 8, bias=False).double()
        self.tied.weight = self.first.weight
        self.scale = nn.Parameter(torch.ones(CLASSES, dtype=torch.float64))

    def forward(self, x):
        return self.scale * super().forward(x) + self.tied(x)[:, :CLASSES]


class Normalized(Net):
    """Batch norm: parameters, and running statistics that differ between ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8).double()
        self.conv = nn.Conv1d(1, 2, 3, padding=1).double()

    def forward(self, x):
        x = self.norm(torch.tanh(self.first(x)))
        x = torch.relu(self.conv(x[:, None])).mean(1)
        return self.last(torch.tanh(self.shared(x)))


class ChannelsLast(Normalized):
    """Weights in another memory format, which FSDP2 does not take."""

    def __init__(self) -> None:
        super().__init__()
        self.plane = nn.Conv2d(1, 3, 3, padding=1).double().to(memory_format=torch.channels_last)
        self.plane_again = nn.Conv2d(3, 1, 3, padding=1).double().to(memory_format=torch.channels_last)

    def forward(self, x):
        image = torch.tanh(x[:, None, :, None] * x[:, None, None, :]).contiguous(memory_format=torch.channels_last)
        return super().forward(x) + self.plane_again(torch.relu(self.plane(image))).mean((1, 2, 3))[:, None]


class Unused(Net):
    """A layer that is used in every second step, on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.sometimes = nn.Linear(8, 8).double()
        self.step = 0

    def forward(self, x):
        x = torch.tanh(self.first(x))
        x = self.sometimes(x) if self.step % 2 else x
        return self.last(torch.tanh(self.shared(x)))

    def training_step(self, batch, batch_idx):
        self.step = batch_idx
        return super().training_step(batch, batch_idx)


class Dictionary(Net):
    """Returns a dictionary, and computes without gradients, and twice, before it does."""

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            self.loss(batch)
        other = self.loss(batch)
        return {"loss": self.loss(batch) + 0.1 * other, "logits": self(batch[0]).detach()}


class Unfreeze(BaseFinetuning):
    """Trains the frozen layer from the second epoch on."""

    def freeze_before_training(self, pl_module):
        pass

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.frozen, optimizer)


class UnfreezesInStep(Net):
    """A layer is frozen when training starts; the third step unfreezes it."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen.requires_grad_(True)

    def on_train_start(self) -> None:
        self.frozen.requires_grad_(False)  # DDP has seen that it will need gradients

    def training_step(self, batch, batch_idx):
        self.frozen.requires_grad_(batch_idx >= 2)
        return super().training_step(batch, batch_idx)


class Average(pl.Callback):
    """An average of the weights, kept by a user's callback that reads each local shard after every batch."""

    def on_fit_start(self, trainer, pl_module):
        self.average = {name: whole(p) for name, p in pl_module.named_parameters()}

    def on_train_batch_end(self, trainer, pl_module, *args):
        for name, parameter in pl_module.named_parameters():
            self.average[name].lerp_(whole(parameter), 0.1)

    def on_train_end(self, trainer, pl_module):
        pl_module.register_buffer("average", torch.cat([value.flatten() for value in self.average.values()]))


class Reader(pl.Callback):
    """Rank 1 alone reads its shards between two steps, in each of the ways there are; all ranks read gradients."""

    def on_train_batch_end(self, trainer, pl_module, *args):
        if trainer.global_rank == 1:
            for number, parameter in enumerate(pl_module.parameters()):
                if hasattr(parameter, "to_local"):
                    _ = (parameter.to_local, parameter.detach, parameter.clone, lambda p=parameter: p * 2)[number % 4]()

    def on_after_backward(self, trainer, pl_module):
        gradients = [whole(p.grad).flatten() for p in pl_module.parameters() if p.grad is not None]
        total = getattr(pl_module, "gradients", torch.zeros((), dtype=torch.float64))
        pl_module.register_buffer("gradients", total + torch.cat(gradients).square().sum())


class ZeroedInPlace(Net):
    """Gradients are zeroed and not dropped, so backward adds to them."""

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        optimizer.zero_grad(set_to_none=False)


class ReadOnOneRank(pl.Callback):
    """Rank 1 alone looks at gradients, as a logger of rank 0 may do, and changes what it has kept after the step."""

    def on_after_backward(self, trainer, pl_module):
        gradient = pl_module.first.weight.grad if trainer.global_rank == 1 else None
        self.kept = gradient.to_local() if hasattr(gradient, "to_local") else gradient

    def on_train_batch_end(self, trainer, pl_module, *args):
        if self.kept is not None:
            self.kept.zero_()


class UsedEarly(Unused):
    """With accumulation: the layer is used in the first batch of each window, and not in the last one."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx + 1)


class Teacher(Manual):
    """A part that never runs backward: its parameters follow those of another one after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(FEATURES, 8), nn.LayerNorm(8), nn.Linear(8, CLASSES)).double()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        with torch.no_grad():
            target = self.teacher(batch[0])
        self.manual_backward((self.student(batch[0]) - target).square().mean() + self.loss(batch))
        optimizer.step()
        with torch.no_grad():
            for own, other in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                own.lerp_(other, 0.3)

    def configure_optimizers(self):
        return optimizers("momentum", [p for p in self.parameters() if p.requires_grad])


class Validated(Tied):
    """Is validated, and has parameters that no unit but the root has."""

    def val_dataloader(self):
        return data(4, 2)


class Swap(pl.Callback):
    """An average of the weights that takes their place in validation."""

    def on_train_batch_end(self, trainer, pl_module, *args):
        with torch.no_grad():
            if not hasattr(self, "average"):
                self.average = [p.detach().clone() for p in pl_module.parameters()]
            for average, parameter in zip(self.average, pl_module.parameters(), strict=True):
                average.lerp_(parameter, 0.1)

    def on_validation_epoch_start(self, trainer, pl_module):
        for average, parameter in zip(getattr(self, "average", ()), pl_module.parameters(), strict=False):
            before = parameter.data.clone()
            parameter.data.copy_(average)
            average.copy_(before)

    on_validation_epoch_end = on_validation_epoch_start


class Look(pl.Callback):
    """Runs the module without gradients between backward and the step."""

    def on_after_backward(self, trainer, pl_module):
        with torch.no_grad():
            pl_module(torch.ones(2, FEATURES, dtype=torch.float64))


class Clamp(pl.Callback):
    """Runs the module between two steps, with and without gradients, and then writes to its parameters."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        with torch.set_grad_enabled(batch_idx % 2 == 1):
            pl_module(torch.ones(2, FEATURES, dtype=torch.float64))
        for parameter in pl_module.parameters():
            parameter.data.clamp_(-0.3, 0.3)


class RunsPart(pl.Callback):
    """Runs a part of the module before the module has run."""

    def on_train_start(self, trainer, pl_module):
        with torch.no_grad():
            pl_module.first(torch.ones(2, FEATURES, dtype=torch.float64))


class RunsInInferenceMode(pl.Callback):
    """Runs the module in inference mode before its first step, as a validation on GPUs does."""

    def on_train_start(self, trainer, pl_module):
        with torch.inference_mode():
            pl_module(torch.ones(2, FEATURES, dtype=torch.float64))


class UsesParts(Tied):
    """Its step calls parts, and not the module itself."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self.scale * self.last(self.shared(torch.tanh(self.first(x)))), y)


class StepByHand(pl.Callback):
    """Runs the step between two steps, and then writes to the parameters."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        with torch.no_grad():
            pl_module.training_step(batch, batch_idx)
        for parameter in pl_module.parameters():
            parameter.data.clamp_(-0.3, 0.3)


class CallsSteps(Validated):
    """One step calls another one, which calls the module, and then uses a parameter of the module itself."""

    def training_step(self, batch, batch_idx):
        return self.validation_step(batch, batch_idx) * self.scale.sum()

    def validation_step(self, batch, batch_idx):
        return self.loss(batch) * self.scale.mean()


class WritesBeforeBackward(UsesParts):
    """Hooks between forward and backward write to a parameter of the module itself."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.zeros_like(self.scale), requires_grad=False)

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + (self.scale - self.mean).square().sum()

    def on_before_zero_grad(self, optimizer):
        with torch.no_grad():
            self.mean.lerp_(self.scale, 0.3)

    def on_before_backward(self, loss):
        with torch.no_grad():
            self.mean.mul_(1.1)


class OneRow(Net):
    """A layer with one row: the second rank of a group has nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(FEATURES, 1).double()

    def forward(self, x):
        return super().forward(x) * self.one(x)


class Replace(pl.Callback):
    """Puts other tensors in the place of the gradients. The next backward adds to them."""

    def on_after_backward(self, trainer, pl_module):
        for parameter in pl_module.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad * 0.5


class SaveFirst(pl.Callback):
    """Looks at the state of optimizers that have none yet."""

    def on_train_start(self, trainer, pl_module):
        for optimizer in trainer.optimizers:
            trainer.strategy.optimizer_state(optimizer)


class Marked(Net):
    """Attributes of parameters say how they are trained and used."""

    def __init__(self) -> None:
        super().__init__()
        self.first.bias.no_weight_decay = True
        self.last.weight.scale = 0.5

    def forward(self, x):
        return super().forward(x) * self.last.weight.scale

    def configure_optimizers(self):
        marked = [p for p in self.parameters() if getattr(p, "no_weight_decay", False)]
        others = [p for p in self.parameters() if not getattr(p, "no_weight_decay", False)]
        groups = [{"params": marked, "weight_decay": 0.0}, {"params": others}]
        return torch.optim.SGD(groups, lr=0.1, weight_decay=0.1)


class GroupedByType(Net):
    """The class of a part says how its weight is trained."""

    def configure_optimizers(self):
        weights = [part.weight for part in self.children() if type(part) is nn.Linear]
        biases = [part.bias for part in self.children() if type(part).__name__ == "Linear"]
        return torch.optim.SGD([{"params": weights, "weight_decay": 0.1}, {"params": biases}], lr=0.1)


class Transformer(Net):
    """Attention, which uses the weight of its part ``out_proj`` itself; in evaluation a layer uses all its parts'."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double()

    def forward(self, x):
        x = self.encoder(torch.tanh(self.first(x))[:, None].expand(-1, 3, -1))
        return self.last(self.shared(x.mean(1)))

    def val_dataloader(self):
        return data(4, 2)


class Tie(nn.Module):
    """Two layers with one weight. All its uses are in this part."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)
        self.other.weight = self.one.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.other(torch.tanh(self.one(x))))


class Named(Net):
    """Two parts have the same layer, a third one has a second name, and all are called."""

    def __init__(self) -> None:
        super().__init__()
        self.tie = Tie().double()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).double()
        self.left = nn.Sequential(self.shared, nn.Tanh(), nn.Linear(8, 8).double())
        self.right = nn.Sequential(nn.Sequential(self.shared, nn.Tanh()), self.inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.tie(torch.tanh(self.first(x)))
        return self.last(torch.tanh(self.left(x) + self.right(x) + self.inner(x)))


class Whole(nn.Module):
    """Has a parameter of its own beside its parts."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.scale = nn.Parameter(torch.ones(8, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x)) * self.scale


class ManualNamed(Manual):
    """With manual optimization, a part of another one has a name before it, and two have the same layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh()).double()
        self.whole = Whole(self.inner)
        self.left = nn.Sequential(self.shared, nn.Tanh())
        self.right = nn.Sequential(nn.Sequential(self.shared, nn.Tanh()), nn.Linear(8, 8).double())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        return self.last(self.left(x) + self.right(x) + self.whole(x) + self.inner(x))


CASES: dict[str, tuple[Callable[[], pl.LightningModule], dict[str, Any]]] = {
    "manual": (Manual, {}),
    "manual with a metric": (ManualMetric, {}),
    "manual with a network in a metric": (ManualDistance, {}),
    "network in a metric": (WithDistance, {}),
    "two backwards": (TwoBackwards, {}),
    "accumulates by hand": (AccumulatesByHand, {"steps": 6}),
    "gan": (Gan, {}),
    "tied": (Tied, {}),
    "normalized": (Normalized, {}),
    "channels last": (ChannelsLast, {}),
    "unused": (Unused, {}),
    "dictionary": (Dictionary, {}),
    "unfreeze": (Net, {"callbacks": [Unfreeze], "max_epochs": 3, "steps": 3}),
    "unfreeze in a step": (UnfreezesInStep, {}),
    "average": (Net, {"callbacks": [Average]}),
    "reader": (Net, {"callbacks": [Reader]}),
    "global batch norm": (Normalized, {"callbacks": [AdaptiveGlobalBatchNorm]}),
    "used early": (UsedEarly, {"accumulate_grad_batches": 2}),
    "teacher": (Teacher, {}),
    "swap": (Validated, {"callbacks": [Swap], "max_epochs": 2}),
    "look": (Tied, {"callbacks": [Look]}),
    "read on one rank": (ZeroedInPlace, {"callbacks": [ReadOnOneRank]}),
    "clamp": (Tied, {"callbacks": [Clamp]}),
    "replace": (OneRow, {"callbacks": [Replace], "accumulate_grad_batches": 2}),
    "marked": (Marked, {}),
    "grouped by type": (GroupedByType, {}),
    "save first": (lambda: Net("adamw"), {"callbacks": [SaveFirst]}),
    "transformer": (Transformer, {}),
    "step timer": (Net, {"callbacks": [StepTimer]}),
    "step by hand": (UsesParts, {"callbacks": [StepByHand]}),
    "writes before backward": (WritesBeforeBackward, {}),
    "steps within steps": (CallsSteps, {}),
    "steps within steps by hand": (CallsSteps, {"callbacks": [StepByHand]}),
    "inference mode first": (Net, {"callbacks": [RunsInInferenceMode]}),
    "part first": (Net, {"callbacks": [RunsPart]}),
    "part first, manual": (Manual, {"callbacks": [RunsPart]}),
}


def options_of(case: str) -> dict[str, Any]:
    options = dict(CASES[case][1])
    options["callbacks"] = [make() for make in options.get("callbacks", ())]
    return options
