"""Tables and picture of `agbn_accuracy`: means over seeds, and differences between runs with the same seed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from statistics import mean, stdev
from typing import Any, TypeAlias

# (global batch size, devices, phase, seed) -> results. Runs whose statistics are always global have one device.
Runs: TypeAlias = Mapping[Any, dict[str, Any]]

MEASURES = {
    "train": "training images, last epoch",
    "test": "held-out images, running statistics averaged over devices",
    "test_whole_var": "held-out images, running variance of the whole batches",
}
PAPER = {4: 2.1, 8: 4.4}  # gain in percentage points at a global batch of 8, section 5


def of_cell(done: Runs, batch_size: int, devices: int, phase: str, measure: str) -> dict[int, float]:
    """``measure`` by seed."""
    return {seed: line[measure] for (*cell, seed), line in done.items() if cell == [batch_size, devices, phase]}


def summary(values: Iterable[float]) -> dict[str, float]:
    """Mean, standard deviation and the mean's standard error; the latter two need two values."""
    values = list(values)
    spread = stdev(values) if len(values) > 1 else math.nan
    return {"mean": mean(values), "sd": spread, "se": spread / math.sqrt(len(values)), "seeds": len(values)}


def gain(ours: dict[int, float], base: dict[int, float]) -> dict[str, float] | None:
    """What ours has more than the base with the same seed: first weights, images, crops. None: no seed is in both."""
    both = ours.keys() & base.keys()
    return summary(ours[seed] - base[seed] for seed in both) if both else None


def figure_4(done: Runs, batch_sizes: list[int], devices_list: list[int]) -> list[dict[str, Any]]:
    """Print, as Markdown, and return accuracies and gains for each batch size and number of devices."""
    rows = []
    for measure, title in MEASURES.items():
        print(f"\naccuracy in % (sd over seeds), {title}; gain in points, +- its standard error\n")
        columns = [[f"local, {devices} devices", f"gain, {devices} devices"] for devices in devices_list]
        print_row(["global batch", "global", *chain(*columns)], is_head=True)
        for batch_size in batch_sizes:
            whole, cells = of_cell(done, batch_size, 1, "always", measure), []
            for devices in devices_list:
                local = of_cell(done, batch_size, devices, "never", measure)
                difference = gain(whole, local)
                cells += [show(local), show_gain(difference)]
                if difference is not None:
                    row = {"measure": measure, "batch_size": batch_size, "num_devices": devices}
                    rows.append({**row, "global": whole, "local": local, "gain": difference})
            print_row([str(batch_size), show(whole), *cells])
    return rows


def phases(done: Runs, batch_size: int, devices: int) -> list[dict[str, Any]]:
    """Print, as Markdown, and return for each ``global_phase`` the accuracy and the share of global steps."""
    rows = []
    print(f"\nbatch {batch_size} on {devices} devices, accuracy as above; gain over local statistics\n")
    print_row(["global_phase", "global steps", *chain(*((measure, "gain") for measure in MEASURES))], is_head=True)
    for phase in ("never", "after_converged", "until_converged", "always"):
        cell = (batch_size, 1 if phase == "always" else devices, phase)
        shares = of_cell(done, *cell, "global_share")
        if not shares:
            continue
        cells = []
        for measure in MEASURES:
            ours = of_cell(done, *cell, measure)
            difference = None if phase == "never" else gain(ours, of_cell(done, batch_size, devices, "never", measure))
            rows.append({"phase": phase, "measure": measure, "values": ours, "shares": shares, "gain": difference})
            cells += [show(ours), show_gain(difference)]
        print_row([phase, ", ".join(f"{share:.0%}" for share in sorted(set(shares.values()))), *cells])
    return rows


def print_row(cells: list[str], is_head: bool = False) -> None:
    print("| " + " | ".join(cells) + " |")
    if is_head:
        print("|---" * len(cells) + "|")


def show(values: dict[int, float]) -> str:
    """Mean and spread over the seeds."""
    if len(values) < 2:
        return "".join(f"{value:.1f}" for value in values.values())
    return "{mean:.1f} ({sd:.1f})".format(**summary(values.values()))


def show_gain(difference: dict[str, float] | None) -> str:
    """Mean and standard error."""
    if difference is None:
        return ""
    return "{mean:+.1f}".format(**difference) + (" +- {se:.1f}".format(**difference) if difference["seeds"] > 1 else "")


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """The paper's Figure 4: gain against global batch size, a line for each number of devices."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(10, 4))
    for measure in MEASURES:
        axes, style = panels[int(measure != "train")], ":" if measure == "test_whole_var" else "-"
        for index, devices in enumerate(sorted({row["num_devices"] for row in rows})):
            line = [row for row in rows if (row["measure"], row["num_devices"]) == (measure, devices)]
            means, errors = ([row["gain"][key] for row in line] for key in ("mean", "se"))
            label = f"{devices} devices" + (", variance of the whole batches" if style == ":" else "")
            sizes, color = [row["batch_size"] for row in line], f"C{index}"
            axes.errorbar(sizes, means, errors, marker="o", capsize=3, color=color, linestyle=style, label=label)
            if measure == "train" and devices in PAPER:
                axes.plot([8], [PAPER[devices]], "x", color=color, markersize=9, label=f"{devices} devices, paper")
    ticks = sorted({row["batch_size"] for row in rows})
    for axes, title in zip(panels, ("training images (the paper's measure)", "held-out images"), strict=True):
        axes.axhline(0, color="black", linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.set_xlabel("global batch size")
        axes.set_title(title)
        axes.legend()
    panels[0].set_ylabel("accuracy, global - local (points, standard error)")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
