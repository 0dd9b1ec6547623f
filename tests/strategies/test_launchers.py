"""Layered SGD under Lightning's own launchers. (The other tests run under torchrun's environment.)"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import warnings

import pytest
import torch
import torch.distributed as dist
from lightning_fabric.plugins.environments import TorchElasticEnvironment
from lightning_fabric.utilities.warnings import PossibleUserWarning
from pytorch_lightning.strategies import DDPStrategy

from lightning_dp.strategies import KrizhevskyHybridStrategy, LayeredSGDStrategy
from tests.ranks import environment_of_rank, run_processes
from tests.strategies.modules import SMALL_BUCKETS_MB, Net, assert_same, data, trainer


class Leave:
    """gloo's threads may not outlive the process, and Lightning leaves them to do so; at times that aborts it."""

    def teardown(self):
        super().teardown()
        if dist.is_initialized():
            dist.destroy_process_group()


class LayeredAndLeave(Leave, LayeredSGDStrategy):
    pass


class DDPAndLeave(Leave, DDPStrategy):
    pass


def launched_fit(strategy):
    module = Net()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PossibleUserWarning)
        trainer(strategy, 2, max_steps=5).fit(module, data(2))
    return dict(module.named_parameters())


def layered(overlap, **options):
    return LayeredAndLeave(1, overlap=overlap, bucket_cap_mb=SMALL_BUCKETS_MB, **options)


def fork_fits(rank):
    """As in a process that nobody has launched, and that may have children."""
    for name in environment_of_rank(0, 1, 1, 0):
        del os.environ[name]
    multiprocessing.current_process()._config["daemon"] = False
    torch.cuda._is_in_bad_fork = lambda: False  # a rank is a fork itself, from which a CUDA build lets nobody fork
    expected = launched_fit(DDPAndLeave(start_method="fork"))
    for overlap in ("load", "step"):
        assert_same(launched_fit(layered(overlap, start_method="fork")), expected)


@pytest.mark.ci
def test_fork():
    run_processes(1, fork_fits)


def ddp_fit(rank):
    return launched_fit(DDPStrategy())


# Not "forkserver": under it, Lightning lets all ranks train the same parameters, in shared memory.
@pytest.mark.slow
@pytest.mark.parametrize("overlap", ["load", "step"])
def test_spawn(overlap):
    assert_same(launched_fit(layered(overlap, start_method="spawn")), run_processes(2, ddp_fit)[0])


@pytest.mark.parametrize("overlap", ["load", "step"])
def test_a_launcher_can_send_it_to_new_processes(overlap):
    t = pickle.loads(pickle.dumps(trainer(layered(overlap, start_method="spawn"), 2)))  # noqa: S301  our own
    assert t.strategy._options.overlap == overlap


def test_groups_are_the_ranks_of_a_node_by_default():
    two_nodes = trainer(LayeredSGDStrategy(), 8, num_nodes=2).strategy
    assert two_nodes.topology.group_size == 4
    assert two_nodes.topology.num_groups == 2
    assert trainer(LayeredSGDStrategy(), 3).strategy.topology.num_groups == 1


def test_under_slurm(monkeypatch):
    environment = {"SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NNODES": "2", "SLURM_JOB_NAME": "train"}
    environment |= {"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_JOB_ID": "7"}
    environment |= {"SLURM_STEP_NODELIST": "a,b", "SLURM_NODELIST": "a,b"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    strategy = trainer(LayeredSGDStrategy(), 4, num_nodes=2).strategy
    assert strategy.topology.members(strategy.cluster_environment.global_rank()) == [2, 3]
    with pytest.raises(ValueError, match="world_size=4 is not a multiple of group_size=3; use 1, 2 or 4"):
        trainer(LayeredSGDStrategy(3), 4, num_nodes=2)


class Unchecked(TorchElasticEnvironment):
    """Like Ray's, it takes the number of ranks from the job and does not compare it with the Trainer's."""

    def validate_settings(self, num_devices, num_nodes):
        pass


@pytest.mark.parametrize("strategy", [LayeredSGDStrategy, KrizhevskyHybridStrategy])
def test_ranks_that_the_trainer_does_not_know_of(monkeypatch, strategy):
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="num_nodes=1 with 1 devices each make 1 ranks, but the job has 2"):
        trainer(strategy(), 1, plugins=[Unchecked()])
