"""Layered SGD is synchronous SGD: it ends with the parameters of DDP, and of one process on the whole batch."""

from __future__ import annotations

import itertools

import pytest
import torch
from pytorch_lightning.strategies import DDPStrategy

from lightning_dp.collectives.hierarchical import HierarchicalAllReduce
from tests.ranks import RankError, run_cases, run_processes
from tests.strategies.layered_sgd.modules import COMMUNICATORS, OVERLAPS, STEPS, fit, layered
from tests.strategies.modules import VARIANTS, Net, assert_same, data, snapshot

EVERY = tuple(itertools.product(OVERLAPS, COMMUNICATORS))


def compare_with_ddp(rank, variant, world_size, group_size, combinations=EVERY):
    options = dict(VARIANTS[variant])
    net = options.pop("net", {})
    expected = snapshot(*fit(DDPStrategy(), world_size, Net(**net), **options))
    for overlap, communicator in combinations:
        strategy = layered(group_size, communicator, overlap)
        assert_same(snapshot(*fit(strategy, world_size, Net(**net), **options)), expected)


def compare_two_combinations_with_ddp(rank, variant, world_size, group_size):
    """Both overlaps and both communicators; those that go together are others in every second variant."""
    swap = list(VARIANTS).index(variant) % 2
    combinations = [pair for pair in EVERY if (pair in (EVERY[0], EVERY[3])) == swap]
    compare_with_ddp(rank, variant, world_size, group_size, combinations)


def test_equals_ddp():
    run_cases(4, compare_two_combinations_with_ddp, VARIANTS, 4, 2)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("world_size", "group_size"),
    [(2, 1), (2, 2), (3, 1), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((4, 1), (3, 3), (4, 4)))],
    ids=lambda n: str(n),
)
def test_equals_ddp_in_every_topology(world_size, group_size):
    run_cases(world_size, compare_with_ddp, ["momentum", "adamw"], world_size, group_size)


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "group_size"), [(2, 1), (2, 2), (3, 1), (3, 3), (4, 1), (4, 2), (4, 4)])
def test_equals_ddp_in_every_variant_and_topology(world_size, group_size):
    run_cases(world_size, compare_with_ddp, VARIANTS, world_size, group_size, timeout=300)


def compare_with_ring(rank):
    expected = snapshot(*fit(DDPStrategy(), 4))
    for communicator in COMMUNICATORS:
        assert_same(snapshot(*fit(layered(2, communicator, all_reduce="ring"), 4)), expected)


@pytest.mark.ci
def test_ring_between_groups():
    run_processes(4, compare_with_ring)


def compare_without_crossing(rank):
    HierarchicalAllReduce.inter_group_all_reduce = lambda self, buffer: None
    compare_with_ddp(rank, "momentum", 2, 1, [("step", "leader")])


def test_differs_from_ddp_if_nothing_crosses_the_groups():
    with pytest.raises(RankError, match="first.weight"):
        run_processes(2, compare_without_crossing)


def compare_with_one_process(rank):
    """The ranks' batches, concatenated, on one process."""
    world_size = 2
    module, _ = fit(layered(), world_size)
    if rank:
        return
    alone = Net()
    optimizer = alone.configure_optimizers()
    dataset = data(world_size, STEPS).dataset
    indices = [torch.utils.data.DistributedSampler(dataset, world_size, r, shuffle=True) for r in range(world_size)]
    indices = [torch.tensor(list(sampler)).view(STEPS, -1) for sampler in indices]
    for step in range(STEPS):
        optimizer.zero_grad()
        alone.loss(dataset[torch.cat([each[step] for each in indices])]).backward()
        optimizer.step()
    assert_same(dict(module.state_dict()), dict(alone.state_dict()))


def test_equals_one_process_on_the_concatenated_batch():
    run_processes(2, compare_with_one_process)
