"""Bad groups and optimizers are refused; `tests/test_bad_input.py` has the other options."""

from __future__ import annotations

import pytest
import pytorch_lightning as pl
import torch.distributed as dist

from lightning_dp.strategies import LayeredSGDStrategy
from tests.ranks import run_processes
from tests.strategies.layered_sgd.modules import fit, layered
from tests.strategies.modules import Net


def test_groups_that_do_not_divide_the_ranks_are_refused_before_any_process_starts():
    with pytest.raises(ValueError, match="world_size=6 is not a multiple of group_size=4; use 1, 2, 3 or 6"):
        pl.Trainer(accelerator="cpu", devices=6, strategy=LayeredSGDStrategy(group_size=4), logger=False)
    assert not dist.is_initialized()


def fit_lbfgs(rank):
    for group_size in (1, 2):  # a single group is DDP, which would wait for ever
        with pytest.raises(ValueError, match="LayeredSGDStrategy cannot run LBFGS"):
            fit(layered(group_size), 2, Net(optimizer="lbfgs"))


def test_lbfgs_is_refused():
    run_processes(2, fit_lbfgs)
