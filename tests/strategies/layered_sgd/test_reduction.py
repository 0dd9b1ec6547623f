"""Host time of the watch and of a postponed update, as counts: what is watched, asked and stepped in a forward."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_dp.strategies.layered_sgd.parameter_watch import ParameterWatch
from lightning_dp.strategies.layered_sgd.reduction import LayeredReduction
from tests.strategies.layered_sgd.staged import Bucket, is_watched

NUM_LAYERS = 20


class Communicator:
    """Makes buckets whose sums are there when somebody waits for them, or have arrived before."""

    compressed = None

    def __init__(self) -> None:
        self.buckets: list[AskedBucket] = []
        self.have_arrived = False

    def submit(self, index: int, buffer: Tensor, parameters: Sequence[Tensor]) -> AskedBucket:
        self.buckets.append(AskedBucket(self.have_arrived))
        self.buckets[-1].buffer = buffer
        return self.buckets[-1]

    def release(self) -> None: ...

    def close(self) -> None: ...


class AskedBucket(Bucket):
    """Counts how often it was asked whether it has arrived."""

    num_asked = 0

    @property
    def has_arrived(self) -> bool:
        self.num_asked += 1
        return self._has_arrived

    @has_arrived.setter
    def has_arrived(self, value: bool) -> None:
        self._has_arrived = value


class GradBucket:
    """A buffer of ones, of which the parameters' gradients are views."""

    def __init__(self, index: int, parameters: list[Tensor]) -> None:
        buffer = torch.ones(sum(parameter.numel() for parameter in parameters))
        views = buffer.split([parameter.numel() for parameter in parameters])
        for parameter, view in zip(parameters, views, strict=True):
            parameter.grad = view.view_as(parameter)
        self.index = lambda: index
        self.parameters = lambda: parameters
        self.buffer = lambda: buffer


class Training:
    """A chain of layers without a Trainer, whose updates are postponed; ``layers_in_bucket`` layers have one bucket."""

    def __init__(self, layers_in_bucket: int = 1) -> None:
        self.layers = nn.Sequential(*[nn.Linear(3, 3) for _ in range(NUM_LAYERS)])
        self.optimizer = torch.optim.SGD(self.layers.parameters(), lr=1.0)
        self.communicator: Any = Communicator()
        self.reduction = LayeredReduction(self.communicator, 1, self.layers)
        self._layers_in_bucket = layers_in_bucket

    def stage(self, have_arrived: bool, before_step: Callable[[], object] = lambda: None) -> None:
        """Do what the strategy does from backward to the optimizer's step."""
        self.communicator.have_arrived = have_arrived
        self.communicator.buckets.clear()
        self.reduction.updates.begin_backward(torch.zeros(()))
        layers = list(reversed(self.layers))
        for index, begin in enumerate(range(0, len(layers), self._layers_in_bucket)):
            part = layers[begin : begin + self._layers_in_bucket]
            parameters = [p for layer in part for p in layer.parameters()]
            self.reduction._reduce_bucket(None, GradBucket(index, parameters))
        self.reduction.updates.end_backward()
        self.reduction.release()
        before_step()
        self.reduction.updates.stage(self.optimizer)
        self.begin_forward()

    def begin_forward(self) -> None:
        """Do what the strategy does before the forward."""
        with self.reduction.updates.running_forward(finish=False):
            pass

    @property
    def num_watched(self) -> int:
        return sum(map(is_watched, self.layers.parameters()))


@pytest.fixture
def num_intercepted(monkeypatch) -> list[int]:
    """Grows by one for each function that the watch intercepts."""
    calls: list[int] = []
    before_call = ParameterWatch.before_call
    monkeypatch.setattr(ParameterWatch, "before_call", lambda *args: (calls.append(1), before_call(*args))[1])
    return calls


@pytest.fixture
def num_steps(monkeypatch) -> list[int]:
    """Grows by one for each step of an optimizer."""
    steps: list[int] = []
    step = torch.optim.SGD.step
    monkeypatch.setattr(torch.optim.SGD, "step", lambda *args: (steps.append(1), step(*args))[1])
    return steps


def test_when_all_buckets_have_arrived_one_use_is_intercepted_and_one_step_taken(num_intercepted, num_steps):
    training = Training()
    training.stage(have_arrived=True)
    num_intercepted.clear()
    training.layers(torch.ones(1, 3))
    assert len(num_intercepted) == 1
    assert len(num_steps) == 1
    assert training.num_watched == 0


def test_a_bucket_that_has_not_arrived_is_asked_by_the_next_one_only():
    training = Training()
    training.stage(have_arrived=False)
    training.layers(torch.ones(1, 3))
    assert not training.reduction.updates
    assert [bucket.num_waits > 0 for bucket in training.communicator.buckets] == [True] * NUM_LAYERS
    assert sum(bucket.num_asked for bucket in training.communicator.buckets) <= NUM_LAYERS


def test_only_the_forward_in_which_ddp_rebuilds_its_buckets_waits_for_all_sums():
    training = Training()
    num_waited = []
    for _ in range(3):
        training.stage(have_arrived=False)
        training.reduction.before_forward()
        num_waited.append(sum(bucket.num_waits > 0 for bucket in training.communicator.buckets))
        training.layers(torch.ones(1, 3))
    assert num_waited == [NUM_LAYERS, 0, 0]


class NewDDP:
    """What the strategy wraps the module in when a parameter was unfrozen."""

    def register_comm_hook(self, state: None, hook: Callable[..., Any]) -> None: ...


def test_the_forward_in_which_a_new_ddp_rebuilds_its_buckets_waits_for_all_sums():
    """Not the one before it, in which it has reduced nothing yet."""
    training = Training()
    training.stage(have_arrived=False)
    training.reduction.updates.bring_up_to_date()
    training.reduction.feed_from(NewDDP())
    training.reduction.before_forward()
    training.stage(have_arrived=False)
    training.reduction.before_forward()
    assert all(bucket.num_waits > 0 for bucket in training.communicator.buckets)


def test_what_may_have_been_read_unseen_stays_watched_until_it_is_used(num_intercepted):
    training = Training(layers_in_bucket=NUM_LAYERS)
    training.stage(have_arrived=True)
    num_intercepted.clear()
    # A node of the graph, of which nobody knows what it has read.
    x = torch.ones(1, 3, requires_grad=True) * 2
    training.layers[0](x)
    assert not training.reduction.updates
    assert training.num_watched == 2 * (NUM_LAYERS - 1)
    training.layers(x)
    assert training.num_watched == 0
    before = len(num_intercepted)
    training.layers(x)
    assert len(num_intercepted) == before


def test_nothing_stays_watched_after_a_forward_that_used_less_than_all():
    training = Training(layers_in_bucket=NUM_LAYERS)
    training.stage(have_arrived=True)
    training.layers[0](torch.ones(1, 3, requires_grad=True) * 2)
    assert training.num_watched > 0
    training.begin_forward()
    assert training.num_watched == 0


def test_a_pending_update_outlives_the_suspicion_of_an_earlier_one():
    """Two optimizers over the same parameters: those that the first has updated are pending again."""
    training = Training(layers_in_bucket=NUM_LAYERS)
    training.stage(have_arrived=True)
    other = torch.optim.SGD(training.layers.parameters(), lr=1.0)
    x = torch.ones(1, 3, requires_grad=True) * 2
    training.layers[0](x)  # the others are suspects now
    training.reduction.updates.stage(other)
    training.begin_forward()
    assert training.num_watched == 2 * NUM_LAYERS
    with torch._C.DisableTorchFunctionSubclass():
        before = training.layers[5].weight.detach().clone()
    assert torch.equal(training.layers[5].weight.detach(), before - 1)


def test_a_gradient_that_was_read_or_set_before_the_step_is_used_in_the_step(num_steps):
    """Code that holds the gradient may change it after the step. The other buckets stay pending."""
    training = Training()
    first, second = training.layers[0].weight, training.layers[1].weight
    held = torch.full((3, 3), 2.0)
    with torch._C.DisableTorchFunctionSubclass():
        before = [first.detach().clone(), second.detach().clone()]

    def read_and_set():
        held_too.append(first.grad)
        second.grad = held

    held_too: list[Tensor] = []
    training.stage(have_arrived=False, before_step=read_and_set)
    held_too[0].zero_()
    held.zero_()
    assert training.num_watched == 2 * (NUM_LAYERS - 2)
    assert torch.equal(first.detach(), before[0] - 1)
    assert torch.equal(second.detach(), before[1] - 2)
    assert len(num_steps) == 2


def test_a_use_waits_for_an_update_that_another_thread_applies(monkeypatch):
    """A thread that logs weights takes a bucket's step. Meanwhile the forward uses another parameter of the bucket."""
    training = Training(layers_in_bucket=NUM_LAYERS)
    training.stage(have_arrived=True)
    weight = training.layers[1].weight
    with torch._C.DisableTorchFunctionSubclass():
        expected = weight.detach() - 1
    read: list[Tensor] = []
    reader = threading.Thread(target=lambda: read.append(weight.detach().clone()))
    step = torch.optim.SGD.step

    def step_while_it_is_read(optimizer):
        assert is_watched(weight)
        reader.start()
        step(optimizer)

    monkeypatch.setattr(torch.optim.SGD, "step", step_while_it_is_read)
    logger = threading.Thread(target=lambda: training.layers[0].weight.detach())
    logger.start()
    logger.join()
    reader.join()
    assert torch.equal(read[0], expected)
    assert not training.reduction.updates


def test_a_copy_of_the_hook_that_a_ddp_keeps_has_no_part_in_the_reduction():
    training = Training()
    for copied in (copy.deepcopy, lambda hook: pickle.loads(pickle.dumps(hook))):  # noqa: S301  made a line above
        assert copied(training.reduction._reduce_bucket).__self__ is not training.reduction
