"""Table and plot of hybrid_throughput. Results: rate -> side -> its rounds, bytes and bound."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from support.bars import Bar, draw_bars
from support.emulated_hosts import rate_name
from support.report import markdown_table
from support.sharded_peers import TENSOR_PARALLEL
from support.spread import Spread, min_max, ratios

REFERENCE = TENSOR_PARALLEL  # the strongest that PyTorch offers for this network
DDP = "DDP"
VARIABLE = "hybrid c, variable batch"
FIXED = "hybrid c"

Side = Mapping[str, Any]
Sides = Mapping[str, Side]


def step_times(side: Side) -> list[float]:
    """Return the seconds a step of each round."""
    return [turn["step_s"] for turn in side["rounds"]]


def throughput_over(side: Side, other: Side) -> Spread:
    """Return the throughput over another side's, round by round: median, minimum, maximum."""
    return min_max(ratios(step_times(other), step_times(side)))


def communication_s(side: Side) -> list[float]:
    """Return, for each round, the part of a step that is not computing alone; empty where that is not known."""
    return [turn["step_s"] - turn["alone_s"] for turn in side["rounds"] if turn["alone_s"] is not None]


def throughput_table(results: Mapping[str, Sides], num_samples: int) -> str:
    """Return medians over the rounds, and ratios with minimum and maximum. ``num_samples``: of a step, on all ranks."""
    header = [
        "rate", "side", "ms a step", "samples/s", f"throughput over {REFERENCE}'s (minimum-maximum)",
        "over DDP's (minimum-maximum)", "communication, ms a step", "over DDP's (minimum-maximum)",
        "computing alone, ms", "MB sent a rank: counted, on its NIC", "bound, ms",
    ]  # fmt: skip
    rows = [
        [rate_name(rate), name, *_cells(side, sides, num_samples)]
        for rate, sides in results.items()
        for name, side in sides.items()
    ]
    lines = [markdown_table(header, rows)]
    for rate, sides in results.items():
        if VARIABLE in sides and FIXED in sides:
            spread = throughput_over(sides[VARIABLE], sides[FIXED]).text()
            lines.append(f"Throughput of {VARIABLE}, over {FIXED}, {rate_name(rate)}: {spread}")
    return "\n\n".join(lines)


def _cells(side: Side, sides: Sides, num_samples: int) -> list[str]:
    step_s = median(step_times(side))
    cells = [f"{step_s * 1e3:.0f}", f"{num_samples / step_s:.0f}"]
    cells += [throughput_over(side, sides[name]).text() if name in sides else "" for name in (REFERENCE, DDP)]
    waits = communication_s(side)
    if waits:
        parts = min_max(ratios(waits, communication_s(sides[DDP]))).text() if DDP in sides else ""
        alone_s = median(turn["alone_s"] for turn in side["rounds"])
        cells += [f"{median(waits) * 1e3:.0f}", parts, f"{alone_s * 1e3:.0f}"]
        bound = f"{side['bound_s'] * 1e3:.0f}"
    else:
        cells += ["", "", ""]
        bound = f"{side['bound_s'] * 1e3:.0f} (of the bytes alone)"
    on_nic = median(turn["nic_bytes"] for turn in side["rounds"])
    # Where no formula gives the bytes, those on the NIC are all there is.
    counted = f"{side['bytes'] / 1e6:.1f}" if waits else "-"
    return [*cells, f"{counted}, {on_nic / 1e6:.1f}", bound]


def draw(results: Mapping[str, Sides], path: Path, title: str) -> None:
    """Draw a panel for each rate, a bar for each side."""
    panels = {
        rate_name(rate): [
            Bar(name, min_max(1e3 * seconds for seconds in step_times(side)), 1e3 * side["bound_s"])
            for name, side in sides.items()
        ]
        for rate, sides in results.items()
    }
    draw_bars(
        panels,
        path,
        title=title,
        axis="time of a step: median, minimum and maximum of the rounds",
        unit="ms",
        bound_label="bound: computing alone, or bytes over rate\n(bytes only: tensor parallelism + DDP, FSDP2)",
    )
