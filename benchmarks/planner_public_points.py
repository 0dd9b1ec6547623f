"""How far off the planner's simulation is on published throughputs of CNNs, with nothing fitted.

    python benchmarks/planner_public_points.py

Nothing is run but the simulation, so there is no spread and the machine does not matter. The figures, their sources
and what the simulation is given of them are in support/public_points.py: bytes of the gradients, the time of a step on
one GPU from the same table, and links from data sheets. Two predictions without a simulation stand beside it: GPUs that
never wait, and all-reduces that begin when the backward has ended. Writes results.json, table.md and public_points.png.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from support.command_line import benchmark_parser, output_folder, parse
from support.headless import pyplot
from support.public_points import SERIES, SOURCES, Series
from support.report import markdown_table, write_report

SMOKE: dict[str, object] = {}  # a whole run takes a second
AIMED_MEAN, AIMED_LARGEST = 0.05, 0.12


@dataclass(frozen=True)
class Point:
    """One published figure; all are in images/s.

    Attributes:
        series: the rows of the table that it is from.
        num_gpus: number of GPUs.
        published: what the source says.
        predicted: the simulation's.
        without_waiting: as many times one GPU's as there are GPUs.
        without_overlap: as if all-reduces began when the backward has ended. The hybrid has none.
    """

    series: Series
    num_gpus: int
    published: float
    predicted: float
    without_waiting: float
    without_overlap: float | None

    @property
    def error(self) -> float:
        """Relative error of the simulation."""
        return self.predicted / self.published - 1

    @property
    def added_ms(self) -> float:
        """What a published step takes longer than one GPU's."""
        return 1e3 * (self.num_gpus * self.series.batch_size / self.published - self.series.step_s)

    @property
    def predicted_added_ms(self) -> float:
        """What a simulated step takes longer than one GPU's."""
        return 1e3 * (self.num_gpus * self.series.batch_size / self.predicted - self.series.step_s)


def all_points() -> list[Point]:
    """Simulate the published settings."""
    return [
        Point(
            series,
            num_gpus,
            published,
            series.predicted(num_gpus),
            series.without_waiting(num_gpus),
            series.without_overlap(num_gpus) if series.method == "ddp" else None,
        )
        for series in SERIES
        for num_gpus, published in series.published.items()
    ]


def point_table(points: Sequence[Point]) -> str:
    """Return the figures, a row for each network, machine and precision."""
    header = ["source", "software or precision", "network", "machine", "images per GPU", "gradients, MB", "one GPU"]
    rows = []
    for series in SERIES:
        own = [point for point in points if point.series is series]
        cells = [
            f"{point.num_gpus}: {point.published:.0f} / {point.predicted:.0f} ({point.error:+.1%})" for point in own
        ]
        given = [f"{series.batch_size}", f"{series.megabytes:.0f}", f"{series.one_gpu:.0f}"]
        rows.append([series.source, series.what, series.model, series.machine.name, *given, ", ".join(cells)])
    return markdown_table([*header, "GPUs: published / simulated"], rows)


def errors(points: Sequence[Point], predicted: Callable[[Point], float | None]) -> list[float]:
    """Return the absolute relative errors of a prediction, where there is one."""
    pairs = [(predicted(point), point.published) for point in points]
    return [abs(value / published - 1) for value, published in pairs if value is not None]


def mean(values: Sequence[float]) -> float:
    """Return the mean."""
    return sum(values) / len(values)


def summary_table(points: Sequence[Point]) -> str:
    """Return mean and largest error, for each source and for all."""
    header = ["source", "figures", "mean error", "largest", f"within {AIMED_LARGEST:.0%}", "never waits", "no overlap"]
    rows = []
    for name in [*SOURCES, "all"]:
        chosen = [point for point in points if name in (point.series.source, "all")]
        simulated = errors(chosen, lambda point: point.predicted)
        alone = errors(chosen, lambda point: point.without_waiting)
        after = errors(chosen, lambda point: point.without_overlap)
        close = sum(error <= AIMED_LARGEST for error in simulated)
        figures = [f"{mean(simulated):.1%}", f"{max(simulated):.1%}", f"{close}", f"{mean(alone):.1%}"]
        rows.append([name, f"{len(chosen)}", *figures, f"{mean(after):.1%}" if after else ""])
    return markdown_table(header, rows)


def least_error(efficiencies: Sequence[float]) -> float:
    """Return how far off one efficiency, however well chosen, is from the farthest of these."""
    return (max(efficiencies) - min(efficiencies)) / (max(efficiencies) + min(efficiencies))


def spread_table(points: Sequence[Point]) -> str:
    """Return how much programs differ that train the same network on the same machines: DLPerf's eight."""
    rows = []
    for num_gpus in (8, 16, 32):
        chosen = [point for point in points if point.series.source == "DLPerf" and point.num_gpus == num_gpus]
        measured = [point.published / point.without_waiting for point in chosen]
        simulated = [point.predicted / point.without_waiting for point in chosen]
        ranges = [f"{min(values):.1%} to {max(values):.1%}" for values in (measured, simulated)]
        rows.append([f"{num_gpus}", *ranges, f"{least_error(measured):.1%}"])
    header = ["GPUs", "efficiency, published", "simulated", "largest error of the best single value"]
    return markdown_table(header, rows)


def draw(points: Sequence[Point], path: Path) -> None:
    """Draw predicted over published throughputs, a row for each source."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(8.4, 4.2), layout="constrained")
    axes.axvspan(-100 * AIMED_LARGEST, 100 * AIMED_LARGEST, color="0.93", zorder=0, label="within 12 %")
    axes.axvline(0, color="0.5", linewidth=0.8)
    for is_across, marker, label in ((False, "o", "one host or switch"), (True, "D", "several")):
        chosen = [p for p in points if (p.num_gpus > p.series.machine.gpus) == is_across]
        places = [list(SOURCES).index(point.series.source) for point in chosen]
        shifts = [0.12 if is_across else -0.12 for _ in chosen]
        heights = [place + shift for place, shift in zip(places, shifts, strict=True)]
        axes.plot([100 * point.error for point in chosen], heights, marker, alpha=0.6, label=label)
    axes.set_yticks(range(len(SOURCES)), list(SOURCES))
    axes.invert_yaxis()
    axes.set_xlabel("simulated over published throughput, difference in %")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def parser() -> argparse.ArgumentParser:
    return benchmark_parser(__doc__, __file__)


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(parser(), SMOKE, argv)
    folder = output_folder(arguments)
    points = all_points()
    sources = "\n".join(f"- {name}: {source}" for name, source in SOURCES.items())
    tables = [summary_table(points), spread_table(points), point_table(points), sources]
    draw(points, folder / "public_points.png")
    results = [
        {
            "source": SOURCES[point.series.source],
            "what": point.series.what,
            "network": point.series.model,
            "machine": point.series.machine.name,
            "gpus": point.num_gpus,
            "published": point.published,
            "predicted": point.predicted,
            "error": point.error,
            "added_ms": point.added_ms,
            "predicted_added_ms": point.predicted_added_ms,
        }
        for point in points
    ]
    write_report(folder, arguments, "Published throughputs, images/s", "\n\n".join(tables), results)


if __name__ == "__main__":
    main()
