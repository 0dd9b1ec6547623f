"""The hierarchical all-reduce with a compressed stage: buckets are rebuilt, checkpoints loaded, groups regrouped."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from lightning_dp.collectives.compression.compressors import Int8, make_compressor
from lightning_dp.collectives.compression.layout import ParameterTable
from lightning_dp.collectives.compression.options import PowerSGD
from lightning_dp.collectives.compression.stages import CompressedAllReduce, CompressedStages, OwnState, load_state
from lightning_dp.collectives.compression.wire import complete
from lightning_dp.collectives.groups import RankTopology
from lightning_dp.collectives.hierarchical import HierarchicalAllReduce
from tests.collectives.compression import oracle
from tests.collectives.compression.test_compressors import SHAPES, gradients, one_bucket, rebuilt
from tests.ranks import RankError, run_processes

WORLD_SIZE = 4
TIMEOUT = timedelta(minutes=1)


class Job:
    """One rank's compressed all-reduce, and its parameters."""

    def __init__(self, rank, group_size, communicator, compressor):
        self.rank = rank
        self.parameters = [torch.zeros(shape) for shape in SHAPES]
        self.collective = HierarchicalAllReduce(RankTopology(WORLD_SIZE, group_size), rank, communicator)
        table = ParameterTable((f"p{place}", p) for place, p in enumerate(self.parameters))
        self.all_reduce = CompressedAllReduce(self.collective, compressor, table)

    def step(self, step, orders):
        """Return the sum of each parameter's gradients over all ranks."""
        given = gradients(step, self.rank)
        sums = [None] * len(SHAPES)
        for bucket in orders(step):
            flat = torch.cat([given[place].flatten() for place in bucket])
            stages = self.all_reduce.stages_of([self.parameters[place] for place in bucket])
            for work in stages.intra_group_reduce(flat):
                work.wait()
            complete(stages.inter_group_all_reduce(flat) or iter(()))
            for work in stages.intra_group_broadcast(flat):
                work.wait()
            sizes = [self.parameters[place].numel() for place in bucket]
            for place, part in zip(bucket, flat.split(sizes), strict=True):
                sums[place] = part.view(SHAPES[place])
        return sums


def group_sums(step):
    ranks = [gradients(step, rank) for rank in range(WORLD_SIZE)]
    return [[a + b for a, b in zip(ranks[first], ranks[first + 1], strict=True)] for first in (0, 2)]


def expected(steps):
    """The sums of two groups of two ranks in 8 bits, step by step."""
    groups = [
        oracle.Int8Groups(2, torch.Size(shape).numel(), first)
        for shape, first in zip(SHAPES, [0, 5, 6, 8, 11], strict=True)
    ]
    return [
        [each.sum([sums[place] for sums in group_sums(step)]) for place, each in enumerate(groups)]
        for step in range(steps)
    ]


def same(got, right):
    return all(torch.equal(a, b) for a, b in zip(got, right, strict=True))


def rebuild(rank, broken=None):
    dist.init_process_group("gloo")
    if broken == "residuals stay with ranks":
        CompressedAllReduce.note_shard_ranges = lambda self, places: False
    if broken == "residuals are lost":
        reduce = CompressedStages.intra_group_reduce

        def without_residuals(self, buffer):
            for info in self._shard_ranges:
                self._owner.compressor.residuals.drop(info)
            return reduce(self, buffer)

        CompressedStages.intra_group_reduce = without_residuals
    right = expected(4)
    for communicator in ("leader", "sharded"):
        job = Job(rank, 2, communicator, Int8())
        for step in range(4):
            assert same(job.step(step, rebuilt), right[step]), f"{communicator}, step {step}"
        assert (job.all_reduce.bytes_sent == 0) == (communicator == "leader" and rank % 2 == 1)


def test_8_bits_are_those_of_one_process_with_each_communicator_and_after_a_rebuild_of_buckets():
    run_processes(WORLD_SIZE, rebuild)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("residuals are lost", "leader, step 1"),
        ("residuals stay with ranks", "sharded, step 1|the residual lies on another rank"),
    ],
)
def test_they_differ_after_a_rebuild_if_residuals_do_not_follow_their_parameters(broken, message):
    with pytest.raises(RankError, match=message):
        run_processes(WORLD_SIZE, rebuild, broken, grace=1.0)


def save_and_load(rank, restore=True):
    dist.init_process_group("gloo")
    for communicator in ("leader", "sharded"):
        for choice in ("int8", PowerSGD(rank=2)):
            if communicator == "sharded" and choice != "int8":
                continue
            job = Job(rank, 2, communicator, make_compressor(choice))
            for step in range(2):
                job.step(step, rebuilt)
            box = [OwnState(job.all_reduce).gather(TIMEOUT)]
            dist.broadcast_object_list(box)  # in place of the file
            again = Job(rank, 2, communicator, make_compressor(choice))
            if restore:
                load_state(again.all_reduce, box[0])
                reread = OwnState(again.all_reduce).gather(TIMEOUT)
                if rank == 0:
                    assert_same_state(reread, box[0], choice)
            for step in (2, 3):
                # The new job begins with one bucket, as DDP does.
                buckets = one_bucket if step == 2 else rebuilt
                got = again.step(step, buckets)
                assert same(got, job.step(step, rebuilt)), f"{communicator}, {choice}, step {step}"
            if choice == "int8":
                regroup(rank, box[0], communicator)


def assert_same_state(got, right, choice):
    assert got.keys() == right.keys()
    for name, residual in right["residuals"].items():
        assert torch.equal(got["residuals"][name], residual), f"{choice}: {name}"
    assert got["others"].keys() == right["others"].keys()


def regroup(rank, state, communicator):
    """Load residuals of two groups into four: what the parameters lack stays the same."""
    job = Job(rank, 1, communicator, make_compressor("int8"))
    load_state(job.all_reduce, state)
    reread = OwnState(job.all_reduce).gather(TIMEOUT)
    if rank == 0:
        for name, residuals in state["residuals"].items():
            assert len(reread["residuals"][name]) == 4
            torch.testing.assert_close(reread["residuals"][name].sum(0), residuals.sum(0), rtol=1e-6, atol=1e-12)
            assert torch.equal(reread["residuals"][name][0], reread["residuals"][name][3])


@pytest.mark.ci
def test_a_loaded_state_continues_with_the_same_bits_and_its_sum_does_not_depend_on_the_groups():
    run_processes(WORLD_SIZE, save_and_load)


def test_without_the_state_a_resumed_job_has_other_bits():
    with pytest.raises(RankError, match="leader, int8, step 2"):
        run_processes(WORLD_SIZE, save_and_load, False)
