"""FSDP2's collectives on the CPU that are started and awaited later."""

from __future__ import annotations

from collections import deque

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_dp.strategies.layered_fsdp import intra_group
from lightning_dp.strategies.layered_fsdp.intra_group import MAX_UNDER_WAY, Prefetch, ShardSum, StartedReduceScatter
from lightning_dp.strategies.layered_fsdp.reduction import Unit
from lightning_dp.strategies.layered_sgd.host_communicator import BucketReduction
from tests.ranks import RankError, run_processes
from tests.strategies.layered_fsdp.modules import fit, layered, snapshot
from tests.strategies.modules import Net, assert_same


def average(rank):
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    size = group.size()
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        input = (torch.arange(size * 3) + 10 * rank).to(dtype)
        expected = sum((torch.arange(size * 3) + 10 * other).to(torch.float64) for other in range(size)) / size
        for starts, num_groups in ((False, 2), (True, 2)):
            under_way: deque = deque()
            reduce_scatter = StartedReduceScatter(lambda output, starts=starts: starts, num_groups, under_way)
            output = torch.full((3,), torch.nan, dtype=dtype)
            reduce_scatter(output, input.clone(), group, dist.ReduceOp.SUM)
            shard_sum = reduce_scatter.take()
            assert (shard_sum is not None) == starts
            if shard_sum is not None:
                shard_sum.wait()
                output *= num_groups
            mine = expected.chunk(size)[rank].to(dtype)
            torch.testing.assert_close(output, mine, rtol=1e-2 if dtype.itemsize == 2 else 1e-6, atol=0)
    # The mean fits into 16 bits, the sum does not.
    output = torch.empty(1, dtype=torch.float16)
    StartedReduceScatter(lambda output: False, 1, deque())(
        output, torch.full((size,), 40000.0, dtype=torch.float16), group, dist.ReduceOp.SUM
    )
    torch.testing.assert_close(output, torch.full((1,), 40000.0, dtype=torch.float16), rtol=1e-2, atol=0)
    # A rank that is ahead waits for the first of its sums.
    sums: deque = deque()
    reduce_scatter = StartedReduceScatter(lambda output: True, 1, sums)
    outputs = [torch.empty(3) for _ in range(5)]
    for index, output in enumerate(outputs):
        reduce_scatter(output, torch.full((size * 3,), float(index)), group, dist.ReduceOp.SUM)
        assert len(sums) <= MAX_UNDER_WAY
    for shard_sum in sums:
        shard_sum.wait()
    assert [float(output[0]) for output in outputs] == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_a_started_reduce_scatter_averages():
    run_processes(3, average)


def see_what_overlaps(rank):
    """All units but the first one are gathered ahead; the sums of those that are used once are not awaited."""
    started, ahead = [], []
    take, after = StartedReduceScatter.take, Prefetch.after_gather
    StartedReduceScatter.take = lambda self: (started.append(self.under_way is not None), take(self))[1]

    def gather(self, unit):
        ahead.append(unit in self._ahead)
        after(self, unit)

    Prefetch.after_gather = gather
    fit(layered(), 4, Net(), steps=3)
    # Five forward passes of four units a step. In the first step their order is not known yet.
    assert ahead == [False] * 5 + [False, True, True, True, True] * 2, ahead
    # The first and the last layer's, in each step; the shared one is reduced twice, and awaited.
    assert sum(started) == 6, started


@pytest.mark.ci
def test_units_are_gathered_ahead_and_summed_behind():
    run_processes(4, see_what_overlaps)


class Halves(Net):
    """A forward that changes a parameter of the part that comes next."""

    def forward(self, x):
        x = torch.tanh(self.first(x))
        with torch.no_grad():
            self.shared.weight.mul_(0.5)
        return self.last(torch.tanh(self.shared(x)))


def change_within_forward(rank, is_checked):
    if not is_checked:
        Prefetch.before_gather = lambda self, unit: None
    expected = snapshot(*fit(layered(4), 4, Halves()))  # one group: plain FSDP2, which gathers nothing ahead
    assert_same(snapshot(*fit(layered(), 4, Halves())), expected)


@pytest.mark.ci
def test_what_the_forward_changes_is_gathered_again():
    run_processes(4, change_within_forward, True)


@pytest.mark.ci
def test_differs_if_what_was_gathered_ahead_is_not_checked():
    with pytest.raises(RankError, match="weight"):
        run_processes(4, change_within_forward, False)


class LateSum(ShardSum):
    """Fills its output when it is awaited, and no earlier."""

    def __init__(self, output, input, group, scale):
        self.output = output
        self.sum = torch.empty_like(output)
        super().__init__(self.sum, input, group, scale)

    def is_completed(self):
        return False

    def wait(self):
        super().wait()
        self.output.copy_(self.sum)


def start_late_sums(rank, is_right):
    """If not, the sum of the shared layer starts although its second use adds to the gradient."""
    expected = snapshot(*fit(layered(4), 4, Net()))
    intra_group.ShardSum = LateSum
    if not is_right:
        Unit.is_completed_by = lambda self, output: True
    assert_same(snapshot(*fit(layered(), 4, Net())), expected)


@pytest.mark.ci
def test_late_sums_are_awaited():
    run_processes(4, start_late_sums, True)


@pytest.mark.ci
def test_differs_if_a_sum_is_not_awaited_that_another_backward_adds_to():
    with pytest.raises(RankError):
        run_processes(4, start_late_sums, False)


class Later:
    """Fills the buffer when it is awaited."""

    def __init__(self, buffer):
        self.buffer = buffer

    def is_completed(self):
        return False

    def wait(self):
        self.buffer.fill_(1.0)


class Alone:
    reduces_on_device = False

    def intra_group_reduce(self, buffer):
        return []


def test_a_sum_between_groups_begins_when_its_buffer_is_filled():
    buffer = torch.zeros(2)
    bucket = BucketReduction(0, buffer, Alone(), fills=[Later(buffer)])
    bucket.reduce_intra_group()
    assert buffer.tolist() == [1.0, 1.0]


def put_back(rank):
    module, _ = fit(layered(), 4)
    parts = [part for part in module.modules() if hasattr(part, "unshard")]
    assert parts
    module.zero_grad()
    x = torch.ones(2, 6, dtype=torch.float64) * (rank + 1)
    assert isinstance(module.first, nn.Linear)
    module.first(x).sum().backward()
    # FSDP2's own average over the group, whose two ranks have ones and twos, or threes and fours.
    assert module.first.bias.grad.to_local().unique().tolist() == [2.0]
    weight = module.first.weight.grad.to_local().unique().tolist()
    assert weight == [3.0 if rank < 2 else 7.0], weight


@pytest.mark.ci
def test_fsdp2_has_its_own_collectives_after_fit():
    run_processes(4, put_back)
