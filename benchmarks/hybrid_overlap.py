"""A picture of schemes b and c on rate-limited hosts: what each rank does when, and how much of the traffic is hidden.

    python benchmarks/hybrid_trace.py                                   # b and c, 4 hosts, 1 Gbit/s
    python benchmarks/hybrid_trace.py --hosts 2 --schemes c --rate 200mbit

The limit of a link lets a burst of 4 ms pass: on two hosts at 1 Gbit/s that is most of what (c) sends in a pass.

AlexNet as in benchmarks/hybrid.py, a rank and a thread a host. Three rows a rank: the rank itself (trunk, head, waits),
the features and their gradients on their way, and what the head exchanges within a pass.

After the steps that are drawn come as many in which nothing overlaps: each exchange of features, or of their gradients,
begins when all ranks are there, and is waited for at once. Hidden is 1 - (waited for these two) / (the time that they
take then). A wait counts from when the last rank has started the exchange: before that, it is for a rank that is still
computing, not for bytes; the whole of it is printed too. Of K passes, the first one's features and the last one's
gradients have nothing to hide behind, so that (K - 1) / K is the most if all take alike. Writes summary.json,
the stages of each rank, and a picture a scheme.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from layered_sgd_throughput import quiet
from support import gantt
from support.alexnet import IMAGE_SIZE, WIDTHS, Images, Marked, alexnet
from support.emulated_hosts import Hosts, bytes_per_s, worker_or_hosts
from support.report import describe_machine, output_folder
from torch import nn

from lightning_dp.collectives.all_to_all import Channel
from lightning_dp.strategies import KrizhevskyHybridStrategy
from lightning_dp.strategies.krizhevsky_hybrid.traffic import head_traffic

WARM_UP = 2
FEATURES = ("features", "feature gradients")
WAITS = tuple(f"wait for {what}" for what in FEATURES)
HIDDEN = ("hidden activations", "hidden gradients", "loss")
COLORS = {
    "trunk forward": "#4c9ed9", "trunk backward": "#1f5c99", "head": "#8cc084", "wait": "#d62728",
    "features": "#e07b39", "feature gradients": "#e8c547", "exchange within the head": "#bbbbbb",
}  # fmt: skip
Stage = tuple[str, float, float]


class Trace(pl.Callback):
    """Notes the stages of each step: the strategy's, and when the trunk is at work."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.stages: list[list[Stage]] = [[]]  # of each step
        self._start = Channel.all_to_all
        self._since = 0.0

    def record(self, name: str, start_s: float, end_s: float) -> None:
        self.stages[-1].append((name, start_s, end_s))

    def on_train_start(self, trainer: Any, module: Any) -> None:
        trainer.strategy.on_stage = self.record
        trunk: nn.Module = module.trunk
        trunk.register_forward_pre_hook(lambda *_: self._begin())
        trunk.register_forward_hook(lambda *_: self._end("trunk forward"))

    def on_before_backward(self, *_: Any) -> None:
        self._begin()

    def on_after_backward(self, *_: Any) -> None:
        self._end("trunk backward")

    def _begin(self) -> None:
        self._since = time.perf_counter()

    def _end(self, name: str) -> None:
        self.record(name, self._since, time.perf_counter())

    def on_train_batch_end(self, *_: Any) -> None:
        self.stages.append([])
        if len(self.stages) == WARM_UP + self.steps + 1:
            Channel.all_to_all = wait_at_once(self._start)  # type: ignore[method-assign]

    def on_train_end(self, *_: Any) -> None:
        Channel.all_to_all = self._start  # type: ignore[method-assign]


class Arrived:
    def wait(self) -> None:
        pass


def wait_at_once(start: Callable[..., Any]) -> Callable[..., Any]:
    """In place of `Channel.all_to_all`: exchanges of features start together on all ranks, and nothing else goes on."""

    def at_once(self: Channel, what: str, sends: Any, receives: Any) -> Any:
        if what not in FEATURES:
            return start(self, what, sends, receives)
        self.all_gather("meeting", torch.zeros(1))
        start(self, what, sends, receives).wait()
        return Arrived()

    return at_once


def worker(arguments: argparse.Namespace) -> None:
    """One rank, started by torchrun on one of the hosts; writes its stages, step by step."""
    quiet()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for scheme in arguments.schemes:
        torch.manual_seed(0)
        trace = Trace(arguments.steps)
        trainer = pl.Trainer(
            strategy=KrizhevskyHybridStrategy(scheme=scheme), accelerator="cpu", devices=1, num_nodes=world_size,
            max_epochs=1, callbacks=[trace], use_distributed_sampler=False, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        images = Images([arguments.batch_size] * (WARM_UP + 2 * arguments.steps + 1), rank, arguments.image_size)
        trainer.fit(Marked(alexnet()), torch.utils.data.DataLoader(images, batch_size=None))
        Path(f"{arguments.worker}-{scheme}-{rank}.json").write_text(json.dumps(trace.stages))
    dist.destroy_process_group()


def waited_s(of_ranks: list[list[Stage]]) -> tuple[float, float]:
    """In one step, over all ranks: seconds waited for features and their gradients; of these, when all had started."""
    exchanges = [[stage for stage in stages if stage[0] in FEATURES] for stages in of_ranks]
    waits = [[stage for stage in stages if stage[0] in WAITS] for stages in of_ranks]
    whole = sum(end - begin for stages in waits for _, begin, end in stages)
    for_bytes = 0.0
    for same, waits_for_it in zip(zip(*exchanges, strict=True), zip(*waits, strict=True), strict=True):
        all_started = max(start for _, start, _ in same)
        for_bytes += sum(max(0.0, end - max(begin, all_started)) for _, begin, end in waits_for_it)
    return whole, for_bytes


def hidden(of_ranks: list[list[list[Stage]]], steps: int) -> dict[str, float]:
    """A rank's mean, in a step: seconds waited, when overlapping and when nothing does; the hidden share."""
    by_step = [waited_s(list(same)) for same in zip(*of_ranks, strict=True)]
    overlapped, alone = by_step[WARM_UP : WARM_UP + steps], by_step[WARM_UP + steps + 1 : WARM_UP + 2 * steps + 1]
    share = 1 - sum(exposed for _, exposed in overlapped) / sum(taken for _, taken in alone)
    num = steps * len(of_ranks)
    return {"waited_s": sum(whole for whole, _ in overlapped) / num, "alone_s": sum(taken for _, taken in alone) / num,
            "waited_for_bytes_s": sum(exposed for _, exposed in overlapped) / num, "hidden": share}  # fmt: skip


def draw(of_ranks: list[list[list[Stage]]], steps: int, title: str, path: Path) -> None:
    """Three rows a rank, the last of the overlapping steps."""
    shown = [rank[WARM_UP + steps - 1] for rank in of_ranks]
    first = min(start for stages in shown for _, start, _ in stages)
    bars = []
    for rank, stages in enumerate(shown):
        # Waits are drawn over what they interrupt.
        for name, start, end in sorted(stages, key=lambda stage: stage[0].startswith("wait")):
            row = 3 * rank + (1 if name in FEATURES else 2 if name in HIDDEN else 0)
            kind = "wait" if name.startswith("wait") else "exchange within the head" if name in HIDDEN else name
            if kind in COLORS:
                bars.append((row, kind, start - first, end - first))
    rows = [f"rank {r} {who}" for r in range(len(shown)) for who in ("", "features", "within")]
    gantt.draw(bars, rows, COLORS, title, path)


def measure_and_report(arguments: argparse.Namespace) -> None:
    """Measure on the hosts, and write tables and pictures."""
    folder = output_folder("hybrid_trace", f"{arguments.hosts}-hosts-{arguments.rate}")
    script = [__file__, "--worker", str(folder / "stages"), "--steps", str(arguments.steps)]
    script += ["--batch-size", str(arguments.batch_size), "--image-size", str(arguments.image_size)]
    with Hosts(arguments.hosts, None if arguments.rate == "none" else arguments.rate) as hosts:
        hosts.torchrun(1, [*script, "--schemes", *arguments.schemes], timeout_s=3600, logs=folder)
    print(describe_machine())
    report(arguments, folder)
    print(f"written to {folder}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--schemes", nargs="+", default=["b", "c"], choices=["a", "b", "c"])
    parser.add_argument("--batch-size", type=int, default=32, help="images a rank")
    parser.add_argument("--image-size", type=int, default=IMAGE_SIZE)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    worker_or_hosts(arguments, worker, measure_and_report)


def report(arguments: argparse.Namespace, folder: Path) -> None:
    """Print, draw and write what the ranks have left in ``folder``."""
    summary: dict[str, Any] = {"machine": describe_machine(), "arguments": vars(arguments)}
    num_hosts = arguments.hosts
    for scheme in arguments.schemes:
        files = [folder / f"stages-{scheme}-{rank}.json" for rank in range(num_hosts)]
        of_ranks = [json.loads(file.read_text()) for file in files]
        summary[scheme] = share = hidden(of_ranks, arguments.steps)
        traffic = head_traffic(WIDTHS, [arguments.batch_size] * num_hosts, 4, scheme)
        num_bytes = sum(traffic[what].bytes_sent for what in FEATURES)
        bound_s = 0.0 if arguments.rate == "none" else num_bytes / bytes_per_s(arguments.rate)
        title = f"hybrid {scheme}, {num_hosts} hosts, {arguments.rate}: {share['hidden']:.0%} of feature traffic hidden"
        most = (num_hosts - 1) / num_hosts
        milliseconds = {name: f"{value * 1e3:.0f} ms" for name, value in share.items() if name != "hidden"}
        print(
            f"{title}; (K - 1) / K is {most:.0%}, wanted 0.8 of that, {0.8 * most:.0%}. A step, of a rank: "
            f"{milliseconds['alone_s']} when nothing overlaps (bytes over rate: {bound_s * 1e3:.0f} ms), waited "
            f"{milliseconds['waited_for_bytes_s']} for bytes, {milliseconds['waited_s']} with waits for ranks at work"
        )
        draw(of_ranks, arguments.steps, title, folder / f"trace-{scheme}.png")
    (folder / "summary.json").write_text(json.dumps(summary, indent=1))


if __name__ == "__main__":
    main()
