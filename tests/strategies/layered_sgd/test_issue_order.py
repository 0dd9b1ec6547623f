"""Sums that are issued after backward go in the order in which rank 0's first forward has used the parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_dp.strategies import LayeredSGDStrategy
from lightning_dp.strategies.layered_sgd.device_communicator import DeviceCommunicator, DeviceSum
from lightning_dp.strategies.layered_sgd.gradient_sum import IssueOrder
from lightning_dp.strategies.layered_sgd.parameter_watch import is_watched
from lightning_dp.strategies.layered_sgd.reduction import LayeredReduction
from tests.ranks import run_processes
from tests.strategies.layered_sgd.modules import Unused, fit
from tests.strategies.layered_sgd.test_device_communicator import sum_on_device
from tests.strategies.modules import Net

CPU = torch.device("cpu")


class Collective:
    """Notes the sums that are issued. The first element of a buffer is the index of its bucket."""

    def __init__(self) -> None:
        self.issued: list[int] = []

    def all_reduce(self, buffer: Tensor) -> None:
        self.issued.append(int(buffer[0]))


class GradBucket:
    """Holds the gradients of a layer, as views."""

    def __init__(self, index: int, layer: nn.Linear) -> None:
        buffer = torch.full((6,), float(index))
        layer.weight.grad = buffer[:4].view(2, 2)
        layer.bias.grad = buffer[4:]
        self.index = lambda: index
        self.parameters = lambda: list(layer.parameters())
        self.buffer = lambda: buffer


class Training:
    """Three layers without a Trainer. As DDP fills buckets: the first layer's is the last."""

    def __init__(self, sent: list[int] | None = None) -> None:
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
        self.optimizer = torch.optim.SGD(self.layers.parameters(), lr=0.1, momentum=0.9)
        self.num_sent = 0
        self._sent = sent
        order = IssueOrder(self.layers.parameters(), self._broadcast, CPU)
        self.collective = Collective()
        communicator = DeviceCommunicator(self.collective, False, CPU, issue_order=order)
        self.reduction = LayeredReduction(communicator, 1, self.layers)

    def _broadcast(self, tensor: Tensor) -> None:
        self.num_sent += 1
        if self._sent is not None:
            tensor.copy_(torch.tensor(self._sent))

    def step(self, uses: list[int], by_bucket: bool = True) -> list[int]:
        """Run a forward that uses these layers, and backward. Return the buckets in the order of their sums."""
        if not by_bucket:
            self.reduction.finish_update()
        self.reduction.begin_forward()
        x = torch.ones(1, 2)
        for layer in uses:
            x = self.layers[layer](x)
        self.reduction.begin_backward(x.sum())
        assert not any(map(is_watched, self.layers.parameters()))
        self.collective.issued.clear()
        for index, layer in enumerate(reversed(self.layers)):
            self.reduction._reduce_bucket(None, GradBucket(index, layer))
        self.reduction.end_backward()
        self.reduction.stage(self.optimizer, None)
        return list(self.collective.issued)


def test_the_forward_after_the_first_backward_decides():
    """Although all sums arrive at once here, and the first use applies the whole update."""
    training = Training()
    assert training.step([0, 1, 2]) == [2, 1, 0], "not yet known: the first layer first"
    assert training.step([2, 0, 1, 0]) == [0, 2, 1]
    assert training.step([0, 1, 2]) == [0, 2, 1]
    assert training.num_sent == 1


def test_what_the_forward_does_not_use_comes_last():
    training = Training()
    training.step([0, 1, 2])
    assert training.step([1]) == [1, 2, 0]


def test_an_update_before_the_forward_needs_no_order():
    training = Training()
    for _ in range(3):
        assert training.step([2, 0, 1], by_bucket=False) == [2, 1, 0]
    assert training.num_sent == 1, "all ranks take part, whatever they have measured"


def test_what_rank_0_has_measured_counts():
    training = Training(sent=[1, 1, 0, 0, 2, 2])  # weight and bias of each layer
    training.step([0, 1, 2])
    assert training.step([2, 1, 0]) == [1, 2, 0]


class UsedOnRank0(Unused):
    def training_step(self, batch, batch_idx):
        self.extra = self.global_rank == 0
        return Net.training_step(self, batch, batch_idx)


def issued_on_each_rank(rank: int) -> list[int]:
    sum_on_device()
    issued: list[int] = []
    issue = DeviceSum.issue
    DeviceSum.issue = lambda self, *args: (issued.append(self.index), issue(self, *args))[1]
    # Buckets: first; shared.weight; shared.bias, last, sometimes.weight; sometimes.bias, never.weight; never.bias.
    strategy = LayeredSGDStrategy(2, bucket_cap_mb=400 / 2**20, find_unused_parameters=True)
    fit(strategy, 4, UsedOnRank0(), limit_train_batches=4)
    return issued


def test_all_ranks_issue_in_one_order():
    orders = run_processes(4, issued_on_each_rank)
    assert orders == [[4, 3, 2, 1, 0] + 3 * [4, 2, 1, 3, 0]] * 4, "rank 0 alone uses `sometimes`, after `first`"
