"""Cells of `planner_choices`: a model, hosts and a rate; what is trained in one, and how long it will take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from lightning_dp.collectives import RingState, ring_all_reduce_hook
from lightning_dp.losses import sharded_cross_entropy
from lightning_dp.planner import METHODS, Block, Link, Network, Workload, simulate
from lightning_dp.strategies import KrizhevskyHybridStrategy
from support.comm_hooks import POWER_SGD_RANK, HookedDDPStrategy
from support.data_parallel_methods import REFERENCE, Method, full_bytes, methods
from support.emulated_compute import TimedLinear, Timing
from support.emulated_hosts import bytes_per_s

NUM_INPUTS, NUM_CLASSES = 64, 10
# Hidden widths of the layers that take time, and of the head behind them. Gradients of 10 to 12 MB.
MODELS: dict[str, tuple[Sequence[int], Sequence[int]]] = {
    "even": ([640] * 7, []),  # time and bytes alike in all layers
    "back": ([128] * 16 + [512, 768, 1024, 1024], []),  # most bytes in the last layers, as in a convolutional network
    "head": ([256] * 5, [1024, 1024, 1024]),  # most bytes in fully-connected layers, which the hybrid shards
}
RATES = ("100mbit", "300mbit", "1gbit", "3gbit", "10gbit")
TOPOLOGIES = ((2, 2), (4, 1), (4, 2), (8, 1))  # hosts, ranks on a host
# What a cell takes beside its steps: hosts, processes and imports, and the probe of the network.
START_S = 60.0


@dataclass(frozen=True)
class Cell:
    """A setting in which the planner chooses.

    Attributes:
        model: in `MODELS`.
        num_hosts: number of hosts.
        per_host: ranks on a host.
        rate: of each host's link.
    """

    model: str
    num_hosts: int
    per_host: int
    rate: str

    @property
    def name(self) -> str:
        """Name on the command line, and of the file with the result."""
        return f"{self.model}-{self.num_hosts}x{self.per_host}-{self.rate}"


def all_cells() -> list[Cell]:
    """Return twenty cells: each rate with each topology, the three models in turn."""
    pairs = [(rate, hosts, per_host) for rate in RATES for hosts, per_host in TOPOLOGIES]
    names = list(MODELS)
    return [Cell(names[place % 3], hosts, per_host, rate) for place, (rate, hosts, per_host) in enumerate(pairs)]


def cell_of(name: str) -> Cell:
    """Return the cell of this name, which need not be one of the twenty.

    Raises:
        ValueError: it is no name of a cell.
    """
    try:
        model, topology, rate = name.split("-")
        hosts, per_host = map(int, topology.split("x"))
        bytes_per_s(rate)
    except ValueError as error:
        raise ValueError(f"{name!r} is no cell; use one like {all_cells()[0].name!r} ({error})") from error
    if model not in MODELS or hosts < 2 or per_host < 1:
        raise ValueError(f"{name!r} is no cell: use a model of {', '.join(MODELS)}, two hosts or more, a rank on each")
    return Cell(model, hosts, per_host, rate)


class CellModule(pl.LightningModule):
    """A network whose trunk takes a known time and whose head takes the processor's, with weights alike in each run.

    Args:
        model: in `MODELS`.
        timing: each layer of the trunk takes an equal part of it.
    """

    def __init__(self, model: str, timing: Timing) -> None:
        super().__init__()
        torch.manual_seed(0)
        widths, hidden = MODELS[model]
        sizes = [NUM_INPUTS, *widths]
        part = Timing(timing.load_s, timing.forward_s / len(widths), timing.backward_s / len(widths))
        trunk: list[nn.Module] = []
        for inputs, outputs in pairwise(sizes):
            trunk += [TimedLinear(inputs, outputs, part), nn.ReLU()]
        head: list[nn.Module] = []
        sizes = [sizes[-1], *hidden, NUM_CLASSES]
        for inputs, outputs in pairwise(sizes):
            head += [nn.Linear(inputs, outputs), nn.ReLU()]
        self.trunk = nn.Sequential(*trunk)
        self.head = nn.Sequential(*head[:-1])

    def head_step(self, features: Tensor, target: Tensor) -> Tensor:
        """Return the loss of features: the boundary at which the hybrid cuts."""
        return sharded_cross_entropy(self.head, features, target)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, target = batch
        return self.head_step(self.trunk(x), target)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)


def cell_methods(cell: Cell) -> dict[str, Method]:
    """Return what is measured, by the planner's names.

    Memonger and global batch norm are left out: emulated compute has no activations to drop, and no batch norm.
    """
    rows = methods(cell.per_host)
    several = cell.per_host > 1
    leader = ", leader" if several else ""
    names = {
        "ddp": REFERENCE,
        "ddp_bf16": "DDP + bf16 hook",
        "ddp_power_sgd": f"DDP + PowerSGD rank {POWER_SGD_RANK}",
        "ddp_accumulate_4": "DDP, 4 batches a step",
        "layered_sgd_load": f"layered SGD load{leader}",
        "layered_sgd_step": f"layered SGD step{leader}",
        "layered_sgd_step_bf16": f"layered SGD step{leader}, bf16",
        "layered_sgd_step_int8": f"layered SGD step{leader}, int8",
        "layered_sgd_step_power_sgd": f"layered SGD step{leader}, PowerSGD rank {POWER_SGD_RANK}",
    }
    if several:  # else it is the same as "leader"
        names["layered_sgd_step_sharded"] = "layered SGD step, sharded"
    found = {name: rows[row] for name, row in names.items()}
    found["ddp_ring"] = Method(
        lambda: HookedDDPStrategy(ring_all_reduce_hook, RingState, gradient_as_bucket_view=True), full_bytes
    )
    if MODELS[cell.model][1]:
        for scheme in ("a", "b", "c"):
            found[f"hybrid_{scheme}"] = Method(_hybrid(scheme), full_bytes)
    return {name: found[name] for name in METHODS if name in found}


def _hybrid(scheme: Any) -> Any:
    return lambda: KrizhevskyHybridStrategy(scheme=scheme)


def estimated_s(cell: Cell, timing: Timing, num_steps: int, num_rounds: int) -> float:
    """Return about how long a cell takes: its methods on a nominal network, without the processors' time.

    Args:
        cell: the cell.
        timing: of its steps.
        num_steps: of a run, warm-up included.
        num_rounds: runs of each method.
    """
    with torch.device("meta"):
        module = CellModule(cell.model, timing)
    size = sum(parameter.numel() for parameter in module.parameters())
    blocks = 8 * (Block(size * 4 / 8, timing.forward_s / 8, timing.backward_s / 8),)
    network = Network(Link(3e-4, bytes_per_s(cell.rate)), Link(1e-4, 1e9), cell.per_host)
    workload = Workload(blocks, load_s=timing.load_s)
    world_size = cell.num_hosts * cell.per_host
    # A hybrid sends less than DDP.
    steps_s = [
        simulate(workload, network, world_size, "ddp" if name.startswith("hybrid") else name).step_s
        for name in cell_methods(cell)
    ]
    return START_S + num_steps * (num_rounds * sum(steps_s) + steps_s[0])
