"""What hybrid parallelism sends, to the byte, against the formula; and what its head keeps in memory."""

from __future__ import annotations

from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.data import DataLoader

from lightning_dp.collectives.all_to_all import Channel
from lightning_dp.planner.traffic import head_traffic, hybrid_cost
from lightning_dp.strategies import KrizhevskyHybridStrategy
from lightning_dp.strategies.krizhevsky_hybrid.head import ShardedHead
from tests.ranks import run_processes
from tests.strategies.krizhevsky_hybrid.modules import HybridNet, NamedNet, StepNet
from tests.strategies.modules import CLASSES, FEATURES, trainer

TRUNK = FEATURES * 8 + 8 + 8 * 6 + 6
WIDTHS = [6, 7, 5, CLASSES]  # of `HybridNet`'s head
SIZES = {2: [5, 2], 3: [4, 1, 3], 4: [2, 6, 1, 3]}
STEPS = 2


def uneven(sizes: list[int], rank: int) -> DataLoader:
    """Each rank's batches have a size of their own."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(STEPS, sizes[rank], FEATURES, dtype=torch.float64, generator=generator)
    target = torch.randint(CLASSES, (STEPS, sizes[rank]), generator=generator)
    return DataLoader([*zip(x, target, strict=True)], batch_size=None)


class Counter(pl.Callback):
    """Bytes and exchanges of the head, and the bytes that DDP hands to its all-reduce, at the end of the last step."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.trunk = 0
        self.exchanges: dict[str, int] = {}
        trainer.strategy.model.register_comm_hook(None, self.all_reduce)
        trainer.strategy.on_stage = self.record

    def all_reduce(self, state, bucket):  # DDP reads annotations and does not know them as text
        self.trunk += bucket.buffer().nbytes
        return default_hooks.allreduce_hook(dist.group.WORLD, bucket)

    def record(self, stage: str, start_s: float, end_s: float) -> None:
        self.exchanges[stage] = self.exchanges.get(stage, 0) + 1

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.head = dict(trainer.strategy.bytes_sent)


Case = tuple[type[HybridNet], str, str, bool]  # module, loss, scheme, variable batch


def _count(rank: int, sizes: list[int], cases: list[Case]) -> list[tuple[int, dict[str, int], dict[str, int]]]:
    counted = []
    for net, loss, scheme, variable_batch in cases:
        counter = Counter()
        strategy = KrizhevskyHybridStrategy(scheme=scheme, variable_batch=variable_batch)
        own = trainer(strategy, len(sizes), use_distributed_sampler=False, callbacks=[counter])
        own.fit(net(loss=loss), uneven(sizes, rank))
        counted.append((counter.trunk, counter.head, counter.exchanges))
    return counted


@pytest.mark.ci
@pytest.mark.parametrize(
    "sizes", [SIZES[2], [2, 0, 3], *(pytest.param(SIZES[n], marks=pytest.mark.slow) for n in (3, 4))], ids=str
)
def test_real_counts_equal_the_formula(sizes):
    kinds = [(NamedNet, "cross_entropy"), (NamedNet, "logistic"), (StepNet, "logistic"), (HybridNet, "cross_entropy")]
    kinds = kinds if all(sizes) else kinds[:3]  # a rank without samples has no loss of its own
    cases: list[Case] = [(net, loss, scheme, False) for net, loss in kinds for scheme in "abc"]
    cases += [(NamedNet, "logistic", scheme, True) for scheme in "bc"]
    of_ranks = run_processes(len(sizes), _count, sizes, cases)
    for rank, counted in enumerate(of_ranks):
        for (net, loss, scheme, _), (trunk, head, exchanges) in zip(cases, counted, strict=True):
            loss = loss if net is NamedNet else "gathered" if net is StepNet else "own"
            expected = head_traffic(WIDTHS, sizes, 8, scheme, loss, rank)
            assert head == {what: STEPS * part.bytes_sent for what, part in expected.items()}
            assert {what: exchanges[what] for what in expected} == {
                what: STEPS * part.num_steps for what, part in expected.items()
            }
            assert trunk == STEPS * TRUNK * 8
            # A ring sends 2(N-1)/N of what it is handed, which N may not divide.
            in_all = hybrid_cost(TRUNK, WIDTHS, sizes, 8, scheme, loss, rank).bytes_sent
            ring = in_all - sum(head.values()) / STEPS
            assert abs(ring - 2 * (len(sizes) - 1) / len(sizes) * TRUNK * 8) < 2 * 8


class Kept:
    """Storages that are noted: the most that are alive at once, in bytes."""

    def __init__(self) -> None:
        self.peak = 0
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._storages = {key: one for key, one in self._storages.items() if not one[0].expired()}
        self.peak = max(self.peak, sum(num_bytes for _, num_bytes in self._storages.values()))


class Wide(HybridNet):
    """The proportions of AlexNet's head (9216, 4096, 4096, 1000)."""

    def __init__(self) -> None:
        super().__init__(loss="logistic")
        self.trunk = nn.Linear(FEATURES, 288)
        hidden = (nn.Linear(288, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU())
        self.head = nn.Sequential(*hidden, nn.Linear(128, CLASSES))
        self.double()


class WideStep(Wide, StepNet):
    pass


def _peaks(rank: int, world_size: int, net: type[Wide]) -> dict[str, tuple[int, int]]:
    """Of what autograd keeps for the head, its weights left out; and of that together with the features that arrive."""
    peaks = {}
    start, call = Channel.all_to_all, ShardedHead._compute
    for scheme in "abc":
        saved, also_arriving = Kept(), Kept()

        def starting(self: Channel, what: str, *messages: Any, arriving: Kept = also_arriving) -> Any:
            if what == "features":
                arriving.note(messages[1][0])
            return start(self, what, *messages)

        def calling(self: ShardedHead, *args: Any, both: tuple[Kept, Kept] = (saved, also_arriving)) -> Any:
            weights = {p.untyped_storage()._cdata for p in self.parameters}

            def keep(tensor: Tensor) -> Tensor:
                if tensor.untyped_storage()._cdata not in weights:
                    for kept in both:
                        kept.note(tensor)
                return tensor

            with saved_tensors_hooks(keep, lambda tensor: tensor):
                return call(self, *args)

        Channel.all_to_all, ShardedHead._compute = starting, calling
        own = trainer(KrizhevskyHybridStrategy(scheme=scheme), world_size, use_distributed_sampler=False)
        own.fit(net(), uneven([8] * world_size, rank))
        peaks[scheme] = saved.peak, also_arriving.peak
    Channel.all_to_all, ShardedHead._compute = start, call
    return peaks


@pytest.mark.ci
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_passes_in_turn_keep_a_fraction_of_the_activations(world_size):
    for in_turn, forward_first in zip(
        run_processes(world_size, _peaks, world_size, WideStep),
        run_processes(world_size, _peaks, world_size, Wide),
        strict=True,
    ):
        whole = 8 * world_size * (288 + 2 * 128) * 8  # features and hidden activations of the big batch; slices on top
        in_a, _ = in_turn["a"]
        assert whole < in_a < 1.5 * whole
        for scheme in "bc":
            saved, also_arriving = in_turn[scheme]
            assert saved <= in_a / (0.6 * world_size)
            assert saved <= also_arriving <= in_a / (0.6 * world_size)
            # Where the strategy does not know the cost function, it cannot go backward before all have gone forward.
            assert forward_first[scheme][0] > in_a / (0.6 * world_size)
