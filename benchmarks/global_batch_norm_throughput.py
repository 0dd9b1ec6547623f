"""What global batch norm costs: local, global and adaptive statistics on several ranks, and the local phase alone.

    python benchmarks/batch_norm.py                              # 2 and 4 ranks, 32 images a rank
    python benchmarks/batch_norm.py --ranks 2 --local-batch 4 32 --rounds 20

1. Training steps of ResNet-20 on 32x32 images, under DDP. "Adaptive" is global for the first half of the steps and
   local for the second. The ratio to local stands beside the paper's (8 GTX 1080Ti: global 75 % of local at 4 ranks,
   70 % at 8; adaptive some 10 % above global). Collectives and bytes that a rank hands over in a step are counted.
2. The local phase against `torch.nn.BatchNorm2d`, forward and backward, in one process.
3. With a GPU: two gloo ranks on it, forward and backward at shapes of ResNet-50 (32 images), against SyncBatchNorm.

All sides run in turn in the same processes, round after round, in an order that rotates; a round's ratio is that of
neighbours in time. Shown: median and quartiles over the rounds. Writes a table, results.json and throughput.png.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.report import describe_machine, output_folder
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_dp.launch import launch
from lightning_dp.layers import (
    GlobalBatchNorm2d,
    apply_global_batch_norm,
    batch_statistics,
    global_batch_norm_layers,
)
from lightning_dp.models import resnet20

PAPER = {4: 0.75, 8: 0.70}  # global over local, section 5
RESNET50_SHAPES = [(64, 112), (256, 56), (512, 28), (1024, 14), (2048, 7)]  # channels, height and width


class Training:
    """ResNet-20 in training, whose layers' statistics are global or local from step to step.

    All sides of a comparison are one model: where a model lies in memory makes several percent of difference.
    """

    def __init__(self, local_batch_size: int, distributed: bool) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = resnet20()
        apply_global_batch_norm(self.model)
        self.layers = global_batch_norm_layers(self.model)
        if distributed:  # without broadcasts of running statistics, as the callback has it
            buffers = [name for name, _ in self.model.named_buffers()]
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self.model, buffers)
            self.model = DistributedDataParallel(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.x = torch.randn(local_batch_size, 3, 32, 32)
        self.y = torch.randint(10, (local_batch_size,))

    def step(self, is_global: bool) -> None:
        """One training step."""
        for layer in self.layers:
            layer.is_global = is_global
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(self.x), self.y).backward()
        self.optimizer.step()

    def seconds(self, global_steps: Sequence[bool]) -> float:
        """Seconds a step, for steps with statistics as given."""
        start = time.perf_counter()
        for is_global in global_steps:
            self.step(is_global)
        if dist.is_initialized():
            dist.barrier()
        return (time.perf_counter() - start) / len(global_steps)


def in_turn(sides: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Time each side once a round, beginning with another one each time."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    for index in range(-1, rounds):  # the first round warms up
        for name in names[index % len(names) :] + names[: index % len(names)]:
            if dist.is_initialized():
                dist.barrier()
            seconds = sides[name]()
            if index >= 0:
                times[name].append(seconds)
    return times


def count_collectives(training: Training, is_global: bool) -> dict[str, int]:
    """What batch norm's collectives of one step hand over on this rank; DDP's own do not pass here."""
    counts = {"collectives": 0, "bytes": 0}
    gather = batch_statistics.small_all_gather

    def counted(tensor: Tensor, group: Any) -> Tensor:
        counts["collectives"] += 1
        counts["bytes"] += tensor.numel() * tensor.element_size()
        return gather(tensor, group)

    batch_statistics.small_all_gather = counted
    try:
        training.step(is_global)
    finally:
        batch_statistics.small_all_gather = gather
    return counts


def in_group(part: Callable[..., Any], *arguments: Any) -> Any:
    """Call ``part`` on each rank. Its models are gone when the group goes: DDP must not be the last to hold it."""
    dist.init_process_group("gloo")
    try:
        return part(*arguments)
    finally:
        dist.destroy_process_group()


def share_cores() -> None:
    """Give each rank cores of its own, as far as they go: a message must not wait for another rank's computation."""
    cores, rank, world_size = os.cpu_count() or 1, dist.get_rank(), dist.get_world_size()
    share = max(1, cores // world_size)
    torch.set_num_threads(share)
    if cores >= world_size and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, range(rank * share, (rank + 1) * share))


def throughput(local_batch_size: int, num_steps: int, rounds: int) -> dict[str, Any]:
    """Part 1, on each rank."""
    share_cores()
    training = Training(local_batch_size, True)
    sides = {
        "local": [False] * num_steps,
        "global": [True] * num_steps,
        "adaptive": [index < num_steps / 2 for index in range(num_steps)],
    }
    times = in_turn({name: lambda steps=steps: training.seconds(steps) for name, steps in sides.items()}, rounds)
    counts = {name: count_collectives(training, name == "global") for name in ("local", "global")}
    return {"times": times, "counts": counts}


def local_phase(local_batch_size: int, rounds: int) -> dict[str, list[float]]:
    """Part 2, in a process of its own. A round is a single step, so that many pairs lie close together in time."""
    torch.set_num_threads(1)
    training = Training(local_batch_size, False)

    def seconds(kind: type[nn.BatchNorm2d]) -> float:
        for layer in training.layers:
            layer.__class__ = kind
        return training.seconds([False])

    kinds = {"plain": nn.BatchNorm2d, "local": GlobalBatchNorm2d}
    return in_turn({name: lambda kind=kind: seconds(kind) for name, kind in kinds.items()}, rounds)


def on_gpu(num_steps: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Part 3, on each of two ranks."""
    results = {}
    for channels, size in RESNET50_SHAPES:
        x = torch.randn(32, channels, size, size, device="cuda", requires_grad=True)
        dy = torch.randn_like(x)

        def seconds(layer: nn.Module, x: Tensor = x, dy: Tensor = dy) -> float:
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(num_steps):
                torch.autograd.grad(layer(x), [x, *layer.parameters()], dy)
            torch.cuda.synchronize()
            return (time.perf_counter() - start) / num_steps

        layers = {"sync": nn.SyncBatchNorm(channels).cuda(), "global": GlobalBatchNorm2d(channels).cuda()}
        sides = {name: lambda layer=layer: seconds(layer) for name, layer in layers.items()}
        results[f"32 x {channels} x {size} x {size}"] = in_turn(sides, rounds)
    return results


def ratio(numerator: list[float], denominator: list[float]) -> dict[str, Any]:
    """Median and quartiles of the rounds' ratios, and the interval that holds their true median with 95 %."""
    ratios = sorted(a / b for a, b in zip(numerator, denominator, strict=True))
    low, _, high = quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    # How many ratios lie below the true median is binomial (n, 1/2): from it, order statistics as bounds.
    reach = 0.98 * len(ratios) ** 0.5
    first, last = math.floor(len(ratios) / 2 - reach), math.ceil(len(ratios) / 2 + reach)
    interval = ratios[max(0, first)], ratios[min(len(ratios) - 1, last)]
    return {"median": median(ratios), "low": low, "high": high, "interval": interval}


def show(value: dict[str, Any]) -> str:
    """As percentages."""
    return f"{100 * value['median']:5.1f} % ({100 * value['low']:.1f} to {100 * value['high']:.1f})"


def draw(results: list[dict[str, Any]], path: Any) -> None:
    """Bars: throughput over that of local statistics, ours and the paper's."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for offset, name in enumerate(("global", "adaptive")):
        values = [result[name] for result in results]
        errors = [[v["median"] - v["low"] for v in values], [v["high"] - v["median"] for v in values]]
        places = [index + 0.25 * offset for index in range(len(results))]
        axes.bar(places, [v["median"] for v in values], 0.22, yerr=errors, capsize=3, label=f"{name}, measured")
    for index, result in enumerate(results):
        if result["ranks"] in PAPER:
            label = "global, paper" if "global, paper" not in axes.get_legend_handles_labels()[1] else None
            axes.bar(index + 0.5, PAPER[result["ranks"]], 0.22, color="lightgray", label=label)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(results)), [f"{r['ranks']} ranks x {r['local_batch_size']} images" for r in results])
    axes.set_ylabel("throughput / that of local statistics")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--local-batch", type=int, nargs="+", default=[32])
    parser.add_argument("--steps", type=int, default=6, help="steps a round")
    parser.add_argument("--rounds", type=int, default=15)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    machine = describe_machine()
    print(machine)
    results: list[dict[str, Any]] = []
    for ranks in arguments.ranks:
        for batch in arguments.local_batch:
            raw = launch(in_group, throughput, batch, arguments.steps, arguments.rounds, num_processes=ranks)
            times = raw["times"]
            result = {"ranks": ranks, "local_batch_size": batch, **raw["counts"]["global"], "times": times}
            result |= {name: ratio(times["local"], times[name]) for name in ("global", "adaptive")}
            result["adaptive over global"] = ratio(times["global"], times["adaptive"])
            results.append(result)
            paper = f", paper {100 * PAPER[ranks]:.0f} %" if ranks in PAPER else ""
            print(f"{ranks} ranks x {batch} images: local {batch * ranks / median(times['local']):.0f} images/s")
            print(f"  global / local     {show(result['global'])}{paper}")
            print(f"  adaptive / local   {show(result['adaptive'])}")
            print(f"  adaptive / global  {show(result['adaptive over global'])}, paper about 110 %")
            print(
                f"  a step, global: {result['collectives']} collectives, {result['bytes']} bytes a rank; local: ",
                end="",
            )
            print(f"{raw['counts']['local']['collectives']} collectives")
    num_pairs = 2 * arguments.rounds * arguments.steps
    phase = launch(local_phase, arguments.local_batch[-1], num_pairs, num_processes=1)
    phase["plain / local"] = ratio(phase["plain"], phase["local"])
    low, high = (100 * end for end in phase["plain / local"]["interval"])
    print(f"local phase: throughput / torch.nn.BatchNorm2d's  {show(phase['plain / local'])}", end="")
    print(f"; the median of {num_pairs} pairs is surely (95 %) between {low:.1f} and {high:.1f} %")
    gpu = {}
    if torch.cuda.is_available():
        gpu = launch(in_group, on_gpu, 20, arguments.rounds, num_processes=2)
        for shape, times in gpu.items():
            print(f"GPU, {shape}: SyncBatchNorm's time / ours  {show(ratio(times['sync'], times['global']))}")
    else:
        print("no GPU: the comparison with SyncBatchNorm, which refuses CPU tensors, is left out")
    folder = output_folder("batch_norm")
    everything = {"machine": machine, "throughput": results, "local phase": phase, "gpu": gpu}
    (folder / "results.json").write_text(json.dumps(everything, indent=1))
    draw(results, folder / "throughput.png")
    print(f"written to {folder}")


if __name__ == "__main__":
    main()
