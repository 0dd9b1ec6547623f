"""How far off a planned peak of memory is: four networks, plain and with two policies of Memonger.

    python benchmarks/planner_peaks.py [--device cuda]

The planner measures steps of a quarter and of half the batch, as `plan_batch_size` does, and its law (memory grows
linearly with the batch) gives the peak of the whole batch. Measured is the third of three training steps of SGD with
momentum at the whole batch, by the events of PyTorch's allocator on the CPU, or by the allocator of the GPU. Both count
parameters, buffers, gradients, momentum, batch and activations. Memory is counted, not time, so other work on the
machine does not matter. Writes results.json, table.md and a plot.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from support.bars import Bar, draw_bars
from support.command_line import benchmark_parser, output_folder, parse
from support.networks import MobileNetV2, VisionTransformer
from support.peak_memory import AllocatorRise, peak_bytes
from support.report import markdown_table, write_report
from support.spread import min_max
from support.training import quiet
from torch import Tensor, nn

from lightning_dp.models import AlexNet, ResNet50
from lightning_dp.planner.convolutions.measured_plans import extrapolated, measure_step
from lightning_dp.recompute import apply_recompute

SMOKE = {"batch_size": 4, "image_size": 64, "networks": ["ViT"]}
NETWORKS: dict[str, Callable[[int], nn.Module]] = {
    "ResNet-50": lambda image_size: ResNet50(),
    "AlexNet": lambda image_size: AlexNet(),
    "MobileNetV2": lambda image_size: MobileNetV2(),
    "ViT": VisionTransformer,
}
POLICIES: tuple[Any, ...] = (None, "cheap", "sublinear")
AIMED = 0.10


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the cross-entropy."""
    return F.cross_entropy(model(batch[0]), batch[1])


def batch_of(size: int, image_size: int, device: str) -> tuple[Tensor, Tensor]:
    """Return noise and classes."""
    return torch.randn(size, 3, image_size, image_size, device=device), torch.randint(1000, (size,), device=device)


def planned_bytes(model: nn.Module, policy: Any, batch_size: int, image_size: int, device: str) -> int:
    """Return the peak that the planner expects at a batch size, from two smaller ones."""
    momentum_bytes = sum(parameter.nbytes for parameter in model.parameters())
    totals = []
    for size in (batch_size // 4, batch_size // 2):
        step = measure_step(model, batch_of(size, image_size, device), loss, policy, repeats=1)
        totals.append((size, step.total_bytes))
    return extrapolated(totals, batch_size) + momentum_bytes


def measured_bytes(model: nn.Module, policy: Any, batch_size: int, image_size: int, device: str) -> int:
    """Return the peak of a training step. The model recomputes by ``policy`` from then on."""
    if policy is not None:
        apply_recompute(model, policy)
    batch = batch_of(batch_size, image_size, device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)

    def step() -> None:
        loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # allocates the momentum
    if device == "cuda":
        step()
        rise_bytes = peak_bytes(step, torch.device(device))
    else:
        rise = AllocatorRise()
        for _ in range(2):
            rise.tick()
            step()
        rise.tick()
        rise_bytes = rise.num_bytes
    assert rise_bytes is not None
    before = [*model.parameters(), *model.buffers(), *batch]
    before += [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return rise_bytes + sum(tensor.nbytes for tensor in before)


def parser() -> argparse.ArgumentParser:
    """Return the options."""
    options = benchmark_parser(__doc__, __file__)
    options.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(NETWORKS))
    options.add_argument("--batch-size", type=int, default=32, help="images; a multiple of 4")
    options.add_argument("--image-size", type=int, default=128, help="of AlexNet always 224")
    options.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    return options


def main(argv: Sequence[str] | None = None) -> None:
    """Compare all networks and policies."""
    options = parse(parser(), SMOKE, argv)
    quiet()
    rows, results = [], {}
    panels: dict[str, list[Bar]] = {name: [] for name in options.networks}
    for name in options.networks:
        image_size = 224 if name == "AlexNet" else options.image_size
        for policy in POLICIES:
            torch.manual_seed(0)
            model = NETWORKS[name](image_size).train().to(options.device)
            size = (options.batch_size, image_size, options.device)
            planned = planned_bytes(model, policy, *size)
            measured = measured_bytes(model, policy, *size)
            results[f"{name}, {policy}"] = {"planned_bytes": planned, "measured_bytes": measured}
            panels[name].append(Bar(policy or "none", min_max([measured / 1e6]), bound=planned / 1e6))
            cells = [name, policy or "none", *(f"{value / 1e6:.0f} MB" for value in (planned, measured))]
            rows.append([*cells, f"{planned / measured - 1:+.1%}"])
            print(" | ".join(rows[-1]), flush=True)
    table = markdown_table(["network", "recomputation", "planned", "measured", f"error (aim: {AIMED:.0%})"], rows)
    title = f"Planned and measured peaks, batches of {options.batch_size} images"
    folder = output_folder(options)
    write_report(folder, options, title, table, results)
    draw_bars(panels, folder / "peaks.png", title=title, axis="measured peak", bound_label="planned", unit="MB")


if __name__ == "__main__":
    main()
