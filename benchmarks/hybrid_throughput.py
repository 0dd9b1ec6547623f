"""AlexNet on hosts with limited links: DDP, what PyTorch offers beside it, and hybrid parallelism (arXiv 1404.5997).

    python benchmarks/hybrid.py                                        # 2 and 4 hosts, 1 and 10 Gbit/s
    python benchmarks/hybrid.py --hosts 4 --rates 1gbit --sides "hybrid c" "hybrid c variable" --rounds 8

The hosts are network namespaces of this machine, a rank and a thread on each; benchmarks/hosts.py says what that needs.
All compute is real: AlexNet's head (9216-4096-4096-1000), and its trunk, with all parameters, on images of 64x64 (of
224x224 with --image-size 224) and its last pooling to 6x6. Synthetic images, which take no time to load.

All sides run in turn in the same processes, in the opposite order in every other round. DDP and the hybrids then train
on with nothing sent (no all-reduce, no exchange but those of batch sizes and targets): a step's communication time is
the difference of the two, what computing does not hide. Bound: the larger of that computing alone, and the bytes that a
rank sends (by `lightning_dp.collectives.cost`) over its link's rate; of the other sides only the bytes, counted on the
card. Writes a table, results.json and samples_per_s.png to a folder for each number of hosts.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from layered_sgd_throughput import quiet
from pytorch_lightning.strategies import DDPStrategy
from support.alexnet import IMAGE_SIZE, WIDTHS, Images, Marked, Whole, alexnet, trunk_and_head
from support.emulated_hosts import CARD, Hosts, bytes_per_s, worker_or_hosts
from support.hybrid_peers import PEERS, train
from support.hybrid_report import picture, table
from support.report import describe_machine, output_folder

from lightning_dp.collectives.all_to_all import Channel
from lightning_dp.collectives.cost import ring_cost
from lightning_dp.models import AlexNet
from lightning_dp.strategies import KrizhevskyHybridStrategy
from lightning_dp.strategies.krizhevsky_hybrid.traffic import hybrid_cost

WARM_UP = 2
STRATEGIES: dict[str, Callable[[], Any]] = {
    "DDP": lambda: DDPStrategy(gradient_as_bucket_view=True, init_sync=False),
    "hybrid a": lambda: KrizhevskyHybridStrategy(scheme="a"),
    "hybrid b": lambda: KrizhevskyHybridStrategy(scheme="b"),
    "hybrid c": lambda: KrizhevskyHybridStrategy(scheme="c"),
    "hybrid c variable": lambda: KrizhevskyHybridStrategy(scheme="c", variable_batch=True),
}
SIDES = ["DDP", *PEERS, *list(STRATEGIES)[1:]]


class Clock(pl.Callback):
    """Times ``steps`` steps, and as many again in which nothing is sent."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.ends_s: list[float] = []
        self.sent: list[int] = []
        self._start = Channel.all_to_all

    def tick(self) -> None:
        """The end of a step."""
        self.ends_s.append(time.perf_counter())
        self.sent.append(int(Path(f"/sys/class/net/{CARD}/statistics/tx_bytes").read_text()))

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.tick()
        if len(self.ends_s) == WARM_UP + self.steps:
            trainer.strategy.model.require_backward_grad_sync = False
            Channel.all_to_all = send_nothing(self._start)  # type: ignore[method-assign]

    def on_train_end(self, *_: Any) -> None:
        Channel.all_to_all = self._start  # type: ignore[method-assign]

    @property
    def results(self) -> dict[str, float | None]:
        """Seconds a step, seconds of it alone (None if there were no such steps), and bytes out of the card."""
        first, last = WARM_UP - 1, WARM_UP - 1 + self.steps
        alone = self.ends_s[last + 1 :]  # the first one is a warm-up again
        return {
            "step_s": (self.ends_s[last] - self.ends_s[first]) / self.steps,
            "alone_s": (alone[-1] - alone[0]) / (len(alone) - 1) if alone else None,
            "card_bytes": (self.sent[last] - self.sent[first]) / self.steps,
        }


class Arrived:
    def wait(self) -> None:
        pass


def send_nothing(start: Callable[..., Any]) -> Callable[..., Any]:
    """In place of `Channel.all_to_all`: others' parts are zero. Sizes and labels are sent, for they must be valid."""

    def nothing(self: Channel, what: str, sends: Any, receives: Any) -> Any:
        if what in ("sizes", "targets"):
            return start(self, what, sends, receives)
        for rank, tensor in enumerate(receives):
            if rank != self.rank:
                tensor.zero_()
        return Arrived()

    return nothing


def run_side(name: str, arguments: argparse.Namespace, prototype: AlexNet, rank: int, world_size: int) -> Any:
    """One rank's training by one side; what its clock says."""
    clock = Clock(arguments.steps)
    net = copy.deepcopy(prototype)
    if name in PEERS:
        batch = Images([arguments.batch_size], rank, arguments.image_size)[0]
        train(name, net, batch, WARM_UP + arguments.steps, clock.tick)
        return clock.results
    num_steps = WARM_UP + 2 * arguments.steps + 1
    trainer = pl.Trainer(
        strategy=STRATEGIES[name](), accelerator="cpu", devices=1, num_nodes=world_size, max_epochs=1,
        callbacks=[clock], use_distributed_sampler=False, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    images = Images([arguments.batch_size] * num_steps, rank, arguments.image_size)
    module = Whole(net) if name == "DDP" else Marked(net)
    trainer.fit(module, torch.utils.data.DataLoader(images, batch_size=None))
    return clock.results


def worker(arguments: argparse.Namespace) -> None:
    """One rank, started by torchrun on one of the hosts: every side in turn, ``rounds`` times."""
    quiet()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    prototype = alexnet()
    rounds: list[dict[str, Any]] = []
    for turn in range(arguments.rounds):
        rounds.append({})
        for name in arguments.sides if turn % 2 == 0 else reversed(arguments.sides):
            rounds[-1][name] = run_side(name, arguments, prototype, rank, world_size)
            gc.collect()
            if rank == 0:
                print(f"  {world_size} hosts  {arguments.rate:>7}  round {turn + 1}  {name:18} "
                      f"{rounds[-1][name]['step_s'] * 1e3:7.1f} ms", flush=True)  # fmt: skip
    if rank == 0:
        arguments.worker.write_text(json.dumps(rounds))
    dist.destroy_process_group()


def measure(arguments: argparse.Namespace, num_hosts: int, rate: str, folder: Path) -> dict[str, Any]:
    """Run `worker` on hosts of the given rate; return what it wrote, by side, with bounds."""
    out = folder / f"rate-{rate}.json"
    script = [__file__, "--worker", str(out), "--rate", rate, "--steps", str(arguments.steps)]
    script += ["--rounds", str(arguments.rounds), "--batch-size", str(arguments.batch_size)]
    script += ["--image-size", str(arguments.image_size), "--sides", *arguments.sides]
    with Hosts(num_hosts, None if rate == "none" else rate) as hosts:
        hosts.torchrun(1, script, timeout_s=7200, logs=folder)
    rounds = json.loads(out.read_text())
    return {name: {"rounds": [turn[name] for turn in rounds], **bound(arguments, num_hosts, rate, name, rounds)}
            for name in arguments.sides}  # fmt: skip


def bound(arguments: argparse.Namespace, num_hosts: int, rate: str, name: str, rounds: list[Any]) -> dict[str, Any]:
    """Bytes that a rank sends, and the least that a step can take."""
    trunk, head = trunk_and_head(alexnet())
    if name == "DDP":
        num_bytes = ring_cost(trunk + head, 4, num_hosts).bytes_sent
    elif name in STRATEGIES:
        scheme: Any = name.split()[1]
        num_bytes = hybrid_cost(trunk, WIDTHS, [arguments.batch_size] * num_hosts, 4, scheme).bytes_sent
    else:
        num_bytes = int(median(turn[name]["card_bytes"] for turn in rounds))
    alone_s = median(turn[name]["alone_s"] or 0.0 for turn in rounds)
    crossing_s = 0.0 if rate == "none" else num_bytes / bytes_per_s(rate)
    return {"bytes": num_bytes, "bound_s": max(alone_s, crossing_s)}


def measure_and_report(arguments: argparse.Namespace) -> None:
    """Measure on the hosts, and write tables and pictures."""
    for num_hosts in arguments.hosts:
        folder = output_folder("hybrid", f"{num_hosts}-hosts{arguments.name and '-'}{arguments.name}")
        results = {rate: measure(arguments, num_hosts, rate, folder) for rate in arguments.rates}
        title = f"AlexNet, {num_hosts} hosts, {arguments.batch_size} images of {arguments.image_size} px a rank"
        text = table(results, num_hosts * arguments.batch_size)
        print(f"{title}; {describe_machine()}\n{text}")
        (folder / "table.md").write_text(text + "\n")
        what = {"machine": describe_machine(), "arguments": vars(arguments), "results": results}
        (folder / "results.json").write_text(json.dumps(what, indent=1))
        picture(results, num_hosts * arguments.batch_size, folder / "samples_per_s.png", title)
        print(f"written to {folder}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rates", nargs="+", default=["1gbit", "10gbit"])
    parser.add_argument("--sides", nargs="+", default=SIDES, choices=SIDES)
    parser.add_argument("--batch-size", type=int, default=32, help="images a rank")
    parser.add_argument("--image-size", type=int, default=IMAGE_SIZE)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--name", default="", help="of the folder for the results, behind the number of hosts")
    parser.add_argument("--rate", help=argparse.SUPPRESS)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    worker_or_hosts(arguments, worker, measure_and_report)


if __name__ == "__main__":
    main()
