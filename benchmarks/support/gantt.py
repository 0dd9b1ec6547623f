"""A Gantt picture of what ranks do when."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

Bar = tuple[int, str, float, float]  # row, colour's name, start and end (s)


def draw(
    bars: Iterable[Bar], rows: list[str], colors: dict[str, str], title: str, path: Path, end_s: float | None = None
) -> None:
    """Draw ``bars``, later ones over earlier ones, from time 0 to ``end_s`` (None: to the last one's end)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    figure, axes = plt.subplots(figsize=(14, 1 + 0.37 * len(rows)), layout="constrained")
    for row, name, start, end in bars:
        axes.barh(row, end - start, left=start, height=0.85, color=colors[name], linewidth=0)
    axes.set_yticks(range(len(rows)), rows)
    axes.set(xlabel="s", title=title)
    axes.set_xlim(0, end_s)
    axes.invert_yaxis()
    handles = [Patch(color=color, label=name) for name, color in colors.items()]
    figure.legend(handles=handles, ncols=len(handles), loc="outside lower center")
    figure.savefig(path, dpi=110)
    plt.close(figure)
