"""Gradients and the optimizer's state are what they would be if the update were not postponed."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from lightning_dp.strategies.layered_sgd.update import UpdateQueue
from tests.strategies.layered_sgd.staged import Staged


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
    staged.updates.stage(other)
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
    "union": lambda optimizer: optimizer.state | {},
    "default_factory": lambda optimizer: optimizer.state.default_factory,
}


@pytest.mark.parametrize("use", STATE_USES)
def test_looking_at_the_optimizer_s_state_finishes_the_update_first(use):
    staged = Staged(momentum=0.9)
    STATE_USES[use](staged.optimizer)
    assert staged.updated() == [True] * 4
    assert not staged.updates


def test_asking_for_a_state_that_is_not_there_makes_none():
    staged = Staged()
    state, parameter = staged.optimizer.state, staged.parameters[0]
    assert state.get(parameter) is None
    assert state.get(parameter, "none") == "none"
    assert state.pop(parameter, "none") == "none"
    with pytest.raises(KeyError):
        state.pop(parameter)
    assert parameter not in state
    assert state.setdefault(parameter, {"own": 1}) == {"own": 1}
    assert state[parameter] == {"own": 1}


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
    UpdateQueue(layer).stage(optimizer)
    schedule.step()
    assert not recwarn.list
