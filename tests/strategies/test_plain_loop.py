"""Layered SGD and the sharded head in a loop without a Trainer equal one process with the batches of all ranks."""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_dp.collectives.all_to_all import Channel
from lightning_dp.optim import LARS
from lightning_dp.strategies.krizhevsky_hybrid import fit
from lightning_dp.strategies.krizhevsky_hybrid.head import ShardedHead
from lightning_dp.strategies.layered_sgd.host_communicator import BucketReduction
from lightning_dp.strategies.plain_loop import LayeredSGDLoop, sharded_head
from tests.ranks import run_cases, run_processes

STEPS, MAX_NORM = 4, 0.5


class OwnSGD(torch.optim.SGD):
    """An optimizer of the user's, whose step is not postponed."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(5, 7), nn.Tanh())
        self.head = nn.Sequential(nn.Linear(7, 6), nn.ReLU(), nn.Linear(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.trunk(x))


def problem() -> tuple[Net, Tensor, Tensor]:
    """The same on all ranks: in step t, rank r trains with x[t, r]."""
    torch.manual_seed(0)
    world_size = dist.get_world_size()
    x = 3 * torch.randn(STEPS, world_size, 2, 5, dtype=torch.float64)
    return Net().double(), x, torch.randint(3, (STEPS, world_size, 2))


def sgd(model: nn.Module, kind: type[torch.optim.SGD] = torch.optim.SGD) -> torch.optim.Optimizer:
    return kind(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def in_one_process(model: Net, x: Tensor, y: Tensor, clips: bool) -> torch.optim.Optimizer:
    optimizer = sgd(model)
    for each_x, each_y in zip(x.flatten(1, 2), y.flatten(1, 2), strict=True):
        optimizer.zero_grad()
        F.cross_entropy(model(each_x), each_y).backward()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
    return optimizer


def assert_equal(model: Net, expected: Net) -> None:
    for (name, ours), theirs in zip(model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")


def layered(
    model: Net, x: Tensor, y: Tensor, clips: bool, kind: Any, then: type[Exception] | None = None, **options: Any
) -> torch.optim.Optimizer:
    optimizer = sgd(model, kind)
    with LayeredSGDLoop(model, 2, bucket_cap_mb=1e-4, **options) as loop:
        for each_x, each_y in zip(x[:, dist.get_rank()], y[:, dist.get_rank()], strict=True):
            loss = F.cross_entropy(loop(each_x), each_y)
            optimizer.zero_grad()
            loop.backward(loss)
            if clips:
                nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            loop.step(optimizer)
        if then is not None:
            raise then
    return optimizer


LAYERED: dict[str, tuple[bool, Any, dict[str, Any]]] = {
    "step": (False, torch.optim.SGD, {}),
    "load": (False, torch.optim.SGD, {"overlap": "load"}),
    "sharded": (False, torch.optim.SGD, {"communicator": "sharded"}),
    "clipped": (True, torch.optim.SGD, {}),
    "optimizer of the user's": (False, OwnSGD, {}),
}


def layered_equals_one_process(rank: int, case: str) -> None:
    clips, kind, options = LAYERED[case]
    model, x, y = problem()
    expected, alone = copy.deepcopy(model), copy.deepcopy(model)
    optimizer = layered(model, x, y, clips, kind, **options)
    theirs = in_one_process(expected, x, y, clips)
    assert_equal(model, expected)
    for ours, other in zip(optimizer.state.values(), theirs.state.values(), strict=True):
        torch.testing.assert_close(ours["momentum_buffer"], other["momentum_buffer"], rtol=1e-10, atol=1e-10)
    in_one_process(alone, x[:, rank, None], y[:, rank, None], clips)
    with pytest.raises(AssertionError):  # the ranks' data do matter
        assert_equal(alone, expected)


def whole_head(model: Net, x: Tensor, y: Tensor, clips: bool, scheme: Any) -> int:
    rank = dist.get_rank()
    with sharded_head(model, "head", scheme) as head:
        assert model.head[0].weight.shape[0] < 6
        ddp = DistributedDataParallel(model)
        optimizer = sgd(model)
        for each_x, each_y in zip(x[:, rank], y[:, rank], strict=True):
            loss = F.cross_entropy(ddp(each_x), each_y)
            optimizer.zero_grad()
            head.backward(loss)
            if clips:
                head.clip_grad_norm(MAX_NORM)
            head.step(optimizer)
    return head.bytes_sent


def hybrid_equals_one_process(rank: int, case: str) -> None:
    scheme, _, clips = case.partition(" ")
    model, x, y = problem()
    expected = copy.deepcopy(model)
    assert whole_head(model, x, y, bool(clips), scheme) > 0
    in_one_process(expected, x, y, bool(clips))
    assert_equal(model, expected)


def both(rank: int, case: str) -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    (layered_equals_one_process if case in LAYERED else hybrid_equals_one_process)(rank, case)


def test_both_equal_one_process_with_all_batches():
    run_cases(4, both, [*LAYERED, "a", "b", "c", "c clipped"])


def with_a_host_group(rank: int) -> None:
    """As with NCCL, which sends nothing from host memory."""
    dist.init_process_group("gloo")
    made = []
    default, destroy = fit.make_host_group, fit.destroy_group
    fit.make_host_group = lambda group, device, timeout: made.append(dist.new_group()) or made[-1]
    fit.destroy_group = lambda group: made.remove(group) if group in made else destroy(group)
    sent = Counter()
    gather = Channel.gather_integers
    Channel.gather_integers = lambda self, *args: sent.update([self.host_group in made]) or gather(self, *args)
    try:
        hybrid_equals_one_process(rank, "c")
    finally:
        fit.make_host_group, fit.destroy_group = default, destroy
        Channel.gather_integers = gather
    assert set(sent) == {True}
    assert not made, "it is destroyed"


def test_numbers_that_the_host_needs_have_a_group_of_their_own_where_the_backend_cannot_send_them():
    run_processes(2, with_a_host_group)


def two_models(rank: int, case: str) -> None:
    """One optimizer over two models, each with its own loss and its own loop."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    one, x, y = problem()
    two = copy.deepcopy(one)
    expected = nn.ModuleList([copy.deepcopy(one), copy.deepcopy(two)])
    theirs = sgd(expected)
    for each_x, each_y in zip(x.flatten(1, 2), y.flatten(1, 2), strict=True):
        theirs.zero_grad()
        (F.cross_entropy(expected[0](each_x), each_y) + F.cross_entropy(expected[1](-each_x), each_y)).backward()
        theirs.step()
    optimizer = sgd(nn.ModuleList([one, two]))
    options: dict[str, Any] = {"overlap": case, "bucket_cap_mb": 1e-4}
    with LayeredSGDLoop(one, 1, **options) as first, LayeredSGDLoop(two, 1, **options) as second:
        for each_x, each_y in zip(x[:, rank], y[:, rank], strict=True):
            optimizer.zero_grad()
            first.backward(F.cross_entropy(first(each_x), each_y))
            second.backward(F.cross_entropy(second(-each_x), each_y))
            first.step(optimizer)
    assert_equal(one, expected[0])
    assert_equal(two, expected[1])


def test_one_optimizer_may_step_the_models_of_two_loops():
    run_cases(2, two_models, ["step", "load"])


def two_loops_in_turn(rank: int) -> None:
    """They step one optimizer. After the loop of the first model has ended, that of the second goes on."""
    dist.init_process_group("gloo")
    one, x, y = problem()
    two = copy.deepcopy(one)
    expected = [copy.deepcopy(one), copy.deepcopy(two)]
    optimizer, theirs = sgd(nn.ModuleList([one, two])), sgd(nn.ModuleList(expected))
    first, second = LayeredSGDLoop(one, 1), LayeredSGDLoop(two, 1)
    turns = [(first, 0), (second, 1), (first, 0), (second, 1), (second, 1)]
    for step, (loop, place) in enumerate(turns):
        optimizer.zero_grad()
        theirs.zero_grad()
        loop.backward(F.cross_entropy(loop(x[0, rank]), y[0, rank]))
        F.cross_entropy(expected[place](x[0].flatten(0, 1)), y[0].flatten(0, 1)).backward()
        loop.step(optimizer)
        theirs.step()
        if step == 3:
            first.__exit__(None, None, None)
        momenta = [state["momentum_buffer"] for state in optimizer.state.values()]
        for momentum, other in zip(momenta, theirs.state.values(), strict=True):
            torch.testing.assert_close(momentum, other["momentum_buffer"], rtol=0, atol=1e-10)
    second.__exit__(None, None, None)
    assert type(optimizer.state) is type(theirs.state)


def test_the_state_of_an_optimizer_shows_the_steps_of_two_loops():
    run_processes(2, two_loops_in_turn)


class LeavesOut(Net):
    """Every second step leaves out the middle layer."""

    uses_middle = True

    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.Linear(7, 7)

    def forward(self, x: Tensor) -> Tensor:
        x = self.trunk(x)
        return self.head(self.middle(x) if self.uses_middle else x)


def backward_of_the_loss(rank: int) -> None:
    """As it stands in a program that was written for DistributedDataParallel."""
    dist.init_process_group("gloo")
    BucketReduction.has_arrived = property(lambda self: False)  # no update is applied before its parameters are used
    _, x, y = problem()
    model = LeavesOut().double()
    expected = copy.deepcopy(model)
    optimizer, theirs = sgd(model), sgd(expected)
    with LayeredSGDLoop(model, 1, bucket_cap_mb=1e-4, find_unused_parameters=True) as loop:
        for step in range(STEPS):
            model.uses_middle = expected.uses_middle = step % 2 == 0
            optimizer.zero_grad()
            F.cross_entropy(loop(x[step, rank]), y[step, rank]).backward()
            loop.step(optimizer)
            theirs.zero_grad()
            F.cross_entropy(expected(x[step].flatten(0, 1)), y[step].flatten(0, 1)).backward()
            theirs.step()
    assert_equal(model, expected)


@pytest.mark.ci
def test_a_backward_that_does_not_pass_through_the_loop_loses_no_update():
    run_processes(2, backward_of_the_loss)


def trained_until_an_exception(rank: int, case: str) -> None:
    """A loop that is left by an exception right after a step has the weights of one that ends there."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    model, x, y = problem()
    expected = copy.deepcopy(model)
    layered(expected, x, y, False, torch.optim.SGD, overlap=case)
    with pytest.raises(KeyError):
        layered(model, x, y, False, torch.optim.SGD, overlap=case, then=KeyError)
    assert_equal(model, expected)


@pytest.mark.ci
def test_an_exception_loses_no_update():
    run_cases(4, trained_until_an_exception, ["step", "load"])


def fails_after_its_peer_is_gone(rank: int) -> str:
    dist.init_process_group("gloo")
    model, x, y = problem()
    error = ""
    try:
        with LayeredSGDLoop(model, 1) as loop:
            loss = F.cross_entropy(loop(x[0, rank]), y[0, rank])
            if rank == 0:
                loop.backward(loss)
                loop.step(sgd(model))
            raise KeyError(rank)
    except KeyError as raised:
        error = " ".join(getattr(raised, "__notes__", ()))
    return error


def test_an_update_that_cannot_be_applied_after_an_exception_is_a_note():
    first, second = run_processes(2, fails_after_its_peer_is_gone)
    assert "the update of the last step is lost" in first
    assert second == ""


def refused(message: str, call: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def refusals(rank: int) -> None:
    dist.init_process_group("gloo")
    logging.getLogger("lightning_dp").setLevel(logging.ERROR)
    model, x, _ = problem()
    refused("single group of 2 ranks", lambda: LayeredSGDLoop(model, 2))
    refused("not a multiple of group_size=3", lambda: LayeredSGDLoop(model, 3))
    refused("ddp_comm_hook cannot be given", lambda: LayeredSGDLoop(model, 1, ddp_comm_hook=print))
    of_two = dist.new_group([0, 1])
    refused("process_group cannot be given.*over all ranks", lambda: LayeredSGDLoop(model, 1, process_group=of_two))
    refused("device_mesh cannot be given", lambda: LayeredSGDLoop(model, 1, device_mesh="mesh"))
    refused("names no submodule", sharded_head(model, "tail").__enter__)
    with sharded_head(model, "head") as head:
        refused("computes with whole parameters", lambda: head.step(LARS(model.parameters(), 0.1)))
        model(x[0, rank])
        refused("does not depend on what 'head' has returned", lambda: head.backward(model.trunk[0].weight.sum()))
    # After an exception, the head keeps this rank's rows, and that is seen.
    with pytest.raises(KeyError), sharded_head(model, "head"):
        raise KeyError
    refused("one rank's local shard", sharded_head(model, "head").__enter__)


def test_what_cannot_work_is_refused():
    run_processes(2, refusals)


def with_another_head(rank: int) -> None:
    """The oracle notices a head that computes something else."""
    dist.init_process_group("gloo")

    compute = ShardedHead.__call__

    def doubled(head: ShardedHead, *args: Any) -> Tensor:
        return 2 * compute(head, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardedHead, "__call__", doubled)
        with pytest.raises(AssertionError, match=r"trunk\.0\.weight"):
            hybrid_equals_one_process(rank, "a")


def test_another_head_is_noticed():
    run_processes(2, with_another_head)
