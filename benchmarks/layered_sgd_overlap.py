"""A picture of one method's steps on rate-limited hosts: what each rank does when, from the run's own clocks.

    python benchmarks/overlap_trace.py --rate 1gbit            # LSGD step, leader
    python benchmarks/overlap_trace.py --rate 1gbit --overlap load --communicator sharded

The hosts, model and emulated compute of benchmarks/two_hosts.py. Two rows a rank: what the rank itself does (load,
forward, backward, wait for gradients), and what its communicator does (reduce inside the group, all-reduce between the
groups, broadcast inside). Prints how much of the time between groups is hidden; writes trace.json and trace.png.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from layered_sgd_throughput import Batches, Module, quiet
from support import gantt
from support.emulated_hosts import Hosts, worker_or_hosts
from support.report import describe_machine, output_folder

from lightning_dp.strategies import LayeredSGDStrategy

STEPS, SHOWN = 8, 3
COLORS = {
    "load": "#bbbbbb", "forward": "#4c9ed9", "backward": "#1f5c99", "wait": "#d62728",
    "reduce inside": "#e8c547", "all-reduce between": "#e07b39", "broadcast inside": "#8cc084",
}  # fmt: skip
OWN = ("load", "forward", "backward", "wait")
Stage = tuple[str, float, float]


class Trace(pl.Callback):
    """Notes the stages of each step; the strategy adds its own. Waiting cuts a forward in two."""

    def __init__(self) -> None:
        self.stages: list[Stage] = []
        self._since = time.perf_counter()

    def on_train_start(self, trainer: Any, module: Any) -> None:
        trainer.strategy.on_stage = self.record

    def record(self, name: str, start_s: float, end_s: float) -> None:
        self.stages.append((name, start_s, end_s))

    def _end(self, name: str) -> None:
        now = time.perf_counter()
        self.stages.append((name, self._since, now))
        self._since = now

    def on_train_batch_start(self, *_: Any) -> None:
        self._end("load")

    def on_before_backward(self, *_: Any) -> None:
        self._end("forward")

    def on_after_backward(self, *_: Any) -> None:
        self._end("backward")


def worker(arguments: argparse.Namespace) -> None:
    """One rank, started by torchrun on one of the hosts; writes its stages."""
    quiet()
    trace = Trace()
    strategy = LayeredSGDStrategy(overlap=arguments.overlap, communicator=arguments.communicator)
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=2, num_nodes=2, max_steps=STEPS, callbacks=[trace],
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    data = torch.utils.data.DataLoader(Batches(STEPS * trainer.world_size, "emulated"), batch_size=None)
    trainer.fit(Module("emulated"), data)
    Path(f"{arguments.worker}{trainer.global_rank}.json").write_text(json.dumps(trace.stages))


def hidden_share(stages: list[Stage]) -> float:
    """Of the time that the communicator spends between the groups, the part in which the rank itself does not wait."""
    crossing = [(a, b) for name, a, b in stages if name == "all-reduce between"]
    waiting = [(a, b) for name, a, b in stages if name == "wait"]
    exposed = sum(max(0.0, min(b, d) - max(a, c)) for a, b in crossing for c, d in waiting)
    return 1.0 - exposed / sum(b - a for a, b in crossing)


def draw(traces: dict[int, list[Stage]], title: str, path: Path) -> None:
    """Two rows a rank, the last `SHOWN` steps but one."""
    loads = [start for name, start, _ in traces[0] if name == "load"]
    first, last = loads[-SHOWN - 1], loads[-1]
    bars = []
    for rank, stages in traces.items():
        # A wait is drawn over the forward in which it happens.
        for name, start, end in sorted(stages, key=lambda stage: stage[0] == "wait"):
            bars.append((2 * rank + (name not in OWN), name, start - first, end - first))
    rows = [f"rank {r} {who}" for r in traces for who in ("", "communicator")]
    gantt.draw(bars, rows, COLORS, title, path, last - first)


def measure_and_report(arguments: argparse.Namespace) -> None:
    """Measure on the hosts, and write tables and pictures."""
    name = f"{arguments.overlap}-{arguments.communicator}-{arguments.rate}"
    folder = output_folder("overlap_trace", name)
    with Hosts(2, None if arguments.rate == "none" else arguments.rate) as hosts:
        script = [__file__, "--worker", str(folder / "rank"), "--rate", arguments.rate]
        script += ["--overlap", arguments.overlap, "--communicator", arguments.communicator]
        hosts.torchrun(2, script, logs=folder)
    traces = {rank: json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(4)}
    shares = {rank: hidden_share(t) for rank, t in traces.items() if any(s[0] == "all-reduce between" for s in t)}
    hidden = ", ".join(f"rank {rank} {share:.0%}" for rank, share in shares.items())
    title = f"layered SGD, overlap={arguments.overlap}, {arguments.communicator}, {arguments.rate}; hidden: {hidden}"
    draw(traces, title, folder / "trace.png")
    (folder / "trace.json").write_text(json.dumps({"machine": describe_machine(), "hidden": shares, "stages": traces}))
    print(f"{title}\n{describe_machine()}\nwritten to {folder}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--overlap", choices=["load", "step"], default="step")
    parser.add_argument("--communicator", choices=["leader", "sharded"], default="leader")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    worker_or_hosts(arguments, worker, measure_and_report)


if __name__ == "__main__":
    main()
