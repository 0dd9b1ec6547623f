"""A dead peer is named; bad options and optimizers are refused."""

from __future__ import annotations

import os
import re
from datetime import timedelta
from typing import Any

import pytest
import pytorch_lightning as pl
import torch.distributed as dist

from lightning_dp.strategies import LayeredSGDStrategy, PowerSGD
from tests.ranks import RankError, run_processes
from tests.strategies.layered_sgd.modules import fit, layered
from tests.strategies.modules import Net


class Dying(Net):
    def training_step(self, batch, batch_idx):
        if self.global_rank == 1 and batch_idx == 3:
            os._exit(3)
        return super().training_step(batch, batch_idx)


def outlive_a_peer(rank, group_size):
    with pytest.raises(RuntimeError) as caught:
        fit(layered(group_size, timeout=timedelta(seconds=20)), 2 * group_size, Dying())
    # Told by the exit, as the dead rank's own result is missing.
    raise AssertionError(f"survived: {caught.value}")


def test_a_dead_peer_is_named():
    with pytest.raises(RankError) as caught:
        run_processes(2, outlive_a_peer, 1)
    # Which of the two it is is a matter of time: the reduction, or the agreement on the next bucket.
    said = (
        r"survived: the (sum|order) of .*, between rank 0 and rank 1 \(group 1\), failed: one of these ranks has died"
    )
    assert re.search(said, str(caught.value))


def trainer_on(devices: int, **options: Any) -> pl.Trainer:
    return pl.Trainer(accelerator="cpu", devices=devices, strategy=LayeredSGDStrategy(**options), logger=False)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: trainer_on(6, group_size=4), "world_size=6 is not a multiple of group_size=4; use 1, 2, 3 or 6"),
        (
            lambda: LayeredSGDStrategy(communicator="chief"),
            "communicator='chief' is not known; use one of 'leader', 'sh",
        ),
        (lambda: LayeredSGDStrategy(overlap="all"), "overlap='all' is not known; use one of 'load', 'step'"),
        (lambda: LayeredSGDStrategy(all_reduce="tree"), "all_reduce='tree' is not known"),
        (lambda: LayeredSGDStrategy(gradient_as_bucket_view=False), "gradient_as_bucket_view=False cannot work"),
        (lambda: LayeredSGDStrategy(ddp_comm_hook=print), "ddp_comm_hook cannot be given"),
        (lambda: LayeredSGDStrategy(model_averaging_period=3), "model_averaging_period cannot be given"),
    ],
)
def test_bad_options_are_refused_before_any_process_starts(make, message):
    with pytest.raises(ValueError, match=message):
        make()
    assert not dist.is_initialized()


def fit_lbfgs(rank):
    for group_size in (1, 2):  # a single group is DDP, which would wait for ever
        with pytest.raises(ValueError, match="LayeredSGDStrategy cannot run LBFGS"):
            fit(layered(group_size), 2, Net(optimizer="lbfgs"))


def test_lbfgs_is_refused():
    run_processes(2, fit_lbfgs)


class FewerOnRank1(Net):
    def on_train_batch_start(self, batch, batch_idx):
        return -1 if self.global_rank == 1 and batch_idx == 3 else None


def end_early(rank, compression):
    try:
        fit(layered(1, compression=compression, timeout=timedelta(seconds=60)), 2, FewerOnRank1())
    except RuntimeError as error:
        return str(error)
    return "ended"


@pytest.mark.parametrize("compression", ["int8", PowerSGD(rank=1)])
def test_a_rank_with_fewer_batches_ends_and_waits_for_nobody(compression):
    of_rank_0, of_rank_1 = run_processes(2, end_early, compression)
    assert "failed: one of these ranks has died" in of_rank_0
    assert of_rank_1 == "ended"
