"""Checkpoints of compression: residuals that the training cannot use, and those of a training that has failed."""

from __future__ import annotations

import logging
from datetime import timedelta
from types import SimpleNamespace

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist

from lightning_dp._private.torch_names import group_timeout
from lightning_dp.collectives.compression.compressors import make_compressor
from lightning_dp.collectives.compression.layout import ParameterTable
from lightning_dp.collectives.compression.stages import CompressedAllReduce
from lightning_dp.collectives.groups import RankTopology
from lightning_dp.strategies import LayeredFSDPStrategy, LayeredSGDStrategy, PowerSGD
from lightning_dp.strategies.layered_sgd import strategy
from lightning_dp.strategies.layered_sgd.strategy import KEY, CompressionCheckpoint
from tests.ranks import run_processes
from tests.strategies.layered_sgd.modules import fit, layered
from tests.strategies.modules import Net

SHAPES = {"weight": (20, 30), "bias": (20,)}
RESIDUALS = {"residuals": {name: torch.zeros(2, *shape) for name, shape in SHAPES.items()}, "others": {}}
FACTORS = {"residuals": {}, "others": {"weight": {"right": torch.zeros(30, 4)}}}


def compressed_of_rank_0(num_groups, compression):
    """What sums, without anybody to send to; None where nothing is compressed."""
    if compression is None or num_groups == 1:
        return None
    collective = SimpleNamespace(topology=RankTopology(num_groups, 1), rank=0, inter_group=None)
    table = ParameterTable((name, torch.zeros(shape)) for name, shape in SHAPES.items())
    return CompressedAllReduce(collective, make_compressor(compression), table)


@pytest.mark.parametrize(
    ("state", "num_groups", "compression", "dropped"),
    [
        (RESIDUALS, 2, None, "2 parameters, weight first"),
        (RESIDUALS, 2, "bf16", "2 parameters, weight first"),
        (RESIDUALS, 2, PowerSGD(error_feedback=False), "2 parameters, weight first"),
        (RESIDUALS, 2, PowerSGD(), "1 parameters, bias first"),  # it sends vectors whole
        (RESIDUALS, 1, "int8", "2 parameters, weight first"),  # a single group, whose sums are exact
        (RESIDUALS, 2, "int8", None),
        (RESIDUALS, 3, "int8", None),
        (FACTORS, 2, PowerSGD(error_feedback=False), None),  # which left nothing to the next step
        (FACTORS, 2, "bf16", None),
    ],
)
def test_only_residuals_that_are_dropped_are_warned_of(state, num_groups, compression, dropped, caplog):
    checkpoint = CompressionCheckpoint(compression, "LayeredSGDStrategy", timedelta(minutes=1))
    checkpoint.take_from({KEY: state})
    with caplog.at_level(logging.WARNING):
        checkpoint.restore(compressed_of_rank_0(num_groups, compression))
    if dropped is None:
        assert not caplog.text
    else:
        assert f"what the last compressed step left out of its gradient is dropped for {dropped}" in caplog.text


class FailsOnRank0(Net):
    """Rank 1 still trains when rank 0 saves."""

    def training_step(self, batch, batch_idx):
        if self.global_step == 3:
            if self.global_rank == 1:
                dist.barrier()
            raise ValueError("a bad sample")
        return super().training_step(batch, batch_idx)


class SavesOnException(pl.Callback):
    """As `OnExceptionCheckpoint`, without the barrier that ends it on all ranks."""

    def __init__(self, path):
        self.path = path

    def on_exception(self, trainer, module, exception):
        if trainer.global_rank == 0:
            checkpoint = trainer._checkpoint_connector.dump_checkpoint()
            trainer.strategy.save_checkpoint(checkpoint, self.path)
            dist.barrier()


def fail_on_rank_0(rank, choice, path):
    """What this rank was warned of."""
    warnings = []
    strategy.log.warning = warnings.append
    with pytest.raises(ValueError, match="a bad sample"):
        fit(layered(1, compression=choice), 2, FailsOnRank0(), callbacks=[SavesOnException(path)])
    return warnings


POWER_SGD = PowerSGD(rank=2, min_compression_rate=1.0)  # the matrices of `Net` are small


@pytest.mark.parametrize(("choice", "has_state"), [("int8", False), (POWER_SGD, True)])
def test_a_rank_that_fails_alone_writes_its_checkpoint(choice, has_state, tmp_path):
    """It must not wait for the others, so it writes what needs nobody else."""
    warned, _ = run_processes(2, fail_on_rank_0, choice, str(tmp_path / "failed.ckpt"))
    assert ["holds no residuals" in text for text in warned] == [True]
    checkpoint = torch.load(tmp_path / "failed.ckpt", weights_only=True)
    assert checkpoint["global_step"] == 3
    assert (KEY in checkpoint) == has_state
    if has_state:
        assert not checkpoint[KEY]["residuals"]
        assert checkpoint[KEY]["others"]


def timeouts_of_groups(rank, kind, path):
    """Those of the groups of a fit, and of the groups in which residuals are gathered after it."""
    timeouts = []
    new_group = dist.new_group

    def recorded(*args, **options):
        group = new_group(*args, **options)
        if isinstance(group, dist.ProcessGroup):  # else it is a group of other ranks
            timeouts.append(group_timeout(group, torch.device("cpu")))
        return group

    dist.new_group = recorded
    _, trainer = fit(kind(1, compression="int8", timeout=timedelta(seconds=45)), 2)
    num_groups = len(timeouts)
    trainer.save_checkpoint(path)
    return timeouts[:num_groups], timeouts[num_groups:]


@pytest.mark.ci
@pytest.mark.parametrize("kind", [LayeredSGDStrategy, LayeredFSDPStrategy])
def test_residuals_are_gathered_within_the_strategy_s_timeout(kind, tmp_path):
    for in_fit, after_fit in run_processes(2, timeouts_of_groups, kind, str(tmp_path / "last.ckpt")):
        assert set(in_fit) == {timedelta(seconds=45)}
        assert after_fit == [timedelta(seconds=45)]
