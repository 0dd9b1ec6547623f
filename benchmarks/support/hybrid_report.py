"""Table and picture of benchmarks/hybrid.py. Results: rate -> side -> rounds, bytes, bound."""

from __future__ import annotations

from math import nan
from pathlib import Path
from statistics import median
from typing import Any

VARIABLE, FIXED = "hybrid c variable", "hybrid c"


def spread(ratios: list[float]) -> str:
    """Median, least and most."""
    return f"{median(ratios):.2f}x ({min(ratios):.2f}-{max(ratios):.2f})"


def ratios(of: dict[str, Any], over: dict[str, Any]) -> list[float]:
    """Throughput of one side over another's, round by round."""
    return [b["step_s"] / a["step_s"] for a, b in zip(of["rounds"], over["rounds"], strict=True)]


def communication_s(side: dict[str, Any]) -> list[float]:
    """Of each round, the part of a step in which computing does not go on; empty where that is not known."""
    return [turn["step_s"] - turn["alone_s"] for turn in side["rounds"] if turn["alone_s"] is not None]


def bound_s(side: dict[str, Any]) -> float | None:
    """None also where only the bytes' part of the bound is known, and not that of computing alone."""
    return side["bound_s"] if communication_s(side) else None


def table(results: dict[str, Any], num_samples: int) -> str:
    """Medians over the rounds, with the least and most of ratios. ``num_samples``: of a step, on all ranks."""
    lines = [
        "| rate | | ms a step | samples/s | over DDP's | communication, ms a step | of DDP's | computing alone, ms "
        "| MB sent: counted, on the card | bound, ms |",
        "|" + "---|" * 10,
    ]
    for rate, sides in results.items():
        ddp = sides.get("DDP")
        for name, side in sides.items():
            step_s = median(turn["step_s"] for turn in side["rounds"])
            waits = communication_s(side)
            cells = [f"{step_s * 1e3:.0f}", f"{num_samples / step_s:.0f}", spread(ratios(side, ddp)) if ddp else ""]
            if waits:
                parts = [own / other for own, other in zip(waits, communication_s(ddp), strict=True)] if ddp else []
                alone_s = median(turn["alone_s"] for turn in side["rounds"])
                cells += [f"{median(waits) * 1e3:.0f}", spread(parts) if parts else "", f"{alone_s * 1e3:.0f}"]
            else:
                cells += ["", "", ""]
            card = median(turn["card_bytes"] for turn in side["rounds"])
            cells += [
                f"{side['bytes'] / 1e6:.1f}, {card / 1e6:.1f}",
                f"{bound * 1e3:.0f}" if (bound := bound_s(side)) else "",
            ]
            lines.append(f"| {rate} | {name} | {' | '.join(cells)} |")
    if all(VARIABLE in sides and FIXED in sides for sides in results.values()):
        of_rates = ", ".join(f"{rate} {spread(ratios(s[VARIABLE], s[FIXED]))}" for rate, s in results.items())
        lines.append(f"\nThroughput of {VARIABLE} over {FIXED}: {of_rates}")
    return "\n".join(lines)


def picture(results: dict[str, Any], num_samples: int, path: Path, title: str) -> None:
    """Samples a second, a group of bars a rate, with least and most of the rounds; the bound as a line over each."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 5), layout="constrained")
    names = list(next(iter(results.values())))
    width = 0.8 / len(names)
    for index, name in enumerate(names):
        places = [group + (index - (len(names) - 1) / 2) * width for group in range(len(results))]
        rates = [[num_samples / turn["step_s"] for turn in sides[name]["rounds"]] for sides in results.values()]
        middle = [median(r) for r in rates]
        error = [[m - min(r) for m, r in zip(middle, rates, strict=True)],
                 [max(r) - m for m, r in zip(middle, rates, strict=True)]]  # fmt: skip
        axes.bar(places, middle, width * 0.92, yerr=error, capsize=2, label=name)
        bounds = [num_samples / (bound_s(sides[name]) or nan) for sides in results.values()]
        axes.hlines(bounds, [p - width / 2 for p in places], [p + width / 2 for p in places], "k", linewidth=1,
                    label="bound" if index == 0 else None)  # fmt: skip
    axes.set_xticks(range(len(results)), ["unlimited" if rate == "none" else rate for rate in results])
    axes.set(xlabel="rate of each host's link", ylabel="samples a second", title=title)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(path, dpi=120)
