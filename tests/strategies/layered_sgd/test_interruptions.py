"""A signal handler or another thread looks at parameters and state while an update is on its way."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.optim import sgd

from lightning_dp.strategies.layered_sgd import host_communicator, update
from lightning_dp.strategies.layered_sgd.host_communicator import BucketReduction, Communicator
from tests.ranks import LIMIT_S
from tests.strategies.layered_sgd.staged import Bucket, Staged


class NoCollective:
    """In place of the hierarchical all-reduce of a single rank."""

    reduces_on_device = False

    def describe(self, stage: str) -> str:
        return stage

    def intra_group_reduce(self, buffer: torch.Tensor) -> list[Any]:
        return []

    def inter_group_all_reduce(self, buffer: torch.Tensor) -> None: ...

    def intra_group_broadcast(self, buffer: torch.Tensor) -> list[Any]:
        return []


def delivered(buffer: torch.Tensor) -> BucketReduction:
    """Return the sum of a bucket that `wait` has still to copy back to its buffer."""
    bucket = BucketReduction(0, buffer, NoCollective(), on_host=True)
    bucket.reduce_intra_group()
    bucket.reduce_inter_group()
    bucket.settle()
    return bucket


class WithSums(Staged):
    """Its buckets are real ones."""

    def fill_buckets(self) -> None:
        super().fill_buckets()
        self.buckets = [delivered(bucket.buffer) for bucket in self.buckets]


def train(make: type[Staged], whole: bool) -> Staged:
    torch.manual_seed(0)
    staged = make(whole, momentum=0.5)
    staged.updates.is_in_training_step = True  # else it looks for the caller's name
    staged.layers[1](torch.ones(1, 3))
    staged.stage(whole)
    staged.parameters[0].grad.sum()
    staged.optimizer.state[staged.parameters[2]]
    staged.stage(whole)
    staged.updates.finish()
    return staged


def at_line(
    number: int,
    handler: Callable[[], None],
    act: Callable[[], Any],
    files: Sequence[str] = (update.__file__, host_communicator.__file__),
) -> tuple[Any, bool]:
    """Run ``act``, and ``handler`` in between, before the line with this number, as Python runs a signal handler."""
    left = number

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in files:
            return None
        if event == "line":
            left -= 1
            if left == 0:
                sys.settrace(None)
                handler()
        return trace

    sys.settrace(trace)
    try:
        return act(), left <= 0
    finally:
        sys.settrace(None)


@pytest.mark.ci
@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("whole", [False, True])
def test_a_signal_handler_at_any_line_finds_a_whole_optimizer_and_changes_nothing(whole, stride):
    expected = train(WithSums, whole).optimizer.state_dict()
    made: list[Staged] = []

    class Noting(WithSums):
        def stage(self, whole=False):
            if not made:
                made.append(self)
            super().stage(whole)

    def save() -> None:
        if made:
            made[0].updates.finish()
            state = made[0].optimizer.state_dict()
            assert len(state["param_groups"][0]["params"]) == 4
            assert len(made[0].optimizer.param_groups[0]["params"]) == 4

    number, was_reached = 0, True
    while was_reached:
        number += stride
        made.clear()
        staged, was_reached = at_line(number, save, lambda: train(Noting, whole))
        assert not staged.updates
        actual = staged.optimizer.state_dict()
        for index, state in expected["state"].items():
            assert torch.equal(actual["state"][index]["momentum_buffer"], state["momentum_buffer"]), number
        staged.updates.close()  # a queue that is left would add lines to the next run
    assert number > 200


class FromZero(WithSums):
    """All its values stay equal to each other, because they begin at zero and each gradient is one."""

    made: FromZero | None = None

    def stage(self, whole: bool = False) -> None:
        FromZero.made = self
        self.updates.is_in_training_step = True  # else it looks for the caller's name
        for parameter in self.parameters:
            parameter.data.zero_()
        super().stage(whole)

    def step_whole(self, optimizer: torch.optim.Optimizer) -> None:
        assert len(optimizer.param_groups[0]["params"]) == 4
        super().step_whole(optimizer)

    def values(self) -> set[float]:
        with torch._C.DisableTorchFunctionSubclass():
            return set(torch.cat([parameter.detach().flatten() for parameter in self.parameters]).tolist())


@pytest.mark.ci
@pytest.mark.parametrize("whole", [False, True])
def test_a_signal_handler_finds_part_of_an_update_only_where_it_is_told_so(whole):
    num_told = num_parts = 0

    def save() -> None:
        nonlocal num_told, num_parts
        if (staged := FromZero.made) is not None:
            is_told = staged.updates.is_interrupted
            staged.updates.finish()
            is_part = len(staged.values()) > 1
            assert is_told or not is_part, f"line {number} run: {staged.values()}"
            num_told += is_told
            num_parts += is_part

    def train_once() -> FromZero:
        staged = FromZero(whole, momentum=0.5)
        staged.layers[0](torch.ones(1, 3))
        staged.updates.finish()
        return staged

    number, was_reached = 0, True
    while was_reached:
        number += 1
        FromZero.made = None
        staged, was_reached = at_line(number, save, train_once, files=(update.__file__, sgd.__file__))
        assert staged.values() == {-1.0}
        staged.updates.close()  # a queue that is left would add lines to the next run
    assert num_told >= num_parts > 0


def test_another_thread_gets_the_state_of_a_whole_step(monkeypatch):
    staged = Staged(momentum=0.5)
    step = torch.optim.SGD.step
    got: list[dict[str, Any]] = []
    reader = threading.Thread(target=lambda: got.append(staged.optimizer.state_dict()))
    groups: list[int] = []

    def step_while_it_is_read(optimizer):
        if not reader.ident:
            reader.start()
        groups.append(len(staged.optimizer.param_groups[0]["params"]))
        return step(optimizer)

    monkeypatch.setattr(torch.optim.SGD, "step", step_while_it_is_read)
    staged.layers[0](torch.ones(1, 3))
    reader.join()
    assert groups == [4, 4], "the thread has applied the other bucket"
    assert len(got[0]["state"]) == 4
    assert len(got[0]["param_groups"][0]["params"]) == 4


class Counted(NoCollective):
    """Counts how often each buffer is summed, and doubles it."""

    def __init__(self) -> None:
        self.num_sums: dict[float, int] = {}

    def inter_group_all_reduce(self, buffer: torch.Tensor) -> None:
        self.num_sums[buffer.item()] = self.num_sums.get(buffer.item(), 0) + 1
        buffer.mul_(2)

    def close(self) -> None: ...


def test_a_signal_handler_at_any_line_can_wait_for_any_bucket():
    def sum_both(made: list[BucketReduction], collective: Counted) -> None:
        communicator = Communicator(collective, False, timedelta(seconds=60), torch.device("cpu"))
        for value in (3.0, 5.0):
            made.append(communicator.submit(int(value), torch.tensor(value)))
        communicator.release()
        for bucket in made:
            bucket.wait()
        communicator.close()

    found: list[bool] = []

    def interrupted(number: int) -> None:
        made: list[BucketReduction] = []
        collective = Counted()

        def wait_for_all() -> None:
            for bucket in reversed(made):
                bucket.wait()

        _, was_reached = at_line(number, wait_for_all, lambda: sum_both(made, collective))
        assert [bucket.buffer.item() for bucket in made] == [6.0, 10.0]
        assert collective.num_sums == {3.0: 1, 5.0: 1}
        found.append(was_reached)

    number, was_reached = 0, True
    while was_reached:
        number += 1
        # In a daemon thread, so that a dead end fails the test and does not hang it.
        thread = threading.Thread(target=interrupted, args=(number,), daemon=True)
        thread.start()
        thread.join(LIMIT_S)
        assert len(found) == number, f"the handler has failed, or waits forever, before line {number} run"
        was_reached = found[-1]
    assert number > 50


def within_backward(act: Callable[[], Any]) -> None:
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda gradient: gradient if act() is None else None)
    (x * 2).sum().backward()


def test_a_value_that_is_used_within_backward_does_not_wait_for_the_gradient():
    """Its sum may come after that of a bucket which backward has not filled yet."""
    staged = Staged()
    staged.updates.finish()
    staged.fill_buckets()
    staged.updates.add_sum(list(staged.layers[0].parameters()), bucket := Bucket())
    within_backward(lambda: staged.layers[0].weight.detach())
    assert bucket.num_waits == 0
    staged.layers[0].weight.detach()
    assert bucket.num_waits == 1


def test_a_gradient_that_is_read_within_backward_stays_in_its_bucket():
    """DDP refuses another one at the end of backward."""
    staged = Staged()
    staged.updates.finish()
    staged.fill_buckets()
    staged.updates.add_sum(list(staged.layers[0].parameters()), staged.buckets[0])
    found: list[int] = []
    within_backward(lambda: found.append(staged.layers[0].weight.grad.untyped_storage().data_ptr()))
    assert found == [staged.buckets[0].buffer.untyped_storage().data_ptr()]


def test_what_interrupts_a_step_is_told_so(monkeypatch):
    staged = Staged()
    step = torch.optim.SGD.step
    seen: list[bool] = []
    monkeypatch.setattr(torch.optim.SGD, "step", lambda o: (seen.append(staged.updates.is_interrupted), step(o))[1])
    assert not staged.updates.is_interrupted
    staged.updates.finish()
    assert seen == [True]
    assert not staged.updates.is_interrupted
