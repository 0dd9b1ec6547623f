"""The hook in a Trainer on CPU, where it is registered by a callback."""

from __future__ import annotations

import pytest
import torch

from lightning_dp._lightning import Callback, DDPStrategy, LightningModule, Trainer
from lightning_dp.collectives import RingState, comm_hooks, ring_all_reduce_hook
from tests.collectives.test_comm_hooks import assert_close, network, oracle, shard
from tests.ranks import run_processes


class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.network = network().double()

    def training_step(self, batch, index):
        features, cotangents = shard(self.global_rank)
        return (self.network(features) * cotangents).sum()

    def train_dataloader(self):
        return torch.utils.data.DataLoader([0, 1], batch_size=1)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


class RegisterRing(Callback):
    """The example of the method page."""

    def on_train_start(self, trainer, pl_module):
        trainer.strategy.model.register_comm_hook(RingState(), ring_all_reduce_hook)


def trained(rank):
    calls = []
    ring = comm_hooks.ring_all_reduce
    comm_hooks.ring_all_reduce = lambda *args, **kwargs: calls.append(1) or ring(*args, **kwargs)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend="gloo"),
        max_steps=1,
        callbacks=[RegisterRing()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    module = Module()
    trainer.fit(module)
    return len(calls), [parameter.detach() for parameter in module.network.parameters()]


@pytest.mark.filterwarnings("ignore")
def test_in_a_lightning_trainer_on_cpu():
    expected = [
        parameter.detach() - g for parameter, g in zip(network().double().parameters(), oracle([0, 1]), strict=True)
    ]
    results = run_processes(2, trained)
    assert all(calls for calls, _ in results)
    assert_close([parameters for _, parameters in results], expected)
