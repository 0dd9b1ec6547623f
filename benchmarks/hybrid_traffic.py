"""Bytes that a rank sends in a training step of AlexNet, counted: DDP, and hybrid parallelism by schemes a, b and c.

    python benchmarks/hybrid_traffic.py                      # 2, 4 and 8 ranks, processes of this machine
    python benchmarks/hybrid_traffic.py --ranks 2 4

61,838,248 parameters (benchmarks/support/alexnet.py), batches of two sizes in turn. For the head, the strategy counts
every message that it sends. For the trunk, and for the whole network in DDP, a communication hook counts what DDP
hands to its all-reduce; a ring sends 2 (K-1)/K of that. All counts are compared with the formulas, `ring_cost` and
`head_traffic`, to the byte; a count that differs is an error. The table then gives the formulas' figures for 32 images
a rank. Nothing is timed, so there is no spread: the counts are the same in every run. Writes results.json, table.md
and bytes.png.
"""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Sequence
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import DDPStrategy
from support.alexnet import (
    FULL_SIZE,
    SMALL,
    RandomImages,
    SplitModule,
    WholeModule,
    alexnet,
    head_widths,
    num_parameters,
)
from support.bars import Bar, draw_bars
from support.comm_hooks import counting_hook
from support.command_line import benchmark_parser, output_folder, parse
from support.report import markdown_table, write_report
from support.spread import min_max
from support.training import make_trainer, quiet

from lightning_dp.launch import launch
from lightning_dp.planner.traffic import head_traffic, ring_cost
from lightning_dp.strategies import KrizhevskyHybridStrategy

COUNTED = (4, 8)  # images a rank, in the steps that are counted
SHOWN = 32  # images a rank, in the table
DDP = "DDP"
SMOKE = {"ranks": [2], "network": SMALL}
# Name -> module, scheme, and where the loss is computed, for the formula.
SIDES: dict[str, tuple[type[WholeModule], Any, Any]] = {
    DDP: (WholeModule, None, None),
    **{f"{scheme}, `head_step`": (SplitModule, scheme, "logistic") for scheme in "abc"},
    **{f"{scheme}, no `head_step`": (WholeModule, scheme, "own") for scheme in "abc"},
}
# Column of the table -> what the strategy calls it.
COLUMNS = {
    "features": ("features", "feature gradients"),
    "hidden": ("hidden activations", "hidden gradients"),
}


def parser() -> argparse.ArgumentParser:
    options = benchmark_parser(__doc__, __file__)
    options.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    options.add_argument("--network", choices=[FULL_SIZE, SMALL], default=FULL_SIZE, help="small: for smoke runs")
    return options


class Counter(pl.Callback):
    """Counts what is sent in each step."""

    def __init__(self) -> None:
        self.all_reduced: list[int] = []  # bytes that DDP hands to its all-reduce
        self.head: list[dict[str, int]] = []  # bytes sent for the head, by what they are
        self._before: dict[str, int] = {}

    def on_train_start(self, trainer: Any, module: Any) -> None:
        trainer.strategy.model.register_comm_hook(self.all_reduced, counting_hook)

    def on_train_batch_start(self, *_: Any) -> None:
        self.all_reduced.append(0)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        total = dict(getattr(trainer.strategy, "bytes_sent", {}))
        self.head.append({what: count - self._before.get(what, 0) for what, count in total.items()})
        self._before = total


def count(network: str) -> dict[str, Any]:
    """One rank: train by every side; return what this rank sent in each step."""
    quiet()
    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    counted: dict[str, Any] = {}
    for name, (kind, scheme, _) in SIDES.items():
        counter = Counter()
        strategy = DDPStrategy() if scheme is None else KrizhevskyHybridStrategy(scheme=scheme)
        trainer = make_trainer(
            strategy, per_host=world_size, max_epochs=1, callbacks=[counter], use_distributed_sampler=False
        )
        trainer.fit(kind(alexnet(network)), RandomImages(list(COUNTED), rank).loader())
        counted[name] = {"all_reduced": counter.all_reduced, "head": counter.head}
        del trainer
        gc.collect()  # eight ranks of this network fill a machine
        if rank == 0:
            of_head = [sum(step.values()) for step in counter.head]
            print(f"  {world_size} ranks  {name:18} all-reduced {counter.all_reduced}, head {of_head}", flush=True)
    return counted


def formula(name: str, network: str, world_size: int, batch_size: int) -> tuple[int, dict[str, int]]:
    """Return (parameters in DDP, bytes that rank 0 sends for the head, by what they are)."""
    _, scheme, loss = SIDES[name]
    net = alexnet(network)
    if scheme is None:
        return num_parameters(net), {}
    traffic = head_traffic(head_widths(net), [batch_size] * world_size, 4, scheme, loss)
    return num_parameters(net.trunk), {what: part.bytes_sent for what, part in traffic.items()}


def check(counted: dict[str, Any], network: str, world_size: int) -> None:
    """Raise where a count is not the formula's."""
    for name in SIDES:
        for step, batch_size in enumerate(COUNTED):
            elements, head = formula(name, network, world_size, batch_size)
            found = (counted[name]["all_reduced"][step], counted[name]["head"][step])
            if found != (4 * elements, head):
                raise RuntimeError(f"{name}, {world_size} ranks, batch {batch_size}: {found}, not {elements * 4, head}")


def bytes_by_column(name: str, network: str, world_size: int) -> dict[str, int]:
    """Return what rank 0 sends in a step with `SHOWN` images a rank: by column of the table, and in all."""
    elements, head = formula(name, network, world_size, SHOWN)
    sent = {"trunk": ring_cost(elements, 4, world_size).bytes_sent}
    sent |= {column: sum(head.get(what, 0) for what in names) for column, names in COLUMNS.items()}
    total = sent["trunk"] + sum(head.values())
    sent["logits, targets, loss"] = total - sum(sent.values())
    return {**sent, "all": total}


def traffic_table(sent: dict[int, dict[str, dict[str, int]]]) -> str:
    """Return bytes, and DDP's over them. ``sent``: ranks -> side -> column -> bytes."""
    columns = list(next(iter(sent.values()))[DDP])
    rows = [
        [
            str(world_size),
            name,
            *(f"{parts[column]:,}" for column in columns),
            f"{sides[DDP]['all'] / parts['all']:.1f}",
        ]
        for world_size, sides in sent.items()
        for name, parts in sides.items()
    ]
    return markdown_table(["ranks", "", *columns, "DDP's over it"], rows)


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(parser(), SMOKE, argv)
    folder = output_folder(arguments)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["OMP_NUM_THREADS"] = "1"
    counted = {}
    sent = {}
    for world_size in arguments.ranks:
        counted[world_size] = launch(count, arguments.network, num_processes=world_size)
        check(counted[world_size], arguments.network, world_size)
        sent[world_size] = {name: bytes_by_column(name, arguments.network, world_size) for name in SIDES}
    title = (
        f"Bytes sent by rank 0 in a step of AlexNet, {SHOWN} images a rank; counted with {COUNTED[0]} and {COUNTED[1]}"
    )
    write_report(folder, arguments, title, traffic_table(sent), {"counted": counted, "sent": sent})
    panels = {
        f"{world_size} ranks": [Bar(name, min_max([parts["all"] / 1e6])) for name, parts in sides.items()]
        for world_size, sides in sent.items()
    }
    draw_bars(
        panels,
        folder / "bytes.png",
        title=f"AlexNet, {SHOWN} images a rank",
        axis="what rank 0 sends in a step",
        unit="MB",
    )


if __name__ == "__main__":
    main()
