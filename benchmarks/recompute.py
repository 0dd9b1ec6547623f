"""Memory and time of recomputation: ResNet-50 and AlexNet at 224x224, each policy against its rivals.

    python benchmarks/recompute.py                                      # both models, batches of 8 and 32
    python benchmarks/recompute.py --models resnet50 --batches 8 --rounds 3 --no-compile

Sides: no recomputation, "cheap", "sublinear", "budget" at several shares of the plain bytes; `torch.utils.checkpoint`
on every block; `torch.compile` with its default partitioner and with activation_memory_budget. All run in one process
on one model and take turns, round after round. Measured for each:

- kept: bytes between forward and backward, without parameters and images. For compiled sides by saved-tensor hooks.
- peak: how far memory rises in a step, gradients of the parameters included (CPU: resident memory of the process).
- time of forward and backward; its ratio to "none" compares two steps of one round (median, minimum-maximum).

The sides that do not run here (no compiler, no plan within the budget) are named with the reason. Bound: "none" for the
time. Writes results.json, table.md and a plot of time against memory for each model and batch.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from support.command_line import benchmark_parser, output_folder, parse
from support.headless import pyplot
from support.peak_memory import peak_bytes
from support.recompute_sides import Checkpointed, Compiled, Recomputing, Side, plan_side
from support.report import markdown_table, write_report
from support.spread import alternate, min_max, ratios
from torch import nn

from lightning_dp.models import AlexNet, ResNet50
from lightning_dp.planner.plots import color_of

MODELS: dict[str, Callable[[], nn.Module]] = {"resnet50": ResNet50, "alexnet": AlexNet}
NONE = "none"
SMOKE = {
    "batches": [2], "image_size": 32, "rounds": 1, "shares": [0.6], "compile": False, "models": ["resnet50"],
}  # fmt: skip


def parser() -> argparse.ArgumentParser:
    options = benchmark_parser(__doc__, __file__)
    options.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    options.add_argument("--batches", nargs="+", type=int, default=[8, 32])
    options.add_argument("--image-size", type=int, default=224)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--shares", nargs="+", type=float, default=[0.25, 0.33, 0.4, 0.5, 0.7], help="of plain bytes")
    options.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    options.add_argument("--compile-shares", nargs="+", type=float, default=[0.2, 0.4, 0.6, 0.9])
    options.add_argument("--bfloat16", action="store_true", help="compute in it, channels last")
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return options


def make_sides(options: argparse.Namespace, model: nn.Module, batch: int) -> tuple[dict[str, Side], dict[str, Any]]:
    """Return the sides that run here, and notes: promises of plans, and why a side does not run."""
    device = torch.device(options.device)
    x = torch.randn(batch, 3, options.image_size, options.image_size, device=device)
    x = x.to(memory_format=torch.channels_last if options.bfloat16 else torch.preserve_format)
    target = torch.randint(1000, (batch,), device=device)
    notes: dict[str, Any] = {}
    sides: dict[str, Side] = {
        NONE: Side(model, x, target),
        "cheap": Recomputing(model, x, target, "cheap"),
        "sublinear": Recomputing(model, x, target, "sublinear"),
        "torch.utils.checkpoint": Checkpointed(model, x, target),
    }
    for share in options.shares:
        name = f"budget {share:g}"
        try:
            sides[name], notes[name] = plan_side(model, x, target, share)
        except ValueError as error:
            notes[name] = str(error)
    for compile_share in [None, *options.compile_shares] if options.compile else []:
        name = "torch.compile" if compile_share is None else f"torch.compile {compile_share:g}"
        try:
            sides[name] = Compiled(model, x, target, compile_share)
        except Exception as error:  # whatever is missing here: a compiler, an operator
            notes[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return sides, notes


def step_s(side: Side, device: torch.device) -> float:
    """Return the time of one step."""
    start_s = time.perf_counter()
    side.step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start_s


def measure(options: argparse.Namespace, name: str, batch: int) -> dict[str, Any]:
    """Return the figures of each side for one model and batch."""
    torch.manual_seed(0)
    device = torch.device(options.device)
    model = MODELS[name]().to(device)
    Side.is_mixed = options.bfloat16
    if options.bfloat16:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    sides, notes = make_sides(options, model, batch)
    for side in sides.values():
        side.step()  # libraries set themselves up
    kept = {label: side.kept_bytes() for label, side in sides.items()}
    peaks = {label: peak_bytes(side.step, device) for label, side in sides.items()}
    times = alternate({label: partial(step_s, side, device) for label, side in sides.items()}, options.rounds)
    return {"kept_bytes": kept, "peak_bytes": peaks, "times_s": times, "notes": notes, "batch": batch, "model": name}


def table_of(results: Sequence[dict[str, Any]]) -> str:
    """Return one table for all models and batches."""
    rows = []
    for result in results:
        plain_bytes = result["kept_bytes"][NONE]
        for label, times in result["times_s"].items():
            kept, peak = result["kept_bytes"][label], result["peak_bytes"][label]
            ratio = min_max(ratios(times, result["times_s"][NONE]))
            rows.append(
                [
                    f"{result['model']}, {result['batch']}",
                    label,
                    f"{kept / 1e6:.1f}",
                    f"{100 * (1 - kept / plain_bytes):.0f} %",
                    "" if peak is None else f"{peak / 1e6:.0f}",
                    f"{1e3 * min_max(times).median:.0f}",
                    ratio.text(2),
                    f"{result['batch'] / min_max(times).median:.1f}",
                ]
            )
    header = ["model, batch", "side", "kept, MB", "saved", "peak, MB", "ms a step", "over none", "images/s"]
    lines = [markdown_table(header, rows)]
    for result in results:
        for label, note in result["notes"].items():
            if isinstance(note, str):
                lines.append(f"{result['model']}, {result['batch']}, {label}: not run. {note}")
    return "\n\n".join(lines)


def draw(result: dict[str, Any], path: Path) -> None:
    """Plot time over that of "none" against kept bytes, all sides."""
    figure, axes = pyplot().subplots(figsize=(7, 4.6), layout="constrained")
    families = {"budget": "o-", "torch.compile": "s-"}
    for family, style in families.items():
        points = sorted(
            (result["kept_bytes"][label] / 1e6, min_max(ratios(times, result["times_s"][NONE])).median)
            for label, times in result["times_s"].items()
            if label.startswith(family) and "checkpoint" not in label
        )
        if points:
            axes.plot(*zip(*points, strict=True), style, color=color_of(family), label=family)
    for label in (NONE, "cheap", "sublinear", "torch.utils.checkpoint"):
        ratio = min_max(ratios(result["times_s"][label], result["times_s"][NONE]))
        axes.errorbar(
            result["kept_bytes"][label] / 1e6, ratio.median,
            yerr=[[ratio.median - ratio.low], [ratio.high - ratio.median]], fmt="D", capsize=3,
            color=color_of(label), label=label,
        )  # fmt: skip
    axes.set_xlabel("kept for backward")
    axes.xaxis.set_major_formatter("{x:g} MB")
    axes.set_ylabel("time of a step over that without recomputation")
    axes.set_title(f"{result['model']}, {result['batch']} images")
    axes.set_xlim(left=0)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    pyplot().close(figure)


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(parser(), SMOKE, argv)
    folder = output_folder(arguments)
    results = []
    for name in arguments.models:
        for batch in arguments.batches:
            results.append(measure(arguments, name, batch))
            draw(results[-1], folder / f"{name}-{batch}.png")
    size = arguments.image_size
    write_report(folder, arguments, f"Recomputation at {size}x{size}", table_of(results), results)


if __name__ == "__main__":
    main()
