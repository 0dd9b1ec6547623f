"""Step time of AlexNet on hosts with limited links: tensor parallelism + DDP, DDP, FSDP2, and hybrid parallelism.

    python benchmarks/hybrid_throughput.py                                        # 2 and 4 hosts, 1 and 10 Gbit/s
    python benchmarks/hybrid_throughput.py --hosts 4 --rates 1gbit --rounds 8 --sides "hybrid a" "hybrid c"

The hosts are network namespaces of this machine, a rank and a thread on each; benchmarks/support/emulated_hosts.py says
what that needs. All compute is real: AlexNet's head (9216-4096-4096-1000), and its trunk, with all parameters, on
images of 64x64 (of 224x224 with --image-size 224) and its last pooling to 6x6. Synthetic images, which take no time to
load. The hybrid (arXiv 1404.5997) and DDP run under Lightning, the other two in plain loops.

The reference is PyTorch's own tensor parallelism of the head with DDP of the trunk. All sides run in the same
processes, round after round, forward and backward in turn; a ratio compares two sides of one round, and its spread is
the minimum and the maximum over the rounds. DDP and the hybrids then train on with nothing sent (no all-reduce, no
exchange but those of batch sizes and targets): a step's communication time is the difference, which is what computing
does not hide. Bound: the larger of computing alone, and the bytes that a rank sends (by
`lightning_dp.planner.traffic`) over its link's rate; of the other sides only the bytes, counted on
the NIC. Writes results.json, table.md and step_time.png for each number of hosts.
"""

from __future__ import annotations

import argparse
import copy
import gc
import os
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.strategies import DDPStrategy
from support.alexnet import (
    FULL_SIZE,
    IMAGE_SIZE,
    SMALL,
    RandomImages,
    SplitModule,
    WholeModule,
    alexnet,
    head_widths,
    num_parameters,
)
from support.command_line import benchmark_parser, output_folder, parse
from support.emulated_hosts import NIC, bytes_per_s, rate_name
from support.host_jobs import Job, add_worker_option, measure_on_hosts, run_benchmark
from support.hybrid_report import DDP, FIXED, VARIABLE, draw, throughput_table
from support.interception import ExchangeSwitch, send_nothing
from support.report import write_report
from support.sharded_peers import PEERS, TENSOR_PARALLEL, train_peer
from support.spread import turn_order
from support.training import make_trainer, quiet

from lightning_dp.models import TrunkAndHead
from lightning_dp.planner.traffic import hybrid_cost, ring_cost
from lightning_dp.strategies import KrizhevskyHybridStrategy

WARM_UP = 2
SMOKE = {
    "hosts": [2], "rates": ["1gbit"], "batch_size": 4, "image_size": 64, "steps": 3, "rounds": 1, "network": SMALL,
}  # fmt: skip
HYBRIDS: dict[str, dict[str, Any]] = {
    "hybrid a": {"scheme": "a"},
    "hybrid b": {"scheme": "b"},
    FIXED: {"scheme": "c"},
    VARIABLE: {"scheme": "c", "variable_batch": True},
    "hybrid c, 2 passes": {"scheme": "c", "num_passes": 2},  # on two hosts the same as FIXED
}
SIDES = [TENSOR_PARALLEL, DDP, *(name for name in PEERS if name != TENSOR_PARALLEL), *HYBRIDS]


def parser() -> argparse.ArgumentParser:
    options = benchmark_parser(__doc__, __file__)
    options.add_argument("--hosts", type=int, nargs="+", default=[2, 4])
    options.add_argument("--rates", nargs="+", default=["1gbit", "10gbit"], help="of each host's link")
    options.add_argument("--sides", nargs="+", default=SIDES, choices=SIDES)
    options.add_argument("--batch-size", type=int, default=32, help="images a rank")
    options.add_argument("--image-size", type=int, default=IMAGE_SIZE)
    options.add_argument("--steps", type=int, default=5)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--network", choices=[FULL_SIZE, SMALL], default=FULL_SIZE, help="small: for smoke runs")
    options.add_argument("--suffix", default="", help="of the folder for the results, behind the number of hosts")
    add_worker_option(options)
    return options


class Clock(pl.Callback):
    """Times ``steps`` steps, and then as many again in which nothing is sent."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._ends_s: list[float] = []
        self._sent: list[int] = []  # bytes out of this host's NIC so far, at the end of each step
        self._silence = ExchangeSwitch(send_nothing)

    def tick(self) -> None:
        """Note the end of a step."""
        self._ends_s.append(time.perf_counter())
        self._sent.append(int(Path(f"/sys/class/net/{NIC}/statistics/tx_bytes").read_text()))

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.tick()
        if len(self._ends_s) == WARM_UP + self._steps:
            trainer.strategy.model.require_backward_grad_sync = False
            self._silence.on()

    def on_train_end(self, *_: Any) -> None:
        self._silence.off()

    def results(self) -> dict[str, float | None]:
        """Return seconds a step, seconds of it alone (None if there were no such steps), and bytes out of the NIC."""
        first = WARM_UP - 1
        last = first + self._steps
        alone = self._ends_s[last + 1 :]  # the first step without communication is a warm-up again
        return {
            "step_s": (self._ends_s[last] - self._ends_s[first]) / self._steps,
            "alone_s": (alone[-1] - alone[0]) / (len(alone) - 1) if alone else None,
            "nic_bytes": (self._sent[last] - self._sent[first]) / self._steps,
        }


def run_side(name: str, job: Job, prototype: TrunkAndHead, rank: int) -> dict[str, float | None]:
    """Train by one side on this rank; return what its clock says."""
    options = job.options
    clock = Clock(options.steps)
    net = copy.deepcopy(prototype)
    if name in PEERS:
        batch = RandomImages([options.batch_size], rank, options.image_size)[0]
        train_peer(name, net, batch, WARM_UP + options.steps, clock.tick)
        return clock.results()
    num_steps = WARM_UP + 2 * options.steps + 1
    ddp = DDPStrategy(gradient_as_bucket_view=True, init_sync=False)
    strategy = ddp if name == DDP else KrizhevskyHybridStrategy(**HYBRIDS[name])
    trainer = make_trainer(
        strategy, per_host=1, num_hosts=job.num_hosts, max_epochs=1, callbacks=[clock], use_distributed_sampler=False
    )
    images = RandomImages([options.batch_size] * num_steps, rank, options.image_size)
    trainer.fit(WholeModule(net) if name == DDP else SplitModule(net), images.loader())
    return clock.results()


def worker(job: Job) -> list[dict[str, Any]]:
    """One rank: train by every side in turn, round after round."""
    quiet()
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    prototype = alexnet(job.options.network)
    rounds: list[dict[str, Any]] = []
    for turn in range(job.options.rounds):
        rounds.append({})
        for name in turn_order(job.options.sides, turn):
            rounds[-1][name] = run_side(name, job, prototype, rank)
            gc.collect()  # the next side needs the memory
            if rank == 0:
                milliseconds = 1e3 * rounds[-1][name]["step_s"]
                print(f"  {rate_name(job.rate):>14}  round {turn + 1}  {name:26} {milliseconds:7.1f} ms", flush=True)
    dist.destroy_process_group()
    return rounds


def bound(options: argparse.Namespace, num_hosts: int, rate: str, name: str, rounds: list[Any]) -> dict[str, Any]:
    """Return the bytes that a rank sends in a step, and the least time that a step can take."""
    net = alexnet(options.network)
    if name == DDP:
        num_bytes = ring_cost(num_parameters(net), 4, num_hosts).bytes_sent
    elif name in HYBRIDS:
        batch_sizes = [options.batch_size] * num_hosts
        passes = {key: value for key, value in HYBRIDS[name].items() if key != "variable_batch"}
        num_bytes = hybrid_cost(num_parameters(net.trunk), head_widths(net), batch_sizes, 4, **passes).bytes_sent
    else:
        num_bytes = int(median(turn[name]["nic_bytes"] for turn in rounds))
    alone_s = median(turn[name]["alone_s"] or 0.0 for turn in rounds)
    return {"bytes": num_bytes, "bound_s": max(alone_s, num_bytes / bytes_per_s(rate))}


def report(arguments: argparse.Namespace) -> None:
    """Measure for every number of hosts at every rate, and write tables and plots."""
    for num_hosts in arguments.hosts:
        folder = output_folder(arguments, f"{num_hosts}-hosts{arguments.suffix and '-'}{arguments.suffix}")
        results: dict[str, dict[str, Any]] = {}
        for rate in arguments.rates:
            rounds = measure_on_hosts(__file__, Job(arguments, num_hosts, 1, rate), folder)[0]
            results[rate] = {
                name: {"rounds": [turn[name] for turn in rounds], **bound(arguments, num_hosts, rate, name, rounds)}
                for name in arguments.sides
            }
        title = f"AlexNet, {num_hosts} hosts, {arguments.batch_size} images of {arguments.image_size} px a rank"
        write_report(folder, arguments, title, throughput_table(results, num_hosts * arguments.batch_size), results)
        draw(results, folder / "step_time.png", title)


def main(argv: Sequence[str] | None = None) -> None:
    run_benchmark(parse(parser(), SMOKE, argv), worker, report)


if __name__ == "__main__":
    main()
