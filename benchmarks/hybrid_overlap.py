"""What each rank does when under the hybrid's schemes on rate-limited hosts, and how much feature traffic is hidden.

    python benchmarks/hybrid_overlap.py                                   # b and c, 4 hosts, 1 Gbit/s
    python benchmarks/hybrid_overlap.py --hosts 2 --schemes c --rate 200mbit

AlexNet as in hybrid_throughput.py, a rank and a thread a host. The limit of a link lets a burst of 4 ms pass: on two
hosts at 1 Gbit/s that is most of what (c) sends in a pass.

Steps alternate with steps in which nothing overlaps: there, each exchange of features, or of their gradients, begins
when all ranks have arrived, and is waited for at once. Hidden is 1 - (waited for bytes) / (waited for bytes in the
step without overlap): over all steps, with the minimum and the maximum of the pairs of steps. A wait counts as for
bytes from when the last rank has started the exchange. Before, it is for a rank that still computes: four ranks on two
cores wait for each other's computing, too. Bound: of K passes, the first one's features and the last one's gradients
have nothing to hide behind, so (K - 1) / K can be hidden if all take alike.

Plot: one step, three rows a rank: the rank itself (trunk, head, waits), the features and their gradients on their way,
and what the head exchanges within a pass. Writes results.json, table.md and a timeline for each scheme.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from support.alexnet import FULL_SIZE, IMAGE_SIZE, SMALL, RandomImages, SplitModule, alexnet, head_widths
from support.command_line import benchmark_parser, output_folder, parse
from support.emulated_hosts import bytes_per_s, rate_name
from support.host_jobs import Job, add_worker_option, measure_on_hosts, run_benchmark
from support.hybrid_stages import draw_step, feature_waits, hidden_share
from support.interception import FEATURES, ExchangeSwitch, wait_at_once
from support.report import markdown_table, write_report
from support.timeline import Stage
from support.training import make_trainer, quiet
from torch import nn

from lightning_dp.planner.traffic import head_traffic
from lightning_dp.strategies import KrizhevskyHybridStrategy

WARM_UP = 2
SMOKE = {
    "hosts": 2, "schemes": ["c"], "batch_size": 4, "image_size": 64, "steps": 2, "network": SMALL,
}  # fmt: skip


def parser() -> argparse.ArgumentParser:
    options = benchmark_parser(__doc__, __file__)
    options.add_argument("--hosts", type=int, default=4)
    options.add_argument("--rate", default="1gbit", help="of each host's link")
    options.add_argument("--schemes", nargs="+", default=["b", "c"], choices=["a", "b", "c"])
    options.add_argument("--batch-size", type=int, default=32, help="images a rank")
    options.add_argument("--image-size", type=int, default=IMAGE_SIZE)
    options.add_argument("--steps", type=int, default=6, help="with overlap, and as many without")
    options.add_argument("--network", choices=[FULL_SIZE, SMALL], default=FULL_SIZE, help="small: for smoke runs")
    add_worker_option(options)
    return options


class StageRecorder(pl.Callback):
    """Records the stages of each step, the strategy's and the trunk's; lets nothing overlap in every second step."""

    def __init__(self) -> None:
        self.stages: list[list[Stage]] = [[]]  # of each step
        self._since = 0.0
        self._no_overlap = ExchangeSwitch(wait_at_once)

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
        # No exchange is under way between two steps, and all ranks switch at the same place.
        if is_without_overlap(len(self.stages) - 1):
            self._no_overlap.on()
        else:
            self._no_overlap.off()

    def on_train_end(self, *_: Any) -> None:
        self._no_overlap.off()


def is_without_overlap(step: int) -> bool:
    """Whether nothing overlaps in this step; the first ones warm up."""
    return step >= WARM_UP and (step - WARM_UP) % 2 == 1


def worker(job: Job) -> dict[str, list[list[Stage]]]:
    """One rank: train by each scheme, and return the stages, step by step."""
    quiet()
    options = job.options
    rank = int(os.environ["RANK"])
    traces = {}
    for scheme in options.schemes:
        torch.manual_seed(0)
        recorder = StageRecorder()
        trainer = make_trainer(
            KrizhevskyHybridStrategy(scheme=scheme), per_host=1, num_hosts=job.num_hosts, max_epochs=1,
            callbacks=[recorder], use_distributed_sampler=False,
        )  # fmt: skip
        images = RandomImages([options.batch_size] * (WARM_UP + 2 * options.steps), rank, options.image_size)
        trainer.fit(SplitModule(alexnet(options.network)), images.loader())
        traces[scheme] = recorder.stages
    dist.destroy_process_group()
    return traces


def summarize(arguments: argparse.Namespace, scheme: Any, ranks: Sequence[Sequence[Sequence[Stage]]]) -> dict[str, Any]:
    """Return a scheme's figures; times are those of one rank in one step (s)."""
    steps = range(WARM_UP, WARM_UP + 2 * arguments.steps)
    waits = {step: feature_waits([stages[step] for stages in ranks]) for step in steps}
    overlapped = [waits[step] for step in steps if not is_without_overlap(step)]
    alone = [waits[step] for step in steps if is_without_overlap(step)]
    rank_steps = arguments.steps * len(ranks)
    widths = head_widths(alexnet(arguments.network))
    traffic = head_traffic(widths, [arguments.batch_size] * arguments.hosts, 4, scheme=scheme)
    num_bytes = sum(traffic[what].bytes_sent for what in FEATURES)
    return {
        "hidden": hidden_share(overlapped, alone).as_json(),
        "most_that_can_be_hidden": (arguments.hosts - 1) / arguments.hosts,
        "waited_for_bytes_s": sum(step.for_bytes_s for step in overlapped) / rank_steps,
        "waited_for_ranks_s": sum(step.for_ranks_s for step in overlapped) / rank_steps,
        "without_overlap_s": sum(step.for_bytes_s for step in alone) / rank_steps,
        "bytes_over_rate_s": num_bytes / bytes_per_s(arguments.rate),
    }


def summary_table(summaries: dict[str, dict[str, Any]]) -> str:
    """Return a row a scheme."""
    header = [
        "scheme", "hidden (minimum-maximum)", "bound (K-1)/K", "waited for bytes, ms", "without overlap, ms",
        "bytes over rate, ms", "waited for ranks that compute, ms",
    ]  # fmt: skip
    times = ("waited_for_bytes_s", "without_overlap_s", "bytes_over_rate_s", "waited_for_ranks_s")
    rows = []
    for scheme, summary in summaries.items():
        share = "{median:.0%} ({low:.0%}-{high:.0%})".format(**summary["hidden"])
        rows.append([scheme, share, f"{summary['most_that_can_be_hidden']:.0%}"])
        rows[-1] += [f"{1e3 * summary[name]:.0f}" for name in times]
    return markdown_table(header, rows)


def report(arguments: argparse.Namespace) -> None:
    """Measure, and write the table and the plots."""
    folder = output_folder(arguments, f"{arguments.hosts}-hosts-{arguments.rate}")
    ranks = measure_on_hosts(__file__, Job(arguments, arguments.hosts, 1, arguments.rate), folder)
    traces = {scheme: [of_rank[scheme] for of_rank in ranks] for scheme in arguments.schemes}
    summaries = {scheme: summarize(arguments, scheme, trace) for scheme, trace in traces.items()}
    title = f"hybrid, {arguments.hosts} hosts, {rate_name(arguments.rate)}, {arguments.batch_size} images a rank"
    write_report(folder, arguments, title, summary_table(summaries), {"summaries": summaries, "stages": traces})
    # The last step with overlap.
    drawn = WARM_UP + 2 * (arguments.steps - 1)
    for scheme, trace in traces.items():
        share = summaries[scheme]["hidden"]["median"]
        step = [stages[drawn] for stages in trace]
        draw_step(
            step, folder / f"timeline-{scheme}.png", f"{title}, scheme {scheme}: {share:.0%} of feature traffic hidden"
        )


def main(argv: Sequence[str] | None = None) -> None:
    run_benchmark(parse(parser(), SMOKE, argv), worker, report)


if __name__ == "__main__":
    main()
