"""What a rank sends in a training step of AlexNet, counted: DDP, and hybrid parallelism by schemes a, b and c.

    python benchmarks/hybrid_traffic.py                      # 2, 4 and 8 ranks, processes of this machine
    python benchmarks/hybrid_traffic.py --ranks 2 4

61.1 million parameters (benchmarks/hybrid_model.py), two batch sizes in turn. Of the head, the strategy counts every
message that it sends. Of the trunk, and of the whole network in DDP, a communication hook counts what DDP hands to its
all-reduce; a ring sends 2 (K - 1) / K of that. Everything is held against `lightning_dp.collectives.cost`, to the byte;
the table then gives that formula's figures for 32 images a rank. Writes table.md and results.json.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from layered_sgd_throughput import quiet
from pytorch_lightning.strategies import DDPStrategy
from support.alexnet import WIDTHS, Images, Marked, Whole, alexnet, trunk_and_head
from support.report import describe_machine, output_folder
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from lightning_dp.collectives.cost import ring_cost
from lightning_dp.strategies import KrizhevskyHybridStrategy
from lightning_dp.strategies.krizhevsky_hybrid.traffic import head_traffic

COUNTED, SHOWN = (4, 8), 32  # images a rank
# Name -> module, scheme, and where the cost is computed, for the formula.
SIDES: dict[str, tuple[type[Whole], Any, Any]] = {
    "DDP": (Whole, None, None),
    **{f"{scheme}, `head_step`": (Marked, scheme, "logistic") for scheme in "abc"},
    **{f"{scheme}, no `head_step`": (Whole, scheme, "own") for scheme in "abc"},
}


class Counter(pl.Callback):
    """What was sent in each step."""

    def __init__(self) -> None:
        self.all_reduced: list[int] = []
        self.head: list[dict[str, int]] = []
        self._before: dict[str, int] = {}

    def on_train_start(self, trainer: Any, module: Any) -> None:
        trainer.strategy.model.register_comm_hook(None, self.all_reduce)

    def all_reduce(self, state, bucket):  # type: ignore[no-untyped-def]  # DDP does not know annotations as text
        self.all_reduced[-1] += bucket.buffer().nbytes
        return default_hooks.allreduce_hook(dist.group.WORLD, bucket)

    def on_train_batch_start(self, *_: Any) -> None:
        self.all_reduced.append(0)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        total = dict(getattr(trainer.strategy, "bytes_sent", {}))
        self.head.append({what: count - self._before.get(what, 0) for what, count in total.items()})
        self._before = total


def worker(out: Path) -> None:
    """One rank, started by torchrun; rank 0 writes what it sent in each step."""
    quiet()
    counted: dict[str, Any] = {}
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    for name, (kind, scheme, _) in SIDES.items():
        counter = Counter()
        trainer = pl.Trainer(
            strategy=DDPStrategy() if scheme is None else KrizhevskyHybridStrategy(scheme=scheme), accelerator="cpu",
            devices=world_size, max_epochs=1, callbacks=[counter], use_distributed_sampler=False, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        module = kind(alexnet())
        trainer.fit(module, torch.utils.data.DataLoader(Images(list(COUNTED), rank), batch_size=None))
        counted[name] = {"all_reduced": counter.all_reduced, "head": counter.head}
        del module, trainer
        gc.collect()  # eight ranks of this network fill a machine
        if rank == 0:
            print(f"  {world_size} ranks  {name:18} {counted[name]}", flush=True)
    if rank == 0:
        out.write_text(json.dumps(counted))


def formula(name: str, world_size: int, batch_size: int) -> tuple[int, dict[str, int]]:
    """(parameters in DDP, bytes that rank 0 sends for the head, by what they are)."""
    _, scheme, cost_function = SIDES[name]
    trunk, head = trunk_and_head(alexnet())
    if scheme is None:
        return trunk + head, {}
    traffic = head_traffic(WIDTHS, [batch_size] * world_size, 4, scheme, cost_function)
    return trunk, {what: part.bytes_sent for what, part in traffic.items()}


def check(counted: dict[str, Any], world_size: int) -> None:
    """Raise where a count is not the formula's."""
    for name in SIDES:
        for step, batch_size in enumerate(COUNTED):
            elements, head = formula(name, world_size, batch_size)
            found = counted[name]["all_reduced"][step], counted[name]["head"][step]
            if found != (4 * elements, head):
                raise RuntimeError(f"{name}, {world_size} ranks, batch {batch_size}: {found}, not {elements * 4, head}")


def table(ranks: list[int]) -> str:
    """Bytes that rank 0 sends in a step with `SHOWN` images a rank: in all, and DDP's over it."""
    groups = {"trunk": (), "features": ("features", "feature gradients"),
              "hidden": ("hidden activations", "hidden gradients")}  # fmt: skip
    lines = [
        f"| ranks | | {' | '.join(groups)} | logits, targets, loss | all | DDP's over it |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for world_size in ranks:
        of_ddp = 0
        for name in SIDES:
            elements, head = formula(name, world_size, SHOWN)
            ring = ring_cost(elements, 4, world_size).bytes_sent
            parts = [ring, *(sum(head.get(what, 0) for what in whats) for whats in list(groups.values())[1:])]
            total = ring + sum(head.values())
            of_ddp = of_ddp or total
            cells = [f"{part:,}" for part in [*parts, total - sum(parts), total]]
            lines.append(f"| {world_size} | {name} | {' | '.join(cells)} | {of_ddp / total:.1f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments.worker)
        return
    folder = output_folder("hybrid_traffic")
    counted = {}
    for world_size in arguments.ranks:
        out = folder / f"ranks-{world_size}.json"
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world_size}"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        subprocess.run([*torchrun, __file__, "--worker", str(out)], env=environment, check=True)
        counted[world_size] = json.loads(out.read_text())
        check(counted[world_size], world_size)
    text = table(arguments.ranks)
    print(
        f"Bytes sent by rank 0 in a step, {SHOWN} images a rank; counted with {COUNTED}; {describe_machine()}\n{text}"
    )
    (folder / "table.md").write_text(text + "\n")
    (folder / "results.json").write_text(json.dumps({"machine": describe_machine(), "counted": counted}, indent=1))
    print(f"written to {folder}")


if __name__ == "__main__":
    main()
