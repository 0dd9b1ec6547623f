"""What all plots share: the color of each method, and labels at the ends of lines.

Methods have several names: ``layered_sgd_step`` in a plan, "layered SGD step, leader" in a benchmark, and
``strategy=layered_sgd`` in a sweep. They are known by their words.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import cycle
from typing import Any

# Words in a method's name -> its color. The first entry counts whose words all occur.
COLORS = {
    "ddp bf16": "#969696",
    "ddp int8": "#b8a58c",
    "ddp powersgd": "#bd9e39",
    "ddp ring": "#8c6d31",
    "ddp accumulate": "#b5cf6b",
    "ddp batches": "#b5cf6b",
    "ddp memonger larger": "#c5b0d5",
    "ddp memonger": "#9467bd",
    "ddp global": "#5aae61",
    "nothing sent": "#d9d9d9",
    "tensor parallelism": "#d62728",
    "ddp": "#4d4d4d",
    "post local": "#e7969c",
    "fsdp2": "#8c564b",
    "hsdp": "#c49c94",
    "fsdp load": "#bcbddc",
    "fsdp int8": "#9e9ac8",
    "fsdp": "#6a51a3",
    "dear": "#808000",
    "ring bfloat16": "#c9a66b",
    "ring": "#8c6d31",
    "gloo": "#4d4d4d",
    "star": "#e7ba52",
    "int8 without": "#5ab4ac",
    "powersgd without": "#de77ae",
    "bf16": "#17becf",
    "fp16": "#8da0cb",
    "int8": "#01665e",
    "powersgd": "#c51b7d",
    "load": "#9ecae1",
    "layered sharded": "#4292c6",
    "layered": "#08519c",
    "hybrid variable": "#fdd0a2",
    "hybrid b": "#fd8d3c",
    "hybrid c": "#fdae6b",
    "hybrid": "#e6550d",
    "agbn": "#5aae61",
    "global": "#5aae61",
    "adaptive": "#a6dba0",
    "local": "#bdbdbd",
    "cheap": "#c5b0d5",
    "sublinear": "#8c6bb1",
    "budget": "#9467bd",
    "compile": "#ff7f0e",
    "checkpoint": "#4d4d4d",
}
OTHERS = ("#1f77b4", "#ff9896", "#2ca02c", "#dbdb8d", "#393b79", "#f7b6d2", "#637939", "#ad494a")


def color_of(name: str) -> str | None:
    """Return the color of the method that ``name`` names, or None if it names none."""
    words = set(re.findall(r"[a-z0-9]+", name.lower().replace("power_sgd", "powersgd")))
    return next((color for entry, color in COLORS.items() if words.issuperset(entry.split())), None)


def colors_of(names: Iterable[str]) -> list[str]:
    """Return a color for each name, all different up to some: its method's, or else one that no method has."""
    others, colors = cycle(OTHERS), list[str]()
    for name in names:
        color = color_of(name)
        colors.append(next(others) if color is None or color in colors else color)
    return colors


def label_lines(axes: Any, ends: Sequence[tuple[str, float, float, str]], size: float = 7.0) -> None:
    """Write labels to the right of the axes, in the colors of their lines, and move apart those that would overlap.

    Args:
        axes: with a linear y-axis whose limits are final.
        ends: of each line: label, x and y of its last point, color.
        size: of the text, in points.
    """
    low, high = axes.get_ylim()
    ends = sorted(ends, key=lambda end: end[2])
    # Constrained layout leaves the axes about 0.8 of their row's height.
    row_height = axes.figure.get_figheight() / axes.get_gridspec().nrows
    apart = 1.3 * size / 72 / (0.8 * row_height) * (high - low)
    places: list[float] = []
    for *_, y, _ in ends:
        places.append(max(y, places[-1] + apart) if places else y)
    for below_top in range(len(ends)):
        places[-1 - below_top] = min(places[-1 - below_top], high - below_top * apart)
    for (label, x, y, color), place in zip(ends, places, strict=True):
        axes.annotate(
            label,
            (x, y),
            (1.04, place),
            textcoords=("axes fraction", "data"),
            arrowprops={"arrowstyle": "-", "color": color, "linewidth": 0.6},
            color=color,
            fontsize=size,
            va="center",
            annotation_clip=False,
        )
