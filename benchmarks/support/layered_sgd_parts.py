"""All that the benchmarks use of layered SGD beyond its public names, in one place.

The strategy needs several processes, and its communicator a network. The host time of its parts is measured in one
process: a stand-in for the communicator hands back gradients that are summed already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_dp._private.torch_names import step_below_hooks
from lightning_dp.strategies.layered_sgd.gradient_sum import WAIT
from lightning_dp.strategies.layered_sgd.host_communicator import (
    INTER_GROUP_ALL_REDUCE,
    INTRA_GROUP_BROADCAST,
    INTRA_GROUP_REDUCE,
    BucketReduction,
)
from lightning_dp.strategies.layered_sgd.reduction import LayeredReduction

__all__ = [
    "INTER_GROUP_ALL_REDUCE",
    "INTRA_GROUP_BROADCAST",
    "INTRA_GROUP_REDUCE",
    "WAIT",
    "PostponedUpdate",
    "step_below_hooks",
]


class PostponedUpdate:
    """The postponed updates of one optimizer in one process, as the strategy holds them between two steps.

    Args:
        model: what is trained.
        optimizer: its parameters are updated bucket by bucket, so it must be one that the strategy steps that way.
        buckets: the parameters of each gradient bucket; together all parameters of the optimizer.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, buckets: Sequence[list[nn.Parameter]]
    ) -> None:
        self._optimizer = optimizer
        self._communicator = _Communicator()
        self._reduction = LayeredReduction(cast(Any, self._communicator), 1, model)
        self._buckets = [_Bucket(index, parameters) for index, parameters in enumerate(buckets)]
        ddp = _DDP()
        self._reduction.feed_from(cast(Any, ddp))
        self._hook = ddp.hook

    def stage(self, have_arrived: bool) -> None:
        """Do what the strategy does from backward to its ``optimizer_step``. Every parameter must have a gradient.

        Args:
            have_arrived: all buckets have arrived when somebody asks for the first one, as on a fast network; else each
                arrives when it is waited for, as on a slow one.
        """
        self._communicator.have_arrived = have_arrived
        self._reduction.updates.begin_backward(torch.zeros(()))
        for bucket in self._buckets:
            bucket.take_gradients()
            self._hook(None, bucket)
        self._reduction.updates.end_backward()
        self._reduction.release()
        self._reduction.updates.stage(self._optimizer)

    def finish(self) -> None:
        """Apply everything that is left: what `LayeredSGDStrategy.finish_update` does."""
        self._reduction.updates.finish()

    @property
    def is_pending(self) -> bool:
        """Whether any parameter still waits for its update."""
        return bool(self._reduction.updates)

    def close(self) -> None:
        """Give up what is pending, and leave nothing behind in this process."""
        self._reduction.close()


class _Bucket:
    """In place of DDP's gradient bucket. The parameters' gradients are views of its buffer."""

    def __init__(self, index: int, parameters: list[nn.Parameter]) -> None:
        self._index = index
        self._parameters = parameters
        self._buffer = torch.zeros(sum(parameter.numel() for parameter in parameters))
        views = self._buffer.split([parameter.numel() for parameter in parameters])
        self._views = [view.view_as(parameter) for view, parameter in zip(views, parameters, strict=True)]

    def take_gradients(self) -> None:
        """Copy the parameters' gradients into the buffer, as backward does, and give the parameters views of it."""
        for parameter, view in zip(self._parameters, self._views, strict=True):
            if parameter.grad is not view:
                assert parameter.grad is not None
                view.copy_(parameter.grad)
                parameter.grad = view

    def index(self) -> int:
        return self._index

    def buffer(self) -> Tensor:
        return self._buffer

    def parameters(self) -> list[nn.Parameter]:
        return self._parameters


class _DDP:
    """In place of DistributedDataParallel: keeps the communication hook."""

    hook: Callable[[None, Any], Any]

    def register_comm_hook(self, state: None, hook: Callable[[None, Any], Any]) -> None:
        self.hook = hook


class _Communicator:
    """In place of the communicator: takes each bucket through all stages at once."""

    compressed = None

    def __init__(self) -> None:
        self.have_arrived = True

    def submit(self, index: int, buffer: Tensor, parameters: Sequence[Tensor]) -> BucketReduction:
        reduction = BucketReduction(index, buffer, cast(Any, _Collective(self.have_arrived)))
        reduction.reduce_intra_group()
        reduction.reduce_inter_group()
        reduction.settle()
        return reduction

    def release(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """Nothing to close."""


class _Collective:
    """In place of the hierarchical all-reduce of a single rank."""

    def __init__(self, has_arrived: bool) -> None:
        self._has_arrived = has_arrived

    def intra_group_reduce(self, buffer: Tensor) -> list[_Broadcast]:
        return []

    def inter_group_all_reduce(self, buffer: Tensor) -> None:
        """There is one group."""

    def intra_group_broadcast(self, buffer: Tensor) -> list[_Broadcast]:
        return [_Broadcast(self._has_arrived)]

    def describe(self, stage: str) -> str:
        return stage


class _Broadcast:
    """In place of the handle of a broadcast."""

    def __init__(self, is_complete: bool) -> None:
        self._is_complete = is_complete

    def is_completed(self) -> bool:
        return self._is_complete

    def wait(self) -> None:
        self._is_complete = True
