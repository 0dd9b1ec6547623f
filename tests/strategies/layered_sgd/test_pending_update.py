"""A postponed update: staged, applied bucket by bucket or whole, as if it had been done at once."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from tests.strategies.layered_sgd.staged import Staged, is_watched

# --- which parameters are updated when ---


def test_using_a_parameter_updates_its_bucket_and_no_other():
    staged = Staged()
    staged.layers[1](torch.ones(1, 3))
    assert staged.updated() == [False, False, True, True]
    assert [bucket.num_waits > 0 for bucket in staged.buckets] == [False, True]
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


def test_a_step_of_the_caller_s_may_go_by_bucket():
    staged = Staged()
    staged.updates.finish()
    staged.run_backward()
    seen = []

    def step(optimizer):
        seen.append([len(group["params"]) for group in optimizer.param_groups])
        optimizer.step()

    staged.updates.stage(staged.optimizer, step)
    staged.layers[1](torch.ones(1, 3))
    assert staged.updated() == [False, False, True, True]
    staged.updates.finish()
    assert staged.updated() == [True] * 4
    assert seen == [[2], [2]]


def test_finishing_is_one_step_of_the_optimizer():
    staged = Staged()
    calls = []

    class Noting(torch.optim.SGD):
        def step(self, closure=None):
            calls.append(None)
            return super().step(closure)

    staged.optimizer.__class__ = Noting
    staged.updates.finish()
    assert len(calls) == 1
    assert staged.updated() == [True] * 4


def test_a_hook_that_comes_after_the_staging_does_not_see_the_step():
    """Without the postponement the step would have been taken before."""
    staged = Staged()
    seen = []
    staged.optimizer.register_step_pre_hook(lambda *_: seen.append(None))
    staged.updates.finish()
    assert staged.updated() == [True] * 4
    assert not seen


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
    staged.updates.close()
    order = []

    def step(optimizer):
        order.extend(p for group in optimizer.param_groups for p in group["params"])

    staged.fill_buckets()
    for parameter, bucket in zip(staged.parameters, [1, 0, 1, 0], strict=True):
        staged.updates.add_sum([parameter], staged.buckets[bucket])
    staged.updates.stage(staged.optimizer, step, by_bucket=False)
    staged.updates.finish()
    assert [id(p) for p in order] == [id(p) for p in staged.parameters]


def test_a_failed_reduction_leaves_the_update_pending():
    staged = Staged()
    staged.buckets[0].error = RuntimeError("peer gone")
    with pytest.raises(RuntimeError, match="peer gone"):
        staged.updates.finish()
    assert staged.updated() == [False] * 4
    staged.buckets[0].error = None
    staged.updates.finish()
    assert staged.updated() == [True] * 4


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


def test_a_failing_step_leaves_the_present_hyperparameters_and_state():
    staged = Staged()
    staged.updates.finish()
    staged.fill_buckets()
    state = staged.optimizer.state

    def fail(optimizer):
        optimizer.param_groups[0]["lr"] = 5.0
        raise KeyError("lost")

    staged.updates.stage(staged.optimizer, fail, by_bucket=False)
    staged.optimizer.param_groups[0]["lr"] = 7.0
    with pytest.raises(KeyError):
        staged.updates.finish()
    assert staged.optimizer.param_groups[0]["lr"] == 7.0
    assert staged.optimizer.state is state


# --- wherever the reader stands ---


class Mode(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_the_reader_s_inference_mode_and_autocast_are_not_the_step_s():
    staged = Staged(momentum=0.5)
    for _ in range(2):
        with torch.inference_mode(), torch.autocast("cpu"):
            staged.layers[0](torch.ones(1, 3))
        assert staged.updated()[0]
        staged.fill_buckets()
        staged.optimizer.step()  # in place, outside of inference mode
        staged.stage()


def test_the_reader_s_default_dtype_is_not_the_step_s():
    staged = Staged()
    staged.updates.finish()
    staged.optimizer = torch.optim.NAdam(staged.parameters)
    staged.stage()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        staged.layers[0].weight.sum()
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(before)
    assert staged.optimizer.state[staged.layers[0].weight]["mu_product"].dtype == torch.float32


def test_a_trace_does_not_record_the_step():
    staged = Staged(momentum=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that tracing is deprecated, and finds constants
        traced = torch.jit.trace(staged.layers[0], torch.ones(1, 3))
    assert staged.updated()[0]
    expected = staged.layers[0](torch.ones(1, 3))
    for _ in range(2):
        assert torch.equal(traced(torch.ones(1, 3)), expected)
    assert not any("add_" in str(node) for node in traced.graph.nodes())


def test_the_reader_s_dispatch_mode_does_not_see_the_step():
    staged = Staged()
    with Mode() as mode:
        staged.layers[0](torch.ones(1, 3))
    assert staged.updated()[0]
    assert not any("add_" in name for name in mode.seen), mode.seen
    assert any("addmm" in name for name in mode.seen)


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
