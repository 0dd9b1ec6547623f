"""Draw ``docs/images/ranks_and_groups.svg``: which ranks talk to which, for each method.

python docs/draw_ranks.py              # over the plot of the documentation
python docs/draw_ranks.py OTHER.svg
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

OUTPUT = Path(__file__).parent / "images" / "ranks_and_groups.svg"

NODE, RANK, LEADER, TRUNK, HEAD = "#f2f2f2", "#cfe2f3", "#6fa8dc", "#cfe2f3", "#f9cb9c"
FAST, SLOW, SHARED = "#6aa84f", "#cc0000", "#674ea7"


def box(axes: Axes, x: float, y: float, width: float, height: float, text: str, color: str) -> None:
    """A rounded box with ``text`` in its middle."""
    axes.add_patch(
        FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0,rounding_size=0.08", fc=color, ec="#444444", lw=0.8)
    )
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=8)


def node(axes: Axes, x: float, number: int, height: float) -> None:
    """The frame of a node with two ranks."""
    box(axes, x, 0.0, 2.3, height, "", NODE)
    axes.text(x + 1.15, height + 0.1, f"node {number}", ha="center", va="bottom", fontsize=8, color="#444444")


def arrow(axes: Axes, begin: tuple[float, float], end: tuple[float, float], color: str, bend: float = 0.0) -> None:
    """An arrow with two heads."""
    style = f"arc3,rad={bend}"
    axes.add_patch(
        FancyArrowPatch(begin, end, arrowstyle="<|-|>", mutation_scale=10, color=color, connectionstyle=style)
    )


def layered_sgd(axes: Axes) -> None:
    """Two groups of two ranks; the first rank of each is its leader."""
    axes.set_title("Layered SGD", fontsize=10)
    for group in range(2):
        left = 2.9 * group
        node(axes, left, group, 2.2)
        for member in range(2):
            rank = 2 * group + member
            text, color = (f"rank {rank}\nleader", LEADER) if member == 0 else (f"rank {rank}", RANK)
            box(axes, left + 0.15 + 1.1 * member, 0.9, 0.9, 0.7, text, color)
        arrow(axes, (left + 0.6, 0.9), (left + 1.7, 0.9), FAST, 0.6)
        axes.text(left + 1.15, 0.22, "reduce, broadcast", ha="center", fontsize=7, color=FAST)
    arrow(axes, (0.6, 1.6), (3.5, 1.6), SLOW, -0.45)
    axes.text(2.6, 2.72, "inter-group all-reduce of gradient buckets", ha="center", fontsize=7, color=SLOW)


def hybrid(axes: Axes) -> None:
    """Four ranks: a whole trunk and a quarter of the head each."""
    axes.set_title("Krizhevsky's hybrid", fontsize=10)
    for rank in range(4):
        left = 1.3 * rank
        box(axes, left, 0.0, 1.1, 0.7, f"trunk\nimages of {rank}", TRUNK)
        box(axes, left, 1.6, 1.1, 0.7, f"head, {rank + 1}/4\nall images", HEAD)
        for other in range(4):
            color = SLOW if other != rank else FAST
            axes.plot([left + 0.55, 1.3 * other + 0.55], [0.7, 1.6], color=color, lw=0.6, alpha=0.7)
    axes.text(2.5, 2.45, "features and activations travel; head gradients do not", ha="center", fontsize=7, color=SLOW)
    axes.text(2.5, -0.25, "DDP all-reduces the trunk's gradients", ha="center", fontsize=7, color=FAST)


def global_batch_norm(axes: Axes) -> None:
    """Four ranks in one statistics group."""
    axes.set_title("Adaptive global batch norm", fontsize=10)
    for rank in range(4):
        left = 1.3 * rank
        box(axes, left, 0.0, 1.1, 0.7, f"rank {rank}\nbatch {rank}", RANK)
        arrow(axes, (left + 0.55, 0.7), (2.5, 1.6), SHARED)
    box(axes, 1.3, 1.6, 2.4, 0.7, "mean, squared deviations,\ncount of all ranks", "#d9d2e9")
    axes.text(
        2.5, 2.45, "all-gather in each layer while global; nothing while local", ha="center", fontsize=7, color=SHARED
    )


def draw(path: Path) -> None:
    """Write the plot to ``path``."""
    # Text as text, and no date and no random identifiers, so that an unchanged plot is an unchanged file.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "ranks_and_groups"})
    figure = Figure(figsize=(12.5, 2.9), layout="constrained")
    panels = figure.subplots(1, 3)
    for axes, panel in zip(panels, (layered_sgd, hybrid, global_batch_norm), strict=True):
        panel(axes)
        axes.set_xlim(-0.1, 5.3)
        axes.set_ylim(-0.4, 3.0)
        axes.set_axis_off()
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else OUTPUT)
