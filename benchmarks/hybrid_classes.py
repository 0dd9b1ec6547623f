"""Time and memory of a step of a softmax head with very many classes: this package, and what PyTorch offers.

    python benchmarks/hybrid_classes.py                                     # 200,000 x 512
    python benchmarks/hybrid_classes.py --classes 1000000 --momentum 0      # needs 12 GB of memory
    python benchmarks/hybrid_classes.py --classes 20000 --sides sharded_cross_entropy loss_parallel F.cross_entropy \
        "sharded_cross_entropy, alone" "LinearCrossEntropyLoss, alone"

A head without a bias behind a small trunk, SGD, random samples, one thread for each rank. *Memory* is how far a
rank's step raises what PyTorch's allocator holds, above weights, gradients and optimizer states: the most of all ranks.

- `sharded_cross_entropy` in ``head_step``, scheme a of arXiv 1404.5997, under the Trainer.
- `F.cross_entropy` there, which gets the logits of all classes on each rank.
- DTensor's `loss_parallel` in a plain loop: the weight is sharded by classes, and features are gathered.
- Alone: one process with as many threads as there are cores has all samples and classes, and exchanges nothing.
  `torch.nn.LinearCrossEntropyLoss` computes its logits in chunks, too.

All sides run in the same processes, round after round, forward and backward in turn. Spreads are the minimum and the
maximum over the rounds. Writes results.json, table.md and a plot.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.bars import Bar, draw_bars
from support.command_line import benchmark_parser, output_folder, parse
from support.peak_memory import AllocatorRise
from support.report import markdown_table, write_report
from support.spread import min_max, turn_order
from support.training import make_trainer, quiet
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp import KrizhevskyHybridStrategy
from lightning_dp.launch import launch
from lightning_dp.losses import sharded_cross_entropy

NAMED = "sharded_cross_entropy"
GATHERED = "F.cross_entropy"
PARALLEL = "loss_parallel"
TORCH_ALONE = "LinearCrossEntropyLoss, alone"
NAMED_ALONE = "sharded_cross_entropy, alone"
INPUTS = 32  # of the trunk
SIDES = [NAMED, PARALLEL, GATHERED, NAMED_ALONE, TORCH_ALONE]
WARM_UP = 1
SMOKE = {"classes": 4000, "features": 64, "processes": 2, "samples": 64, "steps": 1, "rounds": 1}


def parser() -> argparse.ArgumentParser:
    options = benchmark_parser(__doc__, __file__)
    options.add_argument("--classes", type=int, default=200_000)
    options.add_argument("--features", type=int, default=512)
    options.add_argument("--samples", type=int, default=512, help="of all ranks together")
    options.add_argument("--processes", type=int, default=4)
    options.add_argument("--momentum", type=float, default=0.9, help="of SGD; 0 takes a third less memory")
    options.add_argument("--steps", type=int, default=2)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--sides", nargs="+", default=[NAMED, PARALLEL], choices=SIDES)
    return options


class Clock(pl.Callback):
    """Seconds of a step, and afterwards the memory of one."""

    def __init__(self, steps: int) -> None:
        self.num_steps = WARM_UP + steps + 2
        self._ends_s: list[float] = []
        self._rise = AllocatorRise()

    def tick(self) -> None:
        """Note the end of a step."""
        self._ends_s.append(time.perf_counter())
        if len(self._ends_s) >= self.num_steps - 2:
            self._rise.tick()

    def on_train_batch_end(self, *_: Any) -> None:
        self.tick()

    def results(self) -> dict[str, float]:
        """Return the mean seconds of a step, and the bytes by which one raises what is allocated."""
        assert self._rise.num_bytes is not None
        timed = self._ends_s[WARM_UP - 1 : -2]
        return {"step_s": (timed[-1] - timed[0]) / (len(timed) - 1), "rise_bytes": self._rise.num_bytes}


def make_optimizer(parameters: Any, momentum: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=momentum)


def make_trunk(arguments: argparse.Namespace) -> nn.Module:
    return nn.Sequential(nn.Linear(INPUTS, arguments.features), nn.ReLU())


class Net(pl.LightningModule):
    """A small trunk, and one linear layer to many classes."""

    def __init__(self, arguments: argparse.Namespace, loss: Callable[[nn.Module, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.trunk, self.loss, self.momentum = make_trunk(arguments), loss, arguments.momentum
        with torch.device("meta"):
            self.head = nn.Linear(arguments.features, arguments.classes, bias=False)

    def head_step(self, features: Tensor, target: Tensor) -> Tensor:
        return self.loss(self.head, features, target)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.head_step(self.trunk(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(self.parameters(), self.momentum)


def samples(arguments: argparse.Namespace, count: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, INPUTS, generator=generator)
    return x, torch.randint(arguments.classes, (count,), generator=generator)


def gathered_loss(head: nn.Module, features: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(head(features), target)


def hybrid(arguments: argparse.Namespace, clock: Clock, loss: Callable[[nn.Module, Tensor, Tensor], Tensor]) -> None:
    strategy = KrizhevskyHybridStrategy(scheme="a", evaluation="sharded", state_dict_type="sharded")
    trainer = make_trainer(
        strategy, per_host=arguments.processes, max_epochs=1, callbacks=[clock], use_distributed_sampler=False
    )
    count = arguments.samples // arguments.processes
    x, target = samples(arguments, count, dist.get_rank())
    batches = [TensorDataset(x, target)] * clock.num_steps
    trainer.fit(Net(arguments, loss), DataLoader(torch.utils.data.ConcatDataset(batches), count))


def parallel(arguments: argparse.Namespace, clock: Clock) -> None:
    world_size, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (world_size,))
    trunk = make_trunk(arguments)
    rows = nn.Parameter(nn.Linear(arguments.features, arguments.classes // world_size, bias=False).weight.detach())
    optimizer = make_optimizer([*trunk.parameters(), rows], arguments.momentum)
    x, target = samples(arguments, arguments.samples // world_size, rank)
    targets = [torch.empty_like(target) for _ in range(world_size)]
    for _ in range(clock.num_steps):
        optimizer.zero_grad()
        features = DTensor.from_local(trunk(x), mesh, [Shard(0)]).redistribute(placements=[Replicate()])
        dist.all_gather(targets, target)
        with loss_parallel():
            logits = F.linear(features, DTensor.from_local(rows, mesh, [Shard(0)]))
            F.cross_entropy(logits, torch.cat(targets)).backward()
        for p in trunk.parameters():
            dist.all_reduce(p.grad)
        del features, logits
        optimizer.step()
        clock.tick()


def alone(arguments: argparse.Namespace, clock: Clock, name: str) -> None:
    trunk = make_trunk(arguments)
    x, target = samples(arguments, arguments.samples, 0)
    if name == TORCH_ALONE:
        loss = nn.LinearCrossEntropyLoss(arguments.features, arguments.classes, options=nn.LinearCrossEntropyOptions())
        optimizer = make_optimizer([*trunk.parameters(), *loss.parameters()], arguments.momentum)
    else:
        head = nn.Linear(arguments.features, arguments.classes, bias=False)
        optimizer = make_optimizer([*trunk.parameters(), *head.parameters()], arguments.momentum)
    for _ in range(clock.num_steps):
        optimizer.zero_grad()
        features = trunk(x)
        (loss(features, target) if name == TORCH_ALONE else sharded_cross_entropy(head, features, target)).backward()
        optimizer.step()
        clock.tick()


def run_side(name: str, arguments: argparse.Namespace) -> dict[str, float]:
    """Train by one side; return what this rank's clock says. Sides of one process run on rank 0."""
    clock = Clock(arguments.steps)
    if name == NAMED:
        hybrid(arguments, clock, sharded_cross_entropy)
    elif name == GATHERED:
        hybrid(arguments, clock, gathered_loss)
    elif name == PARALLEL:
        parallel(arguments, clock)
    elif dist.get_rank() == 0:
        torch.set_num_threads(os.cpu_count() or 1)
        alone(arguments, clock, name)
        torch.set_num_threads(1)
    else:
        return {"step_s": 0.0, "rise_bytes": 0}
    return clock.results()


def worker(arguments: argparse.Namespace) -> list[dict[str, dict[str, float]]]:
    """One rank: train by every side in turn, round after round. Rank 0 returns the largest figures of all ranks."""
    quiet()
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rounds: list[dict[str, dict[str, float]]] = []
    for turn in range(arguments.rounds):
        rounds.append({})
        for name in turn_order(arguments.sides, turn):
            of_ranks: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(of_ranks, run_side(name, arguments))
            gc.collect()  # the next side needs the memory
            rounds[-1][name] = {key: max(one[key] for one in of_ranks) for key in of_ranks[0]}
            if dist.get_rank() == 0:
                step_s, rise_bytes = rounds[-1][name].values()
                print(
                    f"  round {turn + 1}  {name:32} {1e3 * step_s:8.1f} ms  {rise_bytes / 2**20:8.1f} MiB", flush=True
                )
    dist.destroy_process_group()
    return rounds


def table(arguments: argparse.Namespace, rounds: list[dict[str, dict[str, float]]]) -> str:
    rows = []
    for name in arguments.sides:
        step = min_max([1e3 * turn[name]["step_s"] for turn in rounds])
        ratio = min_max([turn[name]["step_s"] / turn[arguments.sides[0]]["step_s"] for turn in rounds])
        rise = max(turn[name]["rise_bytes"] for turn in rounds)
        rows.append([name, step.text(0), ratio.text(), f"{rise / 2**20:.0f}"])
    return markdown_table(["", "ms per step", f"over {arguments.sides[0]}'s", "memory, MiB"], rows)


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(parser(), SMOKE, argv)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    rounds = launch(worker, arguments, num_processes=arguments.processes)
    title = (
        f"Softmax over {arguments.classes:,} classes of {arguments.features} features, {arguments.processes} processes,"
        f" {arguments.samples} samples in all"
    )
    folder = output_folder(arguments)
    write_report(folder, arguments, title, table(arguments, rounds), rounds)
    panels = {
        label: [Bar(name, min_max([turn[name][key] / unit for turn in rounds])) for name in arguments.sides]
        for label, key, unit in (("ms per step", "step_s", 1e-3), ("memory, MiB", "rise_bytes", 2**20))
    }
    draw_bars(panels, folder / "classes.png", title=title, axis="time and memory of a step")


if __name__ == "__main__":
    main()
