"""Tables and plot of global_batch_norm_accuracy: means over seeds, and differences of runs with the same seed."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

from support.headless import pyplot
from support.report import markdown_table
from support.spread import summary

# (global batch size, devices, phase, seed) -> results. Runs whose statistics are always global have one device.
Runs: TypeAlias = Mapping[Any, dict[str, Any]]

MEASURES = {
    "train": "training images, last epoch",
    "test": "held-out images, running statistics averaged over devices",
    "test_whole_var": "held-out images, running variance of the whole batches",
}
PHASES = ("never", "after_converged", "until_converged", "always")
PAPER = {4: 2.1, 8: 4.4}  # gain in percentage points at a global batch of 8, section 5


def of_cell(done: Runs, batch_size: int, devices: int, phase: str, measure: str) -> dict[int, float]:
    """Return ``measure`` by seed."""
    return {seed: line[measure] for (*cell, seed), line in done.items() if cell == [batch_size, devices, phase]}


def gain(ours: dict[int, float], base: dict[int, float]) -> dict[str, float] | None:
    """Return what ours has more than the base with the same seed; None if no seed is in both.

    Runs with the same seed have first weights, images and crops in common, so the seed's own luck cancels.
    """
    both = ours.keys() & base.keys()
    return summary(ours[seed] - base[seed] for seed in both) if both else None


def figure_4(done: Runs, batch_sizes: list[int], devices_list: list[int]) -> list[dict[str, Any]]:
    """Return accuracies and gains for each measure, batch size and number of devices."""
    rows = []
    for measure in MEASURES:
        for batch_size in batch_sizes:
            whole = of_cell(done, batch_size, 1, "always", measure)
            for devices in devices_list:
                local = of_cell(done, batch_size, devices, "never", measure)
                difference = gain(whole, local)
                if difference is not None:
                    row = {"measure": measure, "batch_size": batch_size, "num_devices": devices}
                    rows.append({**row, "global": whole, "local": local, "gain": difference})
    return rows


def figure_4_table(done: Runs, batch_sizes: list[int], devices_list: list[int]) -> str:
    """Return the same as Markdown, a table for each measure."""
    tables = []
    for measure, title in MEASURES.items():
        columns = [[f"local, {devices} devices", f"gain, {devices} devices"] for devices in devices_list]
        rows = []
        for batch_size in batch_sizes:
            whole = of_cell(done, batch_size, 1, "always", measure)
            cells = [str(batch_size), show(whole)]
            for devices in devices_list:
                local = of_cell(done, batch_size, devices, "never", measure)
                cells += [show(local), show_gain(gain(whole, local))]
            rows.append(cells)
        head = f"Accuracy in % (standard deviation over seeds), {title}; gain in points, +- its standard error:"
        tables.append(f"{head}\n\n{markdown_table(['global batch', 'global', *chain(*columns)], rows)}")
    return "\n\n".join(tables)


def phases(done: Runs, batch_size: int, devices: int) -> list[dict[str, Any]]:
    """Return the accuracy, the share of global epochs and the gain over local statistics for each ``global_phase``."""
    rows = []
    for phase in PHASES:
        cell = (batch_size, 1 if phase == "always" else devices, phase)
        shares = of_cell(done, *cell, "global_share")
        if not shares:
            continue
        for measure in MEASURES:
            ours = of_cell(done, *cell, measure)
            local = of_cell(done, batch_size, devices, "never", measure)
            difference = None if phase == "never" else gain(ours, local)
            rows.append({"phase": phase, "measure": measure, "values": ours, "shares": shares, "gain": difference})
    return rows


def phases_table(done: Runs, batch_size: int, devices: int) -> str:
    """Return the same as Markdown, a row for each phase."""
    rows: dict[str, list[str]] = {}
    for row in phases(done, batch_size, devices):
        shares = ", ".join(f"{share:.0%}" for share in sorted(set(row["shares"].values())))
        cells = rows.setdefault(row["phase"], [row["phase"], shares])
        cells += [show(row["values"]), show_gain(row["gain"])]
    header = ["global_phase", "global epochs", *chain(*((measure, "gain") for measure in MEASURES))]
    head = f"Batch {batch_size} on {devices} devices, accuracy as above; gain over local statistics:"
    return f"{head}\n\n{markdown_table(header, list(rows.values()))}"


def show(values: dict[int, float]) -> str:
    """Return mean and standard deviation over the seeds."""
    if len(values) < 2:
        return "".join(f"{value:.1f}" for value in values.values())
    return "{mean:.1f} ({sd:.1f})".format(**summary(values.values()))


def show_gain(difference: dict[str, float] | None) -> str:
    """Return mean and standard error."""
    if difference is None:
        return ""
    return "{mean:+.1f}".format(**difference) + (" +- {se:.1f}".format(**difference) if difference["seeds"] > 1 else "")


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw the paper's Figure 4: gain against global batch size, a line for each number of devices."""
    figure, panels = pyplot().subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    numbers = sorted({row["num_devices"] for row in rows})
    for measure, devices in ((measure, devices) for measure in MEASURES for devices in numbers):
        found = [row for row in rows if (row["measure"], row["num_devices"]) == (measure, devices)]
        whole_var = measure == "test_whole_var"
        # Side by side: else the error bars of one line hide another's.
        shift = numbers.index(devices) - (len(numbers) - 1) / 2 + 0.5 * whole_var
        sizes = [row["batch_size"] * 2 ** (0.1 * shift) for row in found]
        panels[int(measure != "train")].errorbar(
            sizes,
            [row["gain"]["mean"] for row in found],
            [row["gain"]["se"] for row in found],
            marker="D" if whole_var else "o",
            markersize=5,
            capsize=3,
            color=f"C{numbers.index(devices)}",
            linestyle=":" if whole_var else "-",
            label=f"{devices} devices" + (", variance of the whole batches" if whole_var else ""),
        )
    for devices in numbers:
        if devices in PAPER:
            label = f"{devices} devices, paper"
            panels[0].plot([8], [PAPER[devices]], "x", color=f"C{numbers.index(devices)}", markersize=9, label=label)
    ticks = sorted({row["batch_size"] for row in rows})
    for axes, title in zip(panels, ("training images (the paper's measure)", "held-out images"), strict=True):
        axes.axhline(0, color="black", linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.set(xlabel="global batch size", title=title)
        axes.legend()
    panels[0].set_ylabel("gain of global over local statistics\n(points, +- standard error over the seeds)")
    figure.savefig(path, dpi=120)
    pyplot().close(figure)
