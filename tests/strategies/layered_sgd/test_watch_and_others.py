"""The watch over parameters leaves alone what belongs to others: their modes, and forked loader workers."""

from __future__ import annotations

import multiprocessing
import time
import warnings
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import DDPStrategy
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from lightning_dp.strategies import LayeredFSDPStrategy
from lightning_dp.strategies.layered_sgd import parameter_watch
from lightning_dp.strategies.layered_sgd.host_communicator import BucketReduction
from tests.ranks import RankError, run_processes
from tests.strategies.layered_fsdp.modules import snapshot
from tests.strategies.layered_sgd.test_gradients_of_users import TwoLossesOnOneGraph
from tests.strategies.layered_sgd.user_cases import OVERLAPS, STEPS, fit, layered, on_a_slow_network
from tests.strategies.modules import Net, assert_same, data, trainer


class Mode(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class OwnMode(pl.Callback):
    """A mode of the user's, over an epoch with a validation in its middle."""

    def on_train_epoch_start(self, t: Any, module: Any) -> None:
        self.mode = Mode()
        self.mode.__enter__()

    def on_train_epoch_end(self, t: Any, module: Any) -> None:
        assert torch.overrides._get_current_function_mode() is self.mode
        self.mode.__exit__(None, None, None)


class Validated(Net):
    def val_dataloader(self):
        return data(2, steps=1)


def keep_own_mode(rank):
    for overlap in OVERLAPS:
        fit(layered(overlap), Validated(), [OwnMode()], val_check_interval=2)


def test_a_mode_of_the_user_s_stays_where_it_is():
    run_processes(2, keep_own_mode)


class Reading(torch.utils.data.Dataset):
    """Reads the module in each sample: in loader workers, which are forked at the start of an epoch."""

    def __init__(self, module: Net) -> None:
        self.module = module
        self.samples = data(2, STEPS).dataset

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index):
        x, y = self.samples[index]
        weights = [self.module.first.weight, self.module.last.weight]
        local = [weight.to_local() if isinstance(weight, DTensor) else weight for weight in weights]
        return x + 0.1 * sum(weight.detach().sum() for weight in local), y


class SlowLastSums(pl.Callback):
    """The sums of an epoch's last step are under way when the workers of the next epoch are forked."""

    def __init__(self) -> None:
        self.is_last = False
        reduce = BucketReduction.reduce_intra_group

        def reduce_late(bucket: BucketReduction) -> None:
            if self.is_last:
                time.sleep(0.2)
            reduce(bucket)

        BucketReduction.reduce_intra_group = reduce_late

    def on_train_batch_start(self, t: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.is_last = batch_idx == t.num_training_batches - 1


STRATEGIES = {
    "layered SGD": layered,
    "layered FSDP": lambda overlap: LayeredFSDPStrategy(1, overlap, wrap=[nn.Linear]),  # a shard is the whole
}


def read_in_workers(rank, name):
    slow_sums = SlowLastSums()
    multiprocessing.current_process()._config["daemon"] = False  # else it may start no workers

    def fit_with_workers(strategy):
        module = Net()
        loader = torch.utils.data.DataLoader(
            Reading(module), batch_size=3, num_workers=1, multiprocessing_context="fork"
        )
        t = trainer(strategy, 2, callbacks=[slow_sums], max_epochs=2, reload_dataloaders_every_n_epochs=1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # advice, and Python's about forking beside threads
            t.fit(module, loader)
        return snapshot(module, t)

    expected = fit_with_workers(DDPStrategy())
    for overlap in OVERLAPS:
        assert_same(fit_with_workers(STRATEGIES[name](overlap)), expected)


@pytest.mark.ci
@pytest.mark.parametrize("name", STRATEGIES)
def test_forked_loader_workers_find_the_module_up_to_date_and_wait_for_nobody(name):
    run_processes(2, read_in_workers, name)


def test_a_dead_end_is_named():
    """The twin: without looking at graphs, two losses on one graph would be taken for a stale use."""
    with pytest.raises(RankError, match="without its last update"):
        run_processes(2, suspect_everything)


def suspect_everything(rank):
    on_a_slow_network()
    parameter_watch._readers_in_graph = lambda loss: {}
    fit(layered("step", find_unused_parameters=True), TwoLossesOnOneGraph())
