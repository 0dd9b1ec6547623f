"""Step times of ResNet-50 on 2 nodes x 8 GPUs, computed and not measured: DDP and layered SGD at four link rates.

    python benchmarks/gpu_step_time.py

The planner's simulation (`lightning_dp.planner.simulate`) with these assumptions: float32 gradients of 102 MB; a
forward of 65 ms, a backward of 130 ms and an update of 5 ms, divided over the layers by their multiplications; no time
for loading; 93 % of the link's rate, 90 % at 100 Gbit/s; 10 us for a message. Inside a node NVLink, 200 GB/s.

- DDP: NCCL's ring over all 16 GPUs, or its tree, in buckets of 25 MB.
- layered SGD over NCCL: reduce-scatter inside the node, all-reduce of each rank's share between the nodes, all-gather
  inside; first in, first out.
- layered SGD over gloo, in host memory: reduce and broadcast inside the node at 1 GB/s, at most 1.5 GB/s between the
  nodes, nearest the input first.

Bound: compute alone, or the bytes of the gradients over the link if that is longer. Writes results.json, table.md and
step_time.png. The figures are arithmetic: no claim beyond it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from support.bars import Bar, draw_bars
from support.command_line import benchmark_parser, output_folder, parse
from support.report import markdown_table, write_report
from support.spread import Spread
from torch import Tensor, nn

from lightning_dp.models import ResNet50
from lightning_dp.planner import METHODS, Block, Link, Method, Network, Workload, simulate

FORWARD_S, BACKWARD_S, UPDATE_S = 0.065, 0.130, 0.005
NUM_NODES, PER_NODE = 2, 8
RATES = {1: 0.93, 10: 0.93, 25: 0.93, 100: 0.90}  # Gbit/s -> efficiency
LATENCY_S = 1e-5
NVLINK = Link(5e-6, 200e9)
HOST_MEMORY = Link(1e-4, 1e9)
GLOO_BYTES_PER_S = 1.5e9
SMALL_BUCKETS = METHODS["layered_sgd_step"].bucket_bytes
SMOKE = {"rates": [1, 10], "steps": 6}


def parser() -> argparse.ArgumentParser:
    options = benchmark_parser(__doc__, __file__)
    options.add_argument("--rates", type=int, nargs="+", choices=list(RATES), default=list(RATES), help="Gbit/s")
    options.add_argument("--steps", type=int, default=12, help="simulated steps")
    return options


def resnet50() -> Workload:
    """Return what a rank computes and sends in a step."""
    layers: list[tuple[int, int]] = []  # bytes of gradients, multiplications for an image

    def record(module: nn.Module, inputs: Any, output: Tensor) -> None:
        weight = module.weight
        assert isinstance(weight, Tensor)
        # A batch norm follows each convolution: a weight and a bias for each channel. The linear layer has a bias.
        vectors = 2 * weight.shape[0] if isinstance(module, nn.Conv2d) else weight.shape[0]
        layers.append((4 * (weight.numel() + vectors), weight.numel() * output[0, 0].numel()))

    with torch.device("meta"):
        model = ResNet50()
        handles = [m.register_forward_hook(record) for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
        model(torch.empty(1, 3, 224, 224))
        for handle in handles:
            handle.remove()
    work = sum(multiplications for _, multiplications in layers)
    blocks = [Block(size, FORWARD_S * share / work, BACKWARD_S * share / work) for size, share in layers]
    return Workload(tuple(blocks), update_s=UPDATE_S)


def step_times_s(workload: Workload, gbit_per_s: int, num_steps: int) -> dict[str, float]:
    """Return the seconds a step of each method."""
    bytes_per_s = gbit_per_s * 1e9 / 8 * RATES[gbit_per_s]
    link, slow = Link(LATENCY_S, bytes_per_s), Link(LATENCY_S, min(bytes_per_s, GLOO_BYTES_PER_S))
    over_nccl = Method("layered_sgd", communicator="sharded", bucket_bytes=SMALL_BUCKETS, order="fifo")
    sides = {
        "DDP, ring": (Network(link, NVLINK, PER_NODE, "ring"), METHODS["ddp"]),
        "DDP, tree": (Network(link, NVLINK, PER_NODE, "tree"), METHODS["ddp"]),
        "layered SGD, gloo": (Network(slow, HOST_MEMORY, PER_NODE), METHODS["layered_sgd_step"]),
        "layered SGD, NCCL": (Network(link, NVLINK, PER_NODE), over_nccl),
    }
    world_size = NUM_NODES * PER_NODE
    times = {
        name: simulate(workload, network, world_size, method, num_steps).step_s
        for name, (network, method) in sides.items()
    }
    compute_s = FORWARD_S + BACKWARD_S + UPDATE_S
    return {**times, "bound": max(compute_s, workload.gradient_bytes / bytes_per_s)}


def gain(times: dict[str, float]) -> float:
    """Return by how much the throughput of layered SGD over NCCL exceeds that of the faster DDP."""
    return min(times["DDP, ring"], times["DDP, tree"]) / times["layered SGD, NCCL"] - 1


def table(results: dict[int, dict[str, float]]) -> str:
    names = list(next(iter(results.values())))
    rows = [
        [f"{rate} Gbit/s", *(f"{1e3 * times[name]:.0f}" for name in names), f"{gain(times):+.1%}"]
        for rate, times in results.items()
    ]
    return markdown_table(["link, ms a step", *names, "NCCL over the faster DDP, throughput"], rows)


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(parser(), SMOKE, argv)
    workload = resnet50()
    results = {rate: step_times_s(workload, rate, arguments.steps) for rate in arguments.rates}
    folder = output_folder(arguments)
    title = f"Computed, not measured: ResNet-50 on {NUM_NODES} nodes x {PER_NODE} GPUs"
    write_report(folder, arguments, title, table(results), results)
    panels = {
        f"{rate} Gbit/s": [
            Bar(name, Spread(1e3 * s, 1e3 * s, 1e3 * s), bound=1e3 * times["bound"])
            for name, s in times.items()
            if name != "bound"
        ]
        for rate, times in results.items()
    }
    draw_bars(panels, folder / "step_time.png", title=title, axis="computed time of a step", unit="ms", max_columns=2)


if __name__ == "__main__":
    main()
