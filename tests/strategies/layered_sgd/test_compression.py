"""Compression in a Trainer: one process that plays all groups gives the same parameters; checkpoints; refusals."""

from __future__ import annotations

import warnings
from datetime import timedelta

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.plugins.precision import MixedPrecision

from lightning_dp.collectives.compression.compressors import Int8
from lightning_dp.collectives.compression.stages import OwnState
from lightning_dp.strategies import LayeredSGDStrategy, PowerSGD
from lightning_dp.strategies.layered_sgd import options
from lightning_dp.strategies.layered_sgd.strategy import KEY
from tests.collectives.compression import oracle
from tests.ranks import RankError, logged, run_processes
from tests.strategies.layered_sgd.modules import STEPS, fit, layered
from tests.strategies.layered_sgd.test_host_communicator import OnHost, ReducesFirst
from tests.strategies.modules import Net, assert_same, data, trainer

POWER_SGD = PowerSGD(rank=2, min_compression_rate=1.0)  # the matrices of `Net` are small


def oracles(choice, module, num_groups):
    """An oracle for each parameter that is compressed."""
    groups = {}
    for index, (name, p) in enumerate(module.named_parameters()):
        if choice == "int8":  # each parameter of `Net` is one block
            groups[name] = oracle.Int8Groups(num_groups, p.numel(), index, p.dtype)
        elif p.dim() == 2 and sum(p.shape) * POWER_SGD.rank < p.numel():
            generator = torch.Generator().manual_seed(index)
            start = torch.randn(p.shape[1], POWER_SGD.rank, dtype=p.dtype, generator=generator)
            groups[name] = oracle.PowerSGDGroups(num_groups, start)
    return groups


def play(choice, world_size, group_size):
    """Train on one process that plays all groups."""
    module = Net()
    dataset = data(world_size, STEPS).dataset
    samplers = [torch.utils.data.DistributedSampler(dataset, world_size, rank) for rank in range(world_size)]
    batches = [torch.tensor(list(sampler)).split(3) for sampler in samplers]
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    groups = oracles(choice, module, world_size // group_size)
    optimizer = module.configure_optimizers()
    for step in range(STEPS):
        sums = []
        for first in range(0, world_size, group_size):
            ranks = [
                torch.autograd.grad(module.loss(dataset[batches[rank][step]]), list(named.values()))
                for rank in range(first, first + group_size)
            ]
            sums.append([sum(g / world_size for g in each) for each in zip(*ranks, strict=True)])
        for (name, p), *contributions in zip(named.items(), *sums, strict=True):
            p.grad = groups[name].sum(contributions) if name in groups else sum(contributions)
        optimizer.step()
    return module


def compare(rank, drop_feedback=False):
    if drop_feedback:
        Int8.__init__.__defaults__ = (False,)
    expected = {choice: dict(play(choice, 4, 2).state_dict()) for choice in ("int8", POWER_SGD)}
    for choice, communicator, overlap, on_host, reduces_first in (
        ("int8", "leader", "step", False, False),
        ("int8", "sharded", "load", False, False),
        ("int8", "sharded", "step", True, False),
        ("int8", "sharded", "step", True, True),
        (POWER_SGD, "leader", "step", False, False),
        (POWER_SGD, "leader", "load", True, True),
    ):
        options.Communicator = OnHost if on_host else OnHost.__base__
        options.HierarchicalAllReduce = ReducesFirst if reduces_first else ReducesFirst.__base__
        strategy = layered(2, communicator, overlap, compression=choice)
        module, _ = fit(strategy, 4, max_steps=STEPS)
        assert_same(dict(module.state_dict()), expected[choice], rtol=1e-9)
        parameters = torch.cat([p.detach().flatten() for p in module.parameters()])
        ranks = [torch.empty_like(parameters) for _ in range(4)]
        dist.all_gather(ranks, parameters)
        assert all(torch.equal(each, ranks[0]) for each in ranks), "not bitwise identical on all ranks"


def test_parameters_are_those_of_one_process_that_plays_all_groups():
    run_processes(4, compare)


@pytest.mark.ci
def test_they_are_not_if_error_feedback_is_dropped():
    with pytest.raises(RankError, match="first.weight"):
        run_processes(4, compare, True)


# --- checkpoints ---


class Saves(pl.Callback):
    """Writes a checkpoint after the first epoch, and counts bytes."""

    def __init__(self, path):
        self.path = path

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)
        self.bytes_sent = trainer.strategy.compressed_bytes_sent


class LoadsInTheMiddle(pl.Callback):
    """Loads a checkpoint during a fit, as Lightning's ``lr_find`` does, and looks at the compressor afterwards."""

    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 1:
            compressed = trainer.strategy._reduction.compressed
            trainer.strategy.finish_update()
            self.before = OwnState(compressed).gather(timedelta(minutes=1))
            trainer.strategy.load_checkpoint(self.path)
            self.after = OwnState(compressed).gather(timedelta(minutes=1))


def train(choice, epochs, *callbacks, ckpt_path=None):
    module = Net()
    t = trainer(layered(1, compression=choice), 2, max_epochs=epochs, callbacks=list(callbacks))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        t.fit(module, data(2, steps=3), ckpt_path=ckpt_path)
    return t, {name: p.detach().clone() for name, p in module.named_parameters()}


def resume(rank, folder, restore=True):
    for choice in ("int8", POWER_SGD):
        saves = Saves(f"{folder}/{choice!s}.ckpt")
        _, expected = train(choice, 2, saves)
        assert saves.bytes_sent > 0
        dist.barrier()
        file = torch.load(saves.path)
        assert file[KEY]["residuals"]["shared.weight"].shape == (2, 8, 8)
        if not restore:
            file[KEY]["residuals"] = {name: torch.zeros_like(r) for name, r in file[KEY]["residuals"].items()}
            saves.path = f"{folder}/without_residuals_{rank}.ckpt"
            torch.save(file, saves.path)
        _, resumed = train(choice, 2, ckpt_path=saves.path)
        for name, value in expected.items():
            assert torch.equal(resumed[name], value), f"{choice}: {name} is not bitwise identical"
        again = LoadsInTheMiddle(saves.path)
        t, _ = train(choice, 1, again)
        after_fit = f"{folder}/after_fit_{choice!s}.ckpt"
        t.save_checkpoint(after_fit)
        if rank == 0:
            right = file[KEY]["residuals"]["shared.weight"]
            assert torch.equal(again.after["residuals"]["shared.weight"], right)
            assert not torch.equal(again.before["residuals"]["shared.weight"], right)
            assert KEY in torch.load(after_fit)


@pytest.mark.ci
def test_a_resumed_training_continues_with_the_same_bits(tmp_path):
    run_processes(2, resume, str(tmp_path))


@pytest.mark.ci
def test_it_does_not_if_residuals_are_not_restored(tmp_path):
    with pytest.raises(RankError, match="int8: .* is not bitwise identical"):
        run_processes(2, resume, str(tmp_path), False)


# --- refusals ---


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"compression": "int4"}, "compression='int4' is not known; use None, 'bf16'"),
        ({"compression": PowerSGD}, "is not known"),
        ({"compression": "bf16", "all_reduce": "ring"}, "compression='bf16' has an all-reduce of its own; leave out"),
        ({"compression": "bf16", "communicator_device": "gpu"}, "compression='bf16' works in host memory"),
        ({"compression": PowerSGD(rank=2), "communicator": "sharded"}, r"PowerSGD\(rank=2.* use communicator='leader'"),
    ],
)
def test_what_makes_no_sense_is_refused_before_any_process_starts(given, message):
    with pytest.raises(ValueError, match=message):
        LayeredSGDStrategy(**given)
    assert not dist.is_initialized()


def trainer_with_scaler(compression):
    plugin = MixedPrecision("16-mixed", "cpu")
    return trainer(LayeredSGDStrategy(1, compression=compression), 2, plugins=[plugin])


def test_error_feedback_beside_a_gradient_scaler_is_refused():
    for compression in ("int8", PowerSGD()):
        with pytest.raises(ValueError, match="a gradient scaler changes the scale of gradients in between; use"):
            trainer_with_scaler(compression)
    trainer_with_scaler("fp16")


class Complex(Net):
    def __init__(self):
        super().__init__()
        self.phase = torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))


def fit_what_has_no_effect(rank):
    with logged() as records:
        fit(layered(2, compression="bf16"), 2, max_steps=1)
    assert sum("compression='bf16') has no effect: there is a single group" in message for message in records) == 1
    # DDP itself refuses complex parameters in versions of torch before 2.13.
    message = "compression='int8' cannot round phase, which is torch.complex64|Invalid scalar type"
    with pytest.raises((ValueError, RuntimeError), match=message):
        fit(layered(1, compression="int8"), 2, Complex(), max_steps=1)


def test_compression_of_a_single_group_is_warned_of_and_complex_parameters_are_refused():
    run_processes(2, fit_what_has_no_effect)
