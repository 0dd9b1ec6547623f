"""A postponed update: staged, applied bucket by bucket or whole, as if it had been done at once."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from lightning_dp.strategies.layered_sgd.parameter_watch import ParameterWatch, is_watched
from lightning_dp.strategies.layered_sgd.pending_update import PendingUpdates


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
        self.updates = PendingUpdates(self.watch.remove)
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


# --- which parameters are updated when ---


def test_using_a_parameter_updates_its_bucket_and_no_other():
    staged = Staged()
    staged.layers[1](torch.ones(1, 3))
    assert staged.updated() == [False, False, True, True]
    assert [bucket.num_waits for bucket in staged.buckets] == [0, 1]
    assert [is_watched(p) for p in staged.parameters] == [True, True, False, False]


def test_buckets_that_have_arrived_are_updated_in_the_same_step():
    staged = Staged()
    staged.buckets[0].has_arrived = True
    staged.layers[1](torch.ones(1, 3))
    assert staged.updated() == [True] * 4
    assert not staged.updates


def test_a_whole_update_waits_for_all_buckets():
    staged = Staged(whole=True)
    staged.layers[1](torch.ones(1, 3))
    assert staged.updated() == [True] * 4


def test_finishing_is_one_step_of_the_optimizer():
    staged = Staged()
    calls = []
    step = staged.optimizer.step
    staged.optimizer.step = lambda: calls.append(step())
    staged.updates.finish()
    assert len(calls) == 1
    assert staged.updated() == [True] * 4


def test_a_bucket_s_step_sees_that_bucket_s_parameters_alone():
    staged = Staged()
    seen = []

    class Noting(torch.optim.SGD):
        def step(self, closure=None):
            seen.append([len(group["params"]) for group in self.param_groups])
            return super().step(closure)

    staged.optimizer.__class__ = Noting
    staged.layers[0](torch.ones(1, 3))
    assert seen == [[2]]
    assert len(staged.optimizer.param_groups[0]["params"]) == 4


def test_parameters_of_a_step_keep_the_order_of_the_optimizer():
    """A norm over all gradients depends on the order of summation."""
    staged = Staged(whole=True)
    staged.updates.clear()
    order = []

    def step():
        order.extend(p for group in staged.optimizer.param_groups for p in group["params"])

    for parameter in staged.parameters:
        parameter.grad = torch.ones_like(parameter)
    reductions = dict(zip(staged.parameters, [staged.buckets[1], *staged.buckets, staged.buckets[0]], strict=True))
    staged.updates.stage(staged.optimizer, reductions, step)
    staged.updates.finish()
    assert [id(p) for p in order] == [id(p) for p in staged.parameters]


def test_a_failed_reduction_leaves_the_update_pending():
    staged = Staged()
    staged.buckets[0].error = RuntimeError("peer gone")
    with pytest.raises(RuntimeError, match="peer gone"):
        staged.updates.finish()
    assert staged.updated() == [False] * 4
    assert set(staged.updates.parameters()) == set(staged.parameters)


# --- hyperparameters ---


def test_the_hyperparameters_are_those_of_the_staging():
    staged = Staged()
    staged.optimizer.param_groups[0]["lr"] = 100.0  # a schedule moves on
    staged.updates.finish()
    assert staged.optimizer.param_groups[0]["lr"] == 100.0
    torch.testing.assert_close(staged.parameters[0].detach(), staged.before[0] - 1.0)


def test_a_tensor_as_hyperparameter_keeps_its_identity_and_its_present_value():
    rate = torch.tensor(1.0)
    staged = Staged(lr=rate)
    rate.fill_(100.0)
    staged.updates.finish()
    assert staged.optimizer.param_groups[0]["lr"] is rate
    assert rate == 100.0
    torch.testing.assert_close(staged.parameters[0].detach(), staged.before[0] - 1.0)


def test_a_group_may_be_added_while_an_update_is_pending():
    staged = Staged()
    staged.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))], "lr": 0.3})
    staged.updates.finish()
    assert staged.updated() == [True] * 4
    assert [group["lr"] for group in staged.optimizer.param_groups] == [1.0, 0.3]


def test_what_the_step_itself_changes_stays_changed():
    staged = Staged(whole=True)
    staged.updates.clear()
    staged.parameters[0].grad = torch.ones_like(staged.parameters[0])

    def step():
        staged.optimizer.param_groups[0]["lr"] = 0.5

    staged.updates.stage(staged.optimizer, {}, step)
    staged.optimizer.param_groups[0]["weight_decay"] = 7.0
    staged.updates.finish()
    assert staged.optimizer.param_groups[0]["lr"] == 0.5
    assert staged.optimizer.param_groups[0]["weight_decay"] == 7.0


def test_a_failing_step_leaves_the_present_hyperparameters_and_state():
    staged = Staged()
    staged.updates.clear()
    staged.parameters[0].grad = torch.ones_like(staged.parameters[0])
    state = staged.optimizer.state

    def fail():
        raise KeyError("lost")

    staged.updates.stage(staged.optimizer, {}, fail)
    staged.optimizer.param_groups[0]["lr"] = 7.0
    with pytest.raises(KeyError):
        staged.updates.finish()
    assert staged.optimizer.param_groups[0]["lr"] == 7.0
    assert staged.optimizer.state is state


# --- gradients and state are what they would be without postponing ---


def test_gradients_stay_after_the_update_as_the_optimizer_leaves_them():
    staged = Staged()
    staged.updates.finish()
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in staged.parameters)


def test_a_gradient_that_was_zeroed_while_pending_is_used_and_stays_zeroed():
    staged = Staged()
    staged.optimizer.zero_grad()
    assert staged.updated() == [False] * 4, "zero_grad only drops the gradients, and waits for nothing"
    staged.updates.finish()
    assert staged.updated() == [True] * 4
    assert [p.grad for p in staged.parameters] == [None] * 4


@pytest.mark.parametrize("zero", [lambda s: s.optimizer.zero_grad(False), lambda s: s.layers.zero_grad(False)])
def test_zeroing_in_place_updates_first(zero):
    staged = Staged()
    zero(staged)
    assert staged.updated() == [True] * 4
    assert all(not p.grad.any() for p in staged.parameters)


def test_reading_a_gradient_updates_its_parameter_first_so_that_changing_it_changes_no_update():
    staged = Staged()
    staged.parameters[2].grad.fill_(1000.0)
    assert staged.updated() == [False, False, True, True]
    torch.testing.assert_close(staged.parameters[2].detach(), staged.before[2] - 1.0)


def test_a_second_step_of_the_optimizer_comes_after_the_first():
    staged = Staged(momentum=0.5)
    staged.stage()
    staged.updates.finish()
    torch.testing.assert_close(staged.parameters[0].detach(), staged.before[0] - 1.5)


def test_another_optimizer_over_the_same_parameters_comes_after_the_first():
    staged = Staged()
    other = torch.optim.SGD(staged.parameters, lr=2.0)
    staged.watch.add(staged.parameters)
    staged.updates.stage(other, {})
    assert staged.updated() == [True] * 4, "the first one's update is applied"
    staged.updates.finish()
    torch.testing.assert_close(staged.parameters[0].detach(), staged.before[0] - 3.0)


STATE_USES = {
    "read": lambda optimizer: optimizer.state[optimizer.param_groups[0]["params"][0]],
    "iterate": lambda optimizer: list(optimizer.state),
    "length": lambda optimizer: len(optimizer.state),
    "contains": lambda optimizer: optimizer.param_groups[0]["params"][0] in optimizer.state,
    "items": lambda optimizer: dict(optimizer.state.items()),
    "get": lambda optimizer: optimizer.state.get(optimizer.param_groups[0]["params"][0]),
    "clear": lambda optimizer: optimizer.state.clear(),
    "set": lambda optimizer: optimizer.state.__setitem__(optimizer.param_groups[0]["params"][0], {}),
    "state_dict": lambda optimizer: optimizer.state_dict(),
    "deepcopy": lambda optimizer: copy.deepcopy(optimizer),
    "pickle": lambda optimizer: pickle.dumps(optimizer),
    "print": lambda optimizer: repr(optimizer.state),
    "default_factory": lambda optimizer: optimizer.state.default_factory,
}


@pytest.mark.parametrize("use", STATE_USES)
def test_looking_at_the_optimizer_s_state_finishes_the_update_first(use):
    staged = Staged(momentum=0.9)
    STATE_USES[use](staged.optimizer)
    assert staged.updated() == [True] * 4
    assert not staged.updates
    assert type(staged.optimizer.state).__name__ == "defaultdict"


def test_the_state_that_a_reader_gets_is_that_after_the_update():
    staged = Staged(momentum=0.9)
    state = staged.optimizer.state
    torch.testing.assert_close(
        state[staged.parameters[0]]["momentum_buffer"], torch.ones(3, 3), msg="no momentum from the pending step"
    )
    assert len(state) == 4, "a reference to the state that was taken while the update was pending goes on to work"


def test_a_state_that_is_put_in_place_of_the_pending_one_stays():
    staged = Staged(momentum=0.9)
    other = {}
    staged.optimizer.state = other
    staged.updates.finish()
    assert staged.updated() == [True] * 4
    assert staged.optimizer.state is other


def test_the_schedule_does_not_warn_of_a_step_that_is_only_postponed(recwarn):
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    layer.weight.grad = torch.ones_like(layer.weight)
    PendingUpdates().stage(optimizer, {})
    schedule.step()
    assert not recwarn.list


# --- wherever the reader stands ---


class Mode(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_the_reader_s_inference_mode_and_autocast_are_not_the_step_s():
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(layer.parameters())
    updates = PendingUpdates()
    watch = ParameterWatch(updates.apply_for, updates.apply_for)
    for _ in range(2):
        layer.weight.grad = torch.ones_like(layer.weight)
        watch.add([layer.weight])
        updates.stage(optimizer, {})
        with torch.inference_mode(), torch.autocast("cpu"):
            layer(torch.ones(1, 2))
        watch.remove([layer.weight])
        layer.weight.grad = torch.ones_like(layer.weight)
        optimizer.step()  # in place, outside of inference mode


def test_the_reader_s_dispatch_mode_does_not_see_the_step():
    staged = Staged()
    with Mode() as mode:
        staged.layers[0](torch.ones(1, 3))
    assert staged.updated()[0]
    assert not any("add_" in name for name in mode.seen), mode.seen
    assert any("addmm" in name for name in mode.seen)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own use of it, for jvp
@pytest.mark.parametrize(
    "transform",
    [
        lambda function: torch.func.grad(function)(torch.ones(3)),
        lambda function: torch.func.jacrev(function)(torch.ones(3)),
        lambda function: torch.func.vmap(function)(torch.ones(2, 3)),
        lambda function: torch.func.jvp(function, (torch.ones(3),), (torch.ones(3),)),
    ],
)
def test_a_parameter_that_a_functional_transform_captures_is_updated_first(transform):
    staged = Staged()
    expected = Staged()
    expected.layers.load_state_dict(staged.layers.state_dict())
    staged.stage()
    for parameter in expected.parameters:
        parameter.data -= 1.0
    weight, fresh = staged.layers[0].weight, expected.layers[0].weight.detach()
    got = transform(lambda x: (weight @ x).square().sum())
    torch.testing.assert_close(got, transform(lambda x: (fresh @ x).square().sum()))
    assert staged.updated()[0]
