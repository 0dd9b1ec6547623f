"""Throughput of global batch norm: local, global and adaptive statistics on several ranks, and the local phase alone.

    python benchmarks/global_batch_norm_throughput.py                              # 2 and 4 ranks, 32 images a rank
    python benchmarks/global_batch_norm_throughput.py --ranks 2 --local-batch 4 32 --rounds 20

1. Training steps of ResNet-20 on 32x32 images, under DDP. "Adaptive" is global for the first half of the steps and
   local for the second. The ratio to local stands beside the paper's (8 GTX 1080Ti: global 75 % of local at 4 ranks,
   70 % at 8; adaptive some 10 % above global). Collectives and bytes that a rank hands over in a step are counted.
2. The local phase against `torch.nn.BatchNorm2d`, forward and backward, in one process.
3. With a GPU: two gloo ranks on it, forward and backward at shapes of ResNet-50 (32 images), against SyncBatchNorm,
   which refuses CPU tensors.

All sides run in the same processes, round after round, forward and backward in turn; a ratio compares two sides of one
round. Shown are the median and the quartiles over the rounds. Bound: 100 %, the throughput of local statistics, which
communicate nothing; the second part's is that of torch's own layer. Writes results.json, table.md and throughput.png.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from support.bars import Bar, draw_bars
from support.batch_norm_sides import in_group, local_phase, on_gpu, throughput
from support.command_line import benchmark_parser, output_folder, parse
from support.report import markdown_table, write_report
from support.spread import Spread, median_interval, quartiles, ratios

from lightning_dp.launch import launch

PAPER = {4: 0.75, 8: 0.70}  # global over local, section 5
GLOBAL = "global"
ADAPTIVE = "adaptive"
LOCAL = "local"
SMOKE = {"ranks": [2], "local_batch": [4], "steps": 2, "rounds": 2}


def parser() -> argparse.ArgumentParser:
    options = benchmark_parser(__doc__, __file__)
    options.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    options.add_argument("--local-batch", type=int, nargs="+", default=[32], help="images a rank")
    options.add_argument("--steps", type=int, default=6, help="of a round")
    options.add_argument("--rounds", type=int, default=15)
    return options


def percent(value: Spread) -> str:
    """Return "median (quartiles)" as percentages."""
    return f"{value.text(1, scale=100)} %"


def training_table(results: Sequence[dict[str, Any]]) -> str:
    """Return the throughput of global and adaptive statistics over that of local ones, for each setting."""
    header = [
        "ranks x images", "local, images/s", "global over local (quartiles)", "the paper's",
        "adaptive over local (quartiles)", "adaptive over global (quartiles)", "a global step, of a rank",
        "a local step",
    ]  # fmt: skip
    rows = []
    for result in results:
        times = result["times"]
        images_per_s = result["ranks"] * result["local_batch_size"] / median(times[LOCAL])
        counts = result["counts"]
        rows.append([
            f"{result['ranks']} x {result['local_batch_size']}",
            f"{images_per_s:.0f}",
            percent(quartiles(ratios(times[LOCAL], times[GLOBAL]))),
            f"{PAPER[result['ranks']]:.0%}" if result["ranks"] in PAPER else "",
            percent(quartiles(ratios(times[LOCAL], times[ADAPTIVE]))),
            percent(quartiles(ratios(times[GLOBAL], times[ADAPTIVE]))),
            "{collectives} collectives, {bytes} bytes".format(**counts[GLOBAL]),
            "{collectives} collectives".format(**counts[LOCAL]),
        ])  # fmt: skip
    return markdown_table(header, rows)


def local_phase_text(times: dict[str, list[float]]) -> str:
    """Say how fast local statistics are beside torch's own layer."""
    over_torch = ratios(times["torch"], times[LOCAL])
    low, high = (f"{100 * end:.1f}" for end in median_interval(over_torch))
    return (
        f"Local phase, throughput over torch.nn.BatchNorm2d's: {percent(quartiles(over_torch))} (quartiles); with 95 % "
        f"confidence the median of the {len(over_torch)} pairs of steps is between {low} and {high} %."
    )


def gpu_text(times_of_shapes: dict[str, dict[str, list[float]]]) -> str:
    """Say how fast global batch norm is beside SyncBatchNorm, shape by shape."""
    if not times_of_shapes:
        return "No GPU: the comparison with SyncBatchNorm, which refuses CPU tensors, is left out."
    rows = [
        [shape, percent(quartiles(ratios(times["sync"], times[GLOBAL])))] for shape, times in times_of_shapes.items()
    ]
    return markdown_table(["shape, on the GPU", "throughput over SyncBatchNorm's (quartiles)"], rows)


def draw(results: Sequence[dict[str, Any]], path: Any) -> None:
    """Draw a panel for each setting: throughput over that of local statistics, ours and the paper's."""
    panels = {}
    # Every panel has the row if any has: they share their labels.
    with_paper = any(result["ranks"] in PAPER for result in results)
    for result in results:
        times = result["times"]
        bars = [Bar(name, quartiles(ratios(times[LOCAL], times[name]))) for name in (GLOBAL, ADAPTIVE)]
        if with_paper:
            paper = PAPER.get(result["ranks"], 0.0)
            bars.append(Bar("global, paper (GPUs)", Spread(paper, paper, paper), color="0.75"))
        panels[f"{result['ranks']} ranks x {result['local_batch_size']} images"] = bars
    draw_bars(
        panels, path, title="Global batch norm, ResNet-20", digits=2, reference=1.0,
        axis="throughput over that of local statistics: median and quartiles of the rounds",
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(parser(), SMOKE, argv)
    results: list[dict[str, Any]] = []
    for ranks in arguments.ranks:
        for batch in arguments.local_batch:
            measured = launch(in_group, throughput, batch, arguments.steps, arguments.rounds, num_processes=ranks)
            results.append({"ranks": ranks, "local_batch_size": batch, **measured})
            print(training_table(results[-1:]), flush=True)
    # Single steps: so many pairs lie close together in time.
    phase = launch(local_phase, arguments.local_batch[-1], 2 * arguments.rounds * arguments.steps, num_processes=1)
    gpu = launch(in_group, on_gpu, 20, arguments.rounds, num_processes=2) if torch.cuda.is_available() else {}
    folder = output_folder(arguments)
    table = "\n\n".join([training_table(results), local_phase_text(phase), gpu_text(gpu)])
    figures = {"training": results, "local phase": phase, "gpu": gpu}
    write_report(folder, arguments, "Throughput of global batch norm, ResNet-20", table, figures)
    draw(results, folder / "throughput.png")


if __name__ == "__main__":
    main()
