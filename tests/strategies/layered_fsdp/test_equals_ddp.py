"""Layered FSDP is synchronous SGD: it ends with the parameters and optimizer states of DDP."""

from __future__ import annotations

import pytest
from pytorch_lightning.strategies import DDPStrategy

from lightning_dp.collectives.hierarchical import HierarchicalAllReduce
from tests.ranks import RankError, run_cases, run_processes
from tests.strategies.layered_fsdp.modules import fit, layered, snapshot
from tests.strategies.modules import VARIANTS, Net, assert_same


def compare_with_ddp(rank, variant, world_size=4, group_size=2, overlaps=("step", "load"), **strategy):
    options = dict(VARIANTS[variant])
    net = options.pop("net", {})
    expected = snapshot(*fit(DDPStrategy(), world_size, Net(**net), **options))
    for overlap in overlaps:
        module, trainer = fit(layered(group_size, overlap, **strategy), world_size, Net(**net), **options)
        assert_same(snapshot(module, trainer), expected)


def compare_one_overlap_with_ddp(rank, variant):
    """Every second variant with ``overlap="load"``; with "step" the others."""
    compare_with_ddp(rank, variant, overlaps=[("step", "load")[list(VARIANTS).index(variant) % 2]])


def test_equals_ddp():
    run_cases(4, compare_one_overlap_with_ddp, VARIANTS)


@pytest.mark.slow
def test_equals_ddp_with_both_overlaps():
    run_cases(4, compare_with_ddp, VARIANTS)


@pytest.mark.ci
@pytest.mark.parametrize(("world_size", "group_size"), [(2, 1), (2, 2), pytest.param(4, 1, marks=pytest.mark.slow)])
def test_equals_ddp_in_every_topology(world_size, group_size):
    run_cases(world_size, compare_with_ddp, ["adamw"], world_size, group_size)


def compare_options(rank):
    for options in ({"wrap": None}, {"reshard_after_forward": False}, {"all_reduce": "ring"}):
        compare_with_ddp(rank, "adamw", overlaps=["step"], **options)


@pytest.mark.ci
def test_options():
    run_processes(4, compare_options)


def compare_without_crossing(rank):
    HierarchicalAllReduce.inter_group_all_reduce = lambda self, buffer: None
    compare_with_ddp(rank, "momentum", 2, 1, ["step"])


@pytest.mark.ci
def test_differs_from_ddp_if_nothing_crosses_the_groups():
    with pytest.raises(RankError, match="first.weight"):
        run_processes(2, compare_without_crossing)
