"""Compression as a hook of DDP on CPU, in a plain loop and under Lightning."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from pytorch_lightning.strategies import DDPStrategy
from torch.nn.parallel import DistributedDataParallel

from lightning_dp._lightning import Callback
from lightning_dp.collectives import CompressionState, PowerSGD, compression_hook
from tests.collectives.compression import oracle
from tests.collectives.test_comm_hooks import network, shard
from tests.ranks import run_processes
from tests.strategies.modules import SMALL_BUCKETS_MB, Net, data, trainer


def local_gradients(rank, model):
    features, cotangents = shard(rank)
    (model(features) * cotangents).sum().backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return gradients


def averaged(rank, choice):
    dist.init_process_group("gloo")
    model = DistributedDataParallel(network().double(), bucket_cap_mb=1e-5)
    state = CompressionState(choice)
    model.register_comm_hook(state, compression_hook)
    results = []
    for _ in range(3):
        results.append(local_gradients(rank, model))
    state.close()
    return results, state.bytes_sent


def test_gradients_are_bitwise_those_of_one_process():
    ranks = [local_gradients(rank, network().double()) for rank in range(2)]
    # Blocks are numbered in the order in which the hook first sees parameters, in the one bucket of the first step.
    groups = [oracle.Int8Groups(2, gradient.numel(), first, torch.float64) for first, gradient in enumerate(ranks[0])]
    assert all(gradient.numel() <= oracle.BLOCK for gradient in ranks[0])
    results = run_processes(2, averaged, "int8")
    for step in range(3):
        for place, group in enumerate(groups):
            expected = group.sum([each[place] / 2 for each in ranks])
            assert torch.equal(results[0][0][step][place], expected)
            assert torch.equal(results[1][0][step][place], expected)
    assert sum(sent for _, sent in results) == 3 * 2 * len(groups) * (256 + 4)


class Complex(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.weight = torch.nn.Parameter(torch.randn(9, 6, dtype=torch.complex64))

    def forward(self, x):
        return torch.view_as_real(x @ self.weight.T).square().sum()


def averaged_complex(rank, choice):
    dist.init_process_group("gloo")
    gradients = []
    for hook in (None, compression_hook):
        model = DistributedDataParallel(Complex())
        if hook is not None:
            model.register_comm_hook(CompressionState(choice), hook)
        model(torch.randn(2, 6, generator=torch.Generator().manual_seed(rank)).to(torch.complex64)).backward()
        gradients.append(model.module.weight.grad)
    return gradients


@pytest.mark.skipif(torch.__version__ < "2.13", reason="before 2.13 DDP refuses complex parameters")
@pytest.mark.parametrize("choice", ["bf16", "int8", PowerSGD(rank=9, min_compression_rate=1.0)], ids=str)
def test_complex_gradients_are_those_of_ddp(choice):
    for exact, compressed in run_processes(2, averaged_complex, choice):
        torch.testing.assert_close(compressed, exact, rtol=0, atol=0.01 * exact.abs().max().item())


class Register(Callback):
    """The example of the method page."""

    def __init__(self, choice):
        self.state = CompressionState(choice)

    def on_train_start(self, trainer, pl_module):
        trainer.strategy.model.register_comm_hook(self.state, compression_hook)


def under_lightning(rank):
    trained = []
    for choice in ("bf16", PowerSGD(rank=1, min_compression_rate=1.0)):
        module = Net()
        register = Register(choice)
        t = trainer(DDPStrategy(bucket_cap_mb=SMALL_BUCKETS_MB), 2, callbacks=[register])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            t.fit(module, data(2, steps=4))
        assert register.state.bytes_sent > 0
        trained.append([p.detach().clone() for p in module.parameters()])
    return trained


def test_in_a_lightning_trainer_on_cpu():
    first, second = run_processes(2, under_lightning)
    for mine, other in zip(first, second, strict=True):
        assert all(map(torch.equal, mine, other))


def test_what_is_no_state_or_no_compression_is_refused():
    with pytest.raises(TypeError, match="use CompressionState"):
        compression_hook(None, None)
    with pytest.raises(ValueError, match="compression=None has nothing for a hook to do"):
        CompressionState(None)
    with pytest.raises(ValueError, match="compression='int4' is not known"):
        CompressionState("int4")
