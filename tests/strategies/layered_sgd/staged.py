"""A staged update of two layers without a Trainer, for tests of `UpdateQueue`."""

from __future__ import annotations

import torch
from torch import nn

from lightning_dp.strategies.layered_sgd.parameter_watch import plain_class
from lightning_dp.strategies.layered_sgd.update import UpdateQueue


def is_watched(parameter: torch.Tensor) -> bool:
    return type(parameter) is not plain_class(type(parameter))


class Bucket:
    """In place of a `BucketReduction`: its sum is there, or it raises, or it has not arrived yet."""

    def __init__(self, has_arrived: bool = False, error: Exception | None = None) -> None:
        self.has_arrived = has_arrived
        self.error = error
        self.buffer = torch.empty(0)
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
        self.updates = UpdateQueue(self.layers)
        self.stage(whole)

    def stage(self, whole: bool = False) -> None:
        self.run_backward()
        self.updates.stage(self.optimizer, self.step_whole if whole else None, by_bucket=not whole)

    def run_backward(self) -> None:
        self.fill_buckets()
        self.before = [parameter.detach().clone() for parameter in self.parameters]
        for layer, bucket in zip(self.layers, self.buckets, strict=True):
            self.updates.add_sum(list(layer.parameters()), bucket)

    def step_whole(self, optimizer: torch.optim.Optimizer) -> None:
        """Take a step that needs all gradients, such as one with clipping by the norm."""
        optimizer.step()

    def fill_buckets(self) -> None:
        """Give each layer's parameters gradients that are views of its bucket, all ones."""
        for layer, bucket in zip(self.layers, self.buckets, strict=True):
            parameters = list(layer.parameters())
            bucket.buffer = torch.ones(sum(parameter.numel() for parameter in parameters))
            views = bucket.buffer.split([parameter.numel() for parameter in parameters])
            for parameter, view in zip(parameters, views, strict=True):
                parameter.grad = view.view_as(parameter)

    def updated(self) -> list[bool]:
        with torch._C.DisableTorchFunctionSubclass():
            return [not torch.equal(p, old) for p, old in zip(self.parameters, self.before, strict=True)]
