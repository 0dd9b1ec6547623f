"""Choices and step times of the planner in each cell beside the sweep's: figures, table and plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from lightning_dp.planner import METHODS
from lightning_dp.planner.plots import colors_of
from lightning_dp.planner.report import WITH_PLAN
from support.headless import pyplot
from support.report import markdown_table
from support.spread import min_max

CellResult = Mapping[str, Any]
# Their predictions are the least sure: docs/measurements/planner.md, "Expected errors".
NOT_COUNTED = ("ddp_power_sgd", "layered_sgd_step_int8", "layered_sgd_step_power_sgd")


def medians_s(cell: CellResult) -> dict[str, float]:
    """Return the measured step time of each method: the median of the rounds."""
    return {name: min_max(values).median for name, values in cell["step_s"].items()}


def best_of(cell: CellResult) -> str:
    """Return the fastest measured method of those that the planner may choose: exact ones that the recipes have."""
    times = medians_s(cell)
    allowed = [name for name in times if METHODS[name].is_exact and name in WITH_PLAN]
    return min(allowed, key=lambda name: times[name])


def loss_of(cell: CellResult) -> float:
    """Return by how much the chosen method takes longer than the best, as a ratio."""
    times = medians_s(cell)
    return times[cell["chosen"]] / times[best_of(cell)] - 1


def errors_of(cell: CellResult) -> dict[str, float]:
    """Return the relative error of each predicted step time."""
    return {name: cell["predicted_s"][name] / measured - 1 for name, measured in medians_s(cell).items()}


def mean_error(cells: Sequence[CellResult], skipped: Sequence[str] = ()) -> float:
    """Return the mean absolute error over all cells and methods, but for those skipped."""
    return fmean(abs(error) for cell in cells for name, error in errors_of(cell).items() if name not in skipped)


def cell_table(cells: Mapping[str, CellResult]) -> str:
    """Return a row for each cell, and the three figures of the whole below it."""
    rows = []
    for name, cell in cells.items():
        times = medians_s(cell)
        worst, error = max(errors_of(cell).items(), key=lambda item: abs(item[1]))
        rows.append(
            [
                name,
                f"{cell['chosen']}, {1e3 * times[cell['chosen']]:.0f} ms",
                f"{best_of(cell)}, {1e3 * times[best_of(cell)]:.0f} ms",
                f"{loss_of(cell):.1%}",
                f"{mean_error([cell]):.1%}",
                f"{mean_error([cell], NOT_COUNTED):.1%}",
                f"{worst}, {error:+.0%}",
            ]
        )
    header = ["cell", "chosen", "best", "longer by", "mean error", "without compressors", "largest error"]
    good = sum(loss_of(cell) <= 0.05 for cell in cells.values())
    values = list(cells.values())
    return (
        f"{markdown_table(header, rows)}\n\nWithin 5 % of the best: {good} of {len(cells)} cells. Mean error of the "
        f"step times: {mean_error(values):.1%}; without int8 and PowerSGD: "
        f"{mean_error(values, NOT_COUNTED):.1%}."
    )


def draw_cells(cells: Mapping[str, CellResult], path: Path) -> None:
    """Draw predicted over measured step times, a point for each method of each cell."""
    plt = pyplot()
    from matplotlib.ticker import LogLocator, NullFormatter

    figure, axes = plt.subplots(figsize=(7.2, 6.0), layout="constrained")
    names = [name for name in METHODS if any(name in cell["step_s"] for cell in cells.values())]
    for name, color in zip(names, colors_of(names), strict=True):
        points = [(medians_s(c)[name], c["predicted_s"][name]) for c in cells.values() if name in c["step_s"]]
        measured, predicted = zip(*points, strict=True)
        axes.plot([1e3 * s for s in measured], [1e3 * s for s in predicted], "o", color=color, label=name)
    every = [1e3 * value for cell in cells.values() for value in (*medians_s(cell).values(),)]
    ends = [0.8 * min(every), 1.25 * max(every)]
    axes.plot(ends, ends, color="0.5", linewidth=0.8)
    axes.fill_between(ends, [0.95 * x for x in ends], [1.05 * x for x in ends], color="0.9", label="within 5 %")
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter("{x:g} ms")
        axis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("measured step time")
    axes.set_ylabel("predicted step time")
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=120)
    plt.close(figure)
