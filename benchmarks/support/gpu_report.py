"""Tables and plot of gpu_check."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from support.bars import Bar, draw_bars
from support.gpu_parts import GLOBAL, LOCAL, SYNC
from support.report import markdown_table
from support.spread import quartiles, ratios

Results = Mapping[str, Mapping[str, Any]]  # part -> figures, problem, took_s


def table(results: Results) -> str:
    """Return what was measured so far: an overview, then a table for each part with figures."""
    overview = [[part, result["problem"] or "done", f"{result['took_s']:.0f}"] for part, result in results.items()]
    tables = [markdown_table(["part", "state", "s"], overview)]
    writers = {
        "tests": _tests,
        "batch_norm": _batch_norm,
        "resnet50": _strategies,
        "overlap": _overlap,
        "resnet20": _resnet20,
        "cifar10": _cifar10,
    }
    for part, result in results.items():
        if result["figures"]:
            tables.append(f"{part}:\n\n{writers[part](result['figures'])}")
    return "\n\n".join(tables)


def failed_tests(results: Results) -> int:
    """Return how many tests have failed."""
    figures = results.get("tests", {}).get("figures") or {}
    return sum(int(counts["failed"]) for counts in figures.values())


def _tests(figures: Any) -> str:
    kinds = ["passed", "failed", "skipped"]
    rows = [[engine, *(f"{counts[kind]}" for kind in kinds)] for engine, counts in figures.items()]
    return markdown_table(["engine of NCCL", *kinds], rows)


def _batch_norm(figures: Any) -> str:
    header = ["setting", "shape", f"{GLOBAL}, us", "its throughput over SyncBatchNorm's (quartiles)", "over local"]
    rows = []
    for setting, shapes in figures.items():
        for shape, times in shapes.items():
            ours = times.get(GLOBAL)
            if ours is None:
                rows.append([setting, shape, "needs a GPU", "", ""])
                continue
            sync = quartiles(ratios(times[SYNC], ours)).text() if SYNC in times else "needs a GPU"
            local = quartiles(ratios(times[LOCAL], ours)).text()
            rows.append([setting, shape, f"{1e6 * quartiles(ours).median:.0f}", sync, local])
    return markdown_table(header, rows)


def _strategies(figures: Any) -> str:
    header = ["ranks", "strategy", "images/s", "over DDP's (quartiles)"]
    rows = [
        [ranks, name, f"{quartiles(values).median:.1f}", quartiles(ratios(values, rates["DDP"])).text()]
        for ranks, rates in figures.items()
        for name, values in rates.items()
    ]
    return markdown_table(header, rows)


def _overlap(figures: Any) -> str:
    header = ["strategy", "share hidden under kernels", "copies and messages, ms", "kernels, ms", "number of copies"]
    rows = []
    for name, found in figures.items():
        share = "no activity of a GPU" if found["hidden_share"] is None else f"{found['hidden_share']:.0%}"
        times = [f"{found[kind]:.1f}" for kind in ("communication_ms", "computation_ms")]
        rows.append([name, share, *times, str(found["num_copies"])])
    return markdown_table(header, rows)


def _resnet20(figures: Any) -> str:
    return markdown_table(["precision", "images/s"], [[name, f"{rate:.0f}"] for name, rate in figures.items()])


def _cifar10(figures: Any) -> str:
    return markdown_table(["test accuracy", "s"], [[f"{figures['accuracy']:.4f}", f"{figures['took_s']:.0f}"]])


def draw(results: Results, path: Path) -> None:
    """Draw a panel of bars for each part that compares sides; nothing, if there is none yet."""
    panels: dict[str, list[Bar]] = {}
    for setting, shapes in (results.get("batch_norm", {}).get("figures") or {}).items():
        bars = [
            Bar(shape, quartiles(ratios(times[SYNC], times[GLOBAL])))
            for shape, times in shapes.items()
            if SYNC in times and GLOBAL in times
        ]
        if bars:
            panels[f"{setting}\nover SyncBatchNorm"] = bars
    for ranks, rates in (results.get("resnet50", {}).get("figures") or {}).items():
        panels[f"ResNet-50, {ranks}\nover DDP"] = [
            Bar(name, quartiles(ratios(values, rates["DDP"]))) for name, values in rates.items()
        ]
    if panels:
        axis = "throughput over that of the reference: median and quartiles"
        draw_bars(panels, path, title="One GPU", axis=axis, digits=2, reference=1.0, max_columns=3)
