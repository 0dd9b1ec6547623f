"""Plots of horizontal bars: a panel for each setting, a bar for each side, and nothing that hides anything else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

from lightning_dp.planner.plots import color_of
from support.headless import pyplot
from support.spread import Spread

BOUND_WIDTH = 1.8  # points


@dataclass(frozen=True)
class Bar:
    """One bar.

    Attributes:
        label: the side's name.
        value: its length, and the ends of its whisker.
        bound: drawn as a line across the bar; None: there is none.
        hatched: sets it apart, for example because the side computes something else.
        color: None: that of the method that the label names, else of the bar's place in its panel.
    """

    label: str
    value: Spread
    bound: float | None = None
    hatched: bool = False
    color: str | None = None


def draw_bars(
    panels: Mapping[str, Sequence[Bar]],
    path: Path,
    *,
    title: str,
    axis: str,
    digits: int = 0,
    bound_label: str = "bound",
    hatched_label: str = "",
    reference: float | None = None,
    max_columns: int = 5,
    unit: str = "",
) -> None:
    """Draw a panel for each entry of ``panels``, with the labels on the left, and save the plot.

    Each panel has its own axis from 0: sides that differ little can be told apart beside others that differ much.

    Args:
        panels: title of the panel -> its bars, from top to bottom. Panels that all have the same labels share them.
        path: of the PNG file.
        title: of the plot.
        axis: what the bars' length is; stands below the title.
        digits: of the numbers beside the bars.
        bound_label: what the line across a bar is, for the legend.
        hatched_label: what hatched bars are, for the legend.
        reference: draws a dotted line through all bars of every panel, where 1 is "as fast as", for example.
        max_columns: panels side by side; further ones go to the next row.
        unit: of the bars' length, for the ticks.
    """
    num_columns = min(len(panels), max_columns)
    figure, grid = _make_grid(panels, num_columns)
    for axes, (name, bars) in zip(grid.flat, panels.items(), strict=False):
        _draw_panel(axes, bars, digits)
        axes.xaxis.set_major_formatter(f"{{x:,g}} {unit}".rstrip())
        axes.set_title(name, fontsize=10)
        if reference is not None:
            axes.axvline(reference, color="black", linewidth=0.9, linestyle=":")
    figure.suptitle(f"{title}\n{axis}", fontsize=10)
    bars_of_all = [bar for bars in panels.values() for bar in bars]
    _add_legend(figure, bars_of_all, bound_label, hatched_label, num_columns)
    figure.savefig(path, dpi=120)
    pyplot().close(figure)


def _make_grid(panels: Mapping[str, Sequence[Bar]], num_columns: int) -> tuple[Any, Any]:
    num_rows = ceil(len(panels) / num_columns)
    longest = max(len(bars) for bars in panels.values())
    same_labels = len({tuple(bar.label for bar in bars) for bars in panels.values()}) == 1
    width = 2.2 * (1 if same_labels else num_columns) + 2.6 * num_columns  # of labels and of panels, in inches
    size = (width, num_rows * (1.1 + 0.3 * longest) + 0.7)
    figure, grid = pyplot().subplots(
        num_rows, num_columns, figsize=size, layout="constrained", sharey=same_labels, squeeze=False
    )
    for spare in grid.flat[len(panels) :]:
        spare.set_visible(False)
    return figure, grid


def _draw_panel(axes: Any, bars: Sequence[Bar], digits: int) -> None:
    lengths = [bar.value.median for bar in bars]
    whiskers = [
        [bar.value.median - bar.value.low for bar in bars],
        [bar.value.high - bar.value.median for bar in bars],
    ]
    drawn = axes.barh(
        range(len(bars)),
        lengths,
        height=0.72,
        xerr=whiskers,
        color=[bar.color or color_of(bar.label) or f"C{place % 10}" for place, bar in enumerate(bars)],
        hatch=["///" if bar.hatched else "" for bar in bars],
        edgecolor="white",
        linewidth=0,
        error_kw={"elinewidth": 1.2, "capsize": 2.5},
    )
    axes.bar_label(drawn, [f"{length:,.{digits}f}" for length in lengths], padding=4, fontsize=8)
    bounds = [(place, bar.bound) for place, bar in enumerate(bars) if bar.bound is not None]
    axes.vlines(
        [bound for _, bound in bounds],
        [place - 0.45 for place, _ in bounds],
        [place + 0.45 for place, _ in bounds],
        color="black",
        linewidth=BOUND_WIDTH,
    )
    axes.set_yticks(range(len(bars)), [bar.label for bar in bars], fontsize=9)
    axes.set_ylim(len(bars) - 0.4, -0.6)  # the first bar at the top
    axes.tick_params(axis="x", labelsize=8)
    # The numbers beside the bars need room.
    axes.set_xlim(0, 1.28 * max([bar.value.high for bar in bars] + [bound for _, bound in bounds]))
    axes.spines[["top", "right"]].set_visible(False)


def _add_legend(figure: Any, bars: Sequence[Bar], bound_label: str, hatched_label: str, num_columns: int) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = []
    if any(bar.bound is not None for bar in bars):
        handles.append(Line2D([], [], color="black", linewidth=BOUND_WIDTH, label=bound_label))
    if any(bar.hatched for bar in bars):
        handles.append(Patch(facecolor="0.6", edgecolor="white", hatch="///", label=hatched_label))
    if handles:
        # A single panel is too narrow for entries side by side.
        columns = len(handles) if num_columns > 1 else 1
        figure.legend(handles=handles, ncols=columns, loc="outside lower center", fontsize=8)
