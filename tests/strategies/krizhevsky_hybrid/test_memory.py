"""A head that need not fit on one device: where its values are, and who gets them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from support.peak_memory import AllocatorRise
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp import KrizhevskyHybridStrategy
from lightning_dp._lightning import DDPStrategy
from lightning_dp.collectives.all_to_all import Channel
from lightning_dp.losses import sharded_cross_entropy
from lightning_dp.strategies.krizhevsky_hybrid.head import ShardedHead
from lightning_dp.strategies.krizhevsky_hybrid.state import CPU, ShardedParameters, whole_on_rank_0
from tests.ranks import run_processes, run_threads
from tests.strategies.krizhevsky_hybrid.modules import StepNet, all_batches, batches, make_head
from tests.strategies.modules import CLASSES, FEATURES, assert_same, snapshot, trainer

NUM_NUMBERS = sum(p.numel() for p in make_head().parameters())


def gathered(rank, group):
    head = make_head().double()
    sharded = ShardedHead(head, Channel(group))
    parameters = ShardedParameters(sharded)
    before = {name: p.data for name, p in head.named_parameters()}
    parameters.shard(CPU)
    sent_to_shard = sharded.control.bytes_sent["parameters"]
    whole = {name: whole_on_rank_0(sharded, p.data, p) for name, p in head.named_parameters()}
    sent_to_gather = sharded.control.bytes_sent["parameters"] - sent_to_shard
    own = sum(p.nbytes for p in head.parameters())
    same_object = all(parameters._before[p] is not None for p in head.parameters())
    restored = parameters.restore()
    assert restored
    assert same_object
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in head.named_parameters())
    return sent_to_shard, sent_to_gather, own, whole, before


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_rank_0_sends_each_its_rows_and_gathers_alone(world_size):
    results = run_threads(world_size, gathered)
    for rank, (sent_to_shard, sent_to_gather, own, whole, before) in enumerate(results):
        assert sent_to_shard == (8 * NUM_NUMBERS - own if rank == 0 else 0)
        assert sent_to_gather == (0 if rank == 0 else own)
        if rank == 0:
            assert_same(whole, before, 0.0)
        else:
            assert sum(value.nbytes for value in whole.values()) == own
    assert sum(own for _, _, own, _, _ in results) == 8 * NUM_NUMBERS


def _moved(rank: int) -> int:
    held = []
    move = DDPStrategy.model_to_device

    def look(self: DDPStrategy) -> None:
        held.append(sum(p.numel() for p in self.lightning_module.head.parameters()))
        move(self)

    DDPStrategy.model_to_device = look
    trainer(KrizhevskyHybridStrategy(), 2, max_steps=1).fit(StepNet(), batches(rank, 2, steps=1))
    return held[0]


def test_each_rank_has_only_its_rows_when_the_module_moves_to_the_device():
    assert sum(run_processes(2, _moved)) == NUM_NUMBERS


class MetaNet(StepNet):
    """The head's values exist as rows only."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        with torch.device("meta"):
            self.head = copy.deepcopy(self.head).to("meta")


class Keep(pl.Callback):
    """The module's values when training starts, whole."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.values = {name: value.clone() for name, value in module.state_dict().items()}


def _meta(rank: int, seed: int, ckpt_path: str | None, epochs: int) -> tuple[dict[str, Tensor], Any]:
    torch.manual_seed(seed)
    keep, module = Keep(), MetaNet()
    parameters = list(module.parameters())
    torch.manual_seed(seed + rank)  # rank 0's counts
    runner = trainer(KrizhevskyHybridStrategy(), 2, use_distributed_sampler=False, callbacks=[keep], max_epochs=epochs)
    runner.fit(module, batches(rank, 2), ckpt_path=ckpt_path)
    assert all(old is new for old, new in zip(parameters, module.parameters(), strict=True))
    return keep.values, snapshot(module, runner)


@pytest.mark.ci
def test_a_head_on_the_meta_device_gets_its_values_row_by_row():
    values, after = zip(*run_processes(2, _meta, 3, None, 1), strict=True)
    assert_same(values[0], values[1], 0.0)
    weight = values[0]["head.1.weight"]
    assert weight.shape == (7, 6)
    assert weight.abs().max() <= 6**-0.5  # as nn.Linear starts: uniform, by the number of inputs
    assert len(weight.unique()) == weight.numel()  # ranks draw rows of their own
    again, _ = run_processes(2, _meta, 3, None, 1)[0]
    assert_same(again, values[0], 0.0)
    # From there it trains as in one process.
    module = StepNet()
    module.load_state_dict(values[0])
    runner = trainer("auto", 1)
    runner.fit(module, all_batches(2))
    for of_rank in after:
        assert_same(of_rank, snapshot(module, runner), 1e-9)


@pytest.mark.ci
def test_a_checkpoint_can_be_loaded_into_a_head_on_the_meta_device(tmp_path):
    path = str(tmp_path / "one.ckpt")
    module = StepNet()
    runner = trainer("auto", 1)
    runner.fit(module, all_batches(2))
    runner.save_checkpoint(path)
    saved = torch.load(path, weights_only=True)["state_dict"]
    resumed = trainer("auto", 1, max_epochs=2)
    resumed.fit(module, all_batches(2), ckpt_path=path)
    for values, after in run_processes(2, _meta, 3, path, 2):
        assert_same(values, saved, 0.0)
        assert_same(after, snapshot(module, resumed), 1e-9)


class MoreClasses(MetaNet):
    """As many times more as there are ranks, so that a local shard has the shape of the whole before."""

    def __init__(self) -> None:
        super().__init__()
        self.head[4] = nn.Linear(5, 2 * CLASSES, device="meta", dtype=torch.float64)


def _meta_of_more_classes(rank: int, path: str) -> None:
    with pytest.raises(RuntimeError, match=r"size mismatch for head\.4\.weight: .* has \(3, 5\), .* whole is \(6, 5\)"):
        trainer(KrizhevskyHybridStrategy(), 2, max_epochs=2).fit(MoreClasses(), batches(rank, 2), ckpt_path=path)


@pytest.mark.ci
def test_a_whole_head_is_not_taken_for_the_local_shard_of_a_larger_one(tmp_path):
    path = str(tmp_path / "one.ckpt")
    runner = trainer("auto", 1)
    runner.fit(StepNet(), all_batches(2))
    runner.save_checkpoint(path)
    run_processes(2, _meta_of_more_classes, path)


def _meta_evaluated(rank: int, path: str | None) -> None:
    # Lightning loads the checkpoint before it moves the module.
    runner = trainer(KrizhevskyHybridStrategy(evaluation="sharded"), 2)
    with pytest.raises(ValueError, match=r"head\.1 is on the meta device, .*; build it on the CPU"):
        runner.predict(MetaNet(), batches(rank, 2), ckpt_path=path)


@pytest.mark.ci
@pytest.mark.parametrize("is_loaded", [False, True])
def test_outside_of_fit_a_head_on_the_meta_device_is_an_error(tmp_path, is_loaded):
    path = str(tmp_path / "one.ckpt") if is_loaded else None
    if path is not None:
        runner = trainer("auto", 1)
        runner.fit(StepNet(), all_batches(2))
        runner.save_checkpoint(path)
    run_processes(2, _meta_evaluated, path)


class MetaTrunk(StepNet):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(FEATURES, 6, device="meta"))


def _meta_trunk(rank: int) -> None:
    with pytest.raises(ValueError, match=r"trunk\.0\.weight is on the meta device"):
        trainer(KrizhevskyHybridStrategy(), 2).fit(MetaTrunk(), batches(rank, 2))


def test_the_trunk_must_have_values():
    run_processes(2, _meta_trunk)


class Configured(StepNet):
    """Built in configure_model, under the strategy's context."""

    def configure_model(self) -> None:
        self.head = make_head().double()
        assert all(p.device.type == "cpu" for p in self.head.parameters())


def _configured(rank: int) -> dict[str, Tensor]:
    module = Configured()
    runner = trainer(KrizhevskyHybridStrategy(), 2, use_distributed_sampler=False)
    runner.fit(module, batches(rank, 2))
    return snapshot(module, runner)


@pytest.mark.ci
def test_a_module_may_be_built_in_configure_model():
    first, second = run_processes(2, _configured)
    assert_same(first, second, 0.0)


MANY, WIDTH, SAMPLES, CHUNK = 40_000, 64, 64, 2**19  # of a rank: 5.1 MB of weights, of gradients, and of logits


class ManyClasses(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = nn.Linear(2, WIDTH), nn.Linear(WIDTH, MANY, bias=False)

    def head_step(self, features: Tensor, target: Tensor) -> Tensor:
        return sharded_cross_entropy(self.head, features, target, chunk_bytes=CHUNK)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.head_step(self.trunk(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class SeesOldGradients(ManyClasses):
    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.old = None if self.head.weight.grad is None else self.head.weight.grad.sum().item()


class Measure(pl.Callback):
    def __init__(self) -> None:
        self.rise = AllocatorRise()

    def on_train_batch_end(self, *_: Any) -> None:
        self.rise.tick()


def _rises(rank: int) -> list[int]:
    rises = []
    for net in (ManyClasses, SeesOldGradients):
        module, measure = net(), Measure()
        x, target = torch.randn(3 * SAMPLES // 2, 2), torch.arange(3 * SAMPLES // 2)
        runner = trainer(
            KrizhevskyHybridStrategy(), 2, max_epochs=1, callbacks=[measure], use_distributed_sampler=False
        )
        runner.fit(module, DataLoader(TensorDataset(x, target), SAMPLES // 2))
        rises.append(measure.rise.num_bytes)
    assert module.old is not None
    return rises


@pytest.mark.ci
def test_a_step_with_many_classes_needs_a_chunk_above_weights_gradients_and_momentum():
    row_bytes = MANY // 2 * WIDTH * 4
    for rise, rise_with_old_gradients in run_processes(2, _rises):
        assert rise <= 1.5 * CHUNK
        # A hook may read the old gradients after head_step has computed the new ones.
        assert row_bytes <= rise_with_old_gradients <= row_bytes + 1.5 * CHUNK
