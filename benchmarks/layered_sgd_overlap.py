"""What each rank does when under layered SGD on rate-limited hosts, and how much communication is hidden.

    python benchmarks/layered_sgd_overlap.py                                               # step, leader, 1 Gbit/s
    python benchmarks/layered_sgd_overlap.py --overlap load --communicator sharded --rate 200mbit

The hosts, the network and the emulated compute of layered_sgd_throughput.py, 2 hosts x 2 ranks. Two rows a rank, from
the run's own clocks: what the rank itself does (load, forward, backward, wait for gradients), and what its communicator
does (reduce inside the group, all-reduce between the groups, broadcast inside).

Hidden is the share of the time of the inter-group all-reduce in which the rank itself does not wait. It counts all
steps of the run: after the last one there is nothing left to hide behind. One method, so there is no ratio of sides;
the bound is all of it, 100 %. Writes results.json (with all stages), table.md and timeline.png.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from support.command_line import benchmark_parser, output_folder, parse
from support.emulated_compute import TimedModule, Timing, slow_loader
from support.emulated_hosts import rate_name
from support.host_jobs import Job, add_worker_option, measure_on_hosts, run_benchmark
from support.layered_sgd_parts import INTER_GROUP_ALL_REDUCE, INTRA_GROUP_BROADCAST, INTRA_GROUP_REDUCE, WAIT
from support.report import markdown_table, write_report
from support.timeline import Segment, Stage, draw_timeline, gaps
from support.training import make_trainer, quiet

from lightning_dp.strategies import LayeredSGDStrategy

HOSTS = 2
PER_HOST = 2
SHOWN_STEPS = 3
SMOKE = {"steps": 4, "load_ms": 5.0, "forward_ms": 5.0, "backward_ms": 10.0, "width": 256}
OTHER = "everything else"
COLORS = {
    "load": "#bbbbbb",
    "forward": "#4c9ed9",
    "backward": "#1f5c99",
    WAIT: "#d62728",
    OTHER: "#c9b3e6",
    INTRA_GROUP_REDUCE: "#e8c547",
    INTER_GROUP_ALL_REDUCE: "#e07b39",
    INTRA_GROUP_BROADCAST: "#8cc084",
}
OF_THE_RANK = ("load", "forward", "backward", WAIT)


def parser() -> argparse.ArgumentParser:
    options = benchmark_parser(__doc__, __file__)
    options.add_argument("--rate", default="1gbit", help="of each host's link")
    options.add_argument("--overlap", choices=["load", "step"], default="step")
    options.add_argument("--communicator", choices=["leader", "sharded"], default="leader")
    options.add_argument("--compression", choices=["bf16", "int8"], help="between the hosts (default: exact sums)")
    options.add_argument("--steps", type=int, default=8, help=f"at least {SHOWN_STEPS + 1}; the last ones are drawn")
    options.add_argument("--load-ms", type=float, default=100.0)
    options.add_argument("--forward-ms", type=float, default=50.0)
    options.add_argument("--backward-ms", type=float, default=100.0)
    options.add_argument("--width", type=int, default=1024, help="of the layers; 1024 gives 25.5 MB")
    add_worker_option(options)
    return options


class StageRecorder(pl.Callback):
    """Records the stages of each step; the strategy reports its own. A wait interrupts a forward."""

    def __init__(self) -> None:
        self.stages: list[Stage] = []
        self._since = time.perf_counter()

    def on_train_start(self, trainer: Any, module: Any) -> None:
        trainer.strategy.on_stage = self.record
        self._since = time.perf_counter()

    def record(self, name: str, start_s: float, end_s: float) -> None:
        self.stages.append((name, start_s, end_s))

    def _end(self, name: str) -> None:
        self.record(name, self._since, time.perf_counter())

    def on_train_batch_start(self, *_: Any) -> None:
        self._end("load")
        self._since = time.perf_counter()

    def on_before_backward(self, *_: Any) -> None:
        self._end("forward")
        self._since = time.perf_counter()

    def on_after_backward(self, *_: Any) -> None:
        self._end("backward")

    def on_train_batch_end(self, *_: Any) -> None:
        self._since = time.perf_counter()


def worker(job: Job) -> list[Stage]:
    """One rank: train, and return the stages."""
    quiet()
    options = job.options
    timing = Timing(options.load_ms / 1e3, options.forward_ms / 1e3, options.backward_ms / 1e3)
    recorder = StageRecorder()
    strategy = LayeredSGDStrategy(
        overlap=options.overlap, communicator=options.communicator, compression=options.compression
    )
    trainer = make_trainer(
        strategy, per_host=job.per_host, num_hosts=job.num_hosts, max_steps=options.steps, callbacks=[recorder]
    )
    module = TimedModule("emulated", timing, options.width)
    trainer.fit(module, slow_loader(options.steps, job.world_size, "emulated", timing))
    return recorder.stages


def hidden_shares(traces: Mapping[int, Sequence[Stage]]) -> dict[int, float]:
    """Return, for each rank that takes part in the inter-group all-reduce, the share of its time without a wait."""
    taken: dict[int, float] = {}
    exposed: dict[int, float] = {}
    for rank, stages in traces.items():
        crossing = [(begin, end) for name, begin, end in stages if name == INTER_GROUP_ALL_REDUCE]
        waiting = [(begin, end) for name, begin, end in stages if name == WAIT]
        taken[rank] = sum(end - begin for begin, end in crossing)
        exposed[rank] = sum(max(0.0, min(b, d) - max(a, c)) for a, b in crossing for c, d in waiting)
    # With a leader, the other ranks pass through this stage too, but do nothing in it.
    least = 0.05 * max(taken.values())
    return {rank: 1.0 - exposed[rank] / taken[rank] for rank in traces if taken[rank] > least}


def rank_table(traces: Mapping[int, Sequence[Stage]], num_steps: int) -> str:
    """Return what each rank spends its time on, and the hidden share."""
    names = [name for name in COLORS if name != OTHER]
    shares = hidden_shares(traces)
    rows = []
    for rank, stages in traces.items():
        means = [
            1e3 * sum(end - begin for name, begin, end in stages if name == wanted) / num_steps for wanted in names
        ]
        rows.append([str(rank), *(f"{mean:.0f}" for mean in means), f"{shares[rank]:.0%}" if rank in shares else ""])
    header = ["rank", *(f"{name}, ms a step" for name in names), "hidden share of the inter-group all-reduce"]
    return markdown_table(header, rows)


def draw(traces: Mapping[int, Sequence[Stage]], title: str, path: Path) -> None:
    """Draw two rows a rank: the last `SHOWN_STEPS` steps but one."""
    loads = [start for name, start, _ in traces[0] if name == "load"]
    first = loads[-SHOWN_STEPS - 1]
    last = loads[-1]
    segments: list[Segment] = []
    for rank, stages in traces.items():
        own = [stage for stage in stages if stage[0] in OF_THE_RANK]
        others = [(OTHER, begin, end) for begin, end in gaps(own, first, last)]
        # A wait is drawn over the forward that it interrupts.
        for name, start, end in sorted([*stages, *others], key=lambda stage: stage[0] == WAIT):
            row = 2 * rank + (name not in (*OF_THE_RANK, OTHER))
            segments.append((row, name, start - first, end - first))
    rows = [f"rank {rank}{what}" for rank in traces for what in ("", ", communicator")]
    draw_timeline(
        segments, rows, COLORS, path, title=title, background="communicator has nothing to do", end_s=last - first
    )


def report(arguments: argparse.Namespace) -> None:
    """Measure, and write the table and the plot."""
    compressed = "" if arguments.compression is None else f"-{arguments.compression}"
    variant = f"{arguments.overlap}-{arguments.communicator}{compressed}-{arguments.rate}"
    folder = output_folder(arguments, variant)
    ranks = measure_on_hosts(__file__, Job(arguments, HOSTS, PER_HOST, arguments.rate), folder)
    traces = {rank: [(name, start, end) for name, start, end in stages] for rank, stages in enumerate(ranks)}
    title = f"layered SGD, {arguments.overlap}, {arguments.communicator}{compressed.replace('-', ', ')}"
    title = f"{title}, {rate_name(arguments.rate)}"
    results = {"hidden": hidden_shares(traces), "stages": traces}
    write_report(folder, arguments, title, rank_table(traces, arguments.steps), results)
    hidden = ", ".join(f"rank {rank} {share:.0%}" for rank, share in hidden_shares(traces).items())
    draw(traces, f"{title}; inter-group all-reduce hidden: {hidden}", folder / "timeline.png")


def main(argv: Sequence[str] | None = None) -> None:
    options = parser()
    arguments = parse(options, SMOKE, argv)
    if arguments.steps <= SHOWN_STEPS:
        options.error(f"--steps {arguments.steps} are too few to draw {SHOWN_STEPS} of them; use {SHOWN_STEPS + 1}")
    run_benchmark(arguments, worker, report)


if __name__ == "__main__":
    main()
