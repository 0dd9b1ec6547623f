"""A plot of what ranks do when: a row for each thing that happens side by side, time from left to right."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from support.headless import pyplot

Stage = tuple[str, float, float]  # name, start and end (s)
Segment = tuple[int, str, float, float]  # row, name of the color, start and end (s)


def gaps(stages: Iterable[Stage], start_s: float, end_s: float) -> list[tuple[float, float]]:
    """Return the times between ``start_s`` and ``end_s`` that no stage covers."""
    left: list[tuple[float, float]] = []
    covered_to = start_s
    for _, begin, end in sorted(stages, key=lambda stage: stage[1]):
        if begin > covered_to:
            left.append((covered_to, min(begin, end_s)))
        covered_to = max(covered_to, end)
        if covered_to >= end_s:
            return left
    return [*left, (covered_to, end_s)]


def draw_timeline(
    segments: Iterable[Segment],
    rows: Sequence[str],
    colors: Mapping[str, str],
    path: Path,
    *,
    title: str,
    background: str,
    end_s: float,
) -> None:
    """Draw ``segments`` from time 0 to ``end_s``, later ones over earlier ones, and save the plot.

    Args:
        segments: what happens.
        rows: names of the rows, from top to bottom.
        colors: name -> color, in the order of the legend.
        path: of the PNG file.
        title: of the plot.
        background: what it means that a row shows nothing, for the legend.
        end_s: end of the time axis.
    """
    from matplotlib.patches import Patch

    empty = "#f1f1f1"
    figure, axes = pyplot().subplots(figsize=(14, 1.4 + 0.37 * len(rows)), layout="constrained")
    axes.barh(range(len(rows)), [end_s] * len(rows), height=0.85, color=empty, linewidth=0)
    for row, name, start, end in segments:
        axes.barh(row, end - start, left=start, height=0.85, color=colors[name], linewidth=0)
    axes.set_yticks(range(len(rows)), rows)
    axes.set(xlim=(0, end_s), ylim=(len(rows) - 0.4, -0.6))
    axes.xaxis.set_major_formatter("{x:g} s")
    axes.set_title(title, fontsize=11)
    handles = [Patch(color=color, label=name) for name, color in colors.items()]
    handles.append(Patch(facecolor=empty, edgecolor="0.6", linewidth=0.5, label=background))
    figure.legend(handles=handles, ncols=5, loc="outside lower center", fontsize=9)
    figure.savefig(path, dpi=110)
    pyplot().close(figure)
