"""A staged update of two layers without a Trainer, for tests of `PendingUpdates`."""

from __future__ import annotations

import torch
from torch import nn

from lightning_dp.strategies.layered_sgd.parameter_watch import ParameterWatch
from lightning_dp.strategies.layered_sgd.update import PendingUpdates


class Bucket:
    """In place of a `BucketReduction`: its sum is there, or it raises, or it has not arrived yet."""

    def __init__(self, has_arrived: bool = False, error: Exception | None = None) -> None:
        self.has_arrived = has_arrived
        self.error = error
        self.num_waits = 0

    def wait(self) -> None:
        self.num_waits += 1
        if self.error is not None:
            raise self.error


class Staged:
    """Two layers whose update is staged, each layer in a bucket of its own, and a watch over their parameters."""

    def __init__(self, whole: bool = False, momentum: float = 0.0, lr: float = 1.0) -> None:
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.parameters = list(self.layers.parameters())
        self.optimizer = torch.optim.SGD(self.parameters, lr=lr, momentum=momentum)
        self.buckets = [Bucket(), Bucket()]
        self.watch = ParameterWatch(lambda p: self.updates.apply_for(p), lambda p: self.updates.apply_for(p))
        self.updates = PendingUpdates(lambda parameters, staged_at: self.watch.remove(parameters))
        self.stage(whole)

    def stage(self, whole: bool = False) -> None:
        for parameter in self.parameters:
            parameter.grad = torch.ones_like(parameter)
        self.before = [parameter.detach().clone() for parameter in self.parameters]
        reductions = {
            parameter: bucket
            for layer, bucket in zip(self.layers, self.buckets, strict=True)
            for parameter in layer.parameters()
        }
        self.watch.add(self.parameters)
        self.updates.stage(self.optimizer, reductions, self.optimizer.step if whole else None)

    def updated(self) -> list[bool]:
        with torch._C.DisableTorchFunctionSubclass():
            return [not torch.equal(p, old) for p, old in zip(self.parameters, self.before, strict=True)]
