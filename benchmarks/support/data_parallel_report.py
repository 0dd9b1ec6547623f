"""Tables and plot of `layered_sgd_throughput`: times beside their bound, and memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.bars import Bar, draw_bars
from support.data_parallel_methods import REFERENCE, Method, all_reduce_s, inter_host_bytes
from support.emulated_hosts import bytes_per_s, host_rates
from support.host_jobs import Job
from support.report import markdown_table
from support.spread import min_max, ratios

RateResult = dict[str, Any]  # step_s and difference: method -> one value a round; shapes: of the parameters


@dataclass(frozen=True)
class Measured:
    """What was measured on one network.

    Attributes:
        job: the hosts and their links.
        result: what rank 0 returned.
        local_s: what a step takes without communication (s): loading, and compute as far as it is known.
    """

    job: Job
    result: RateResult
    local_s: float

    def bound_s(self, method: Method) -> float:
        """Return the least time that a step can take: without communication, or the bytes over the hosts' links.

        A delay is left out: it can be hidden, as communication is.
        """
        rates = [bytes_per_s(rate) for rate in host_rates(self.job.num_hosts, self.job.rate, self.job.slow_host)]
        return max(self.local_s, all_reduce_s(method.payload_bytes(self.result["shapes"]), rates))


def rate_table(measured: Measured, rows: Mapping[str, Method]) -> str:
    """Return the table of one network: medians, and minimum and maximum of the rounds' ratios."""
    result = measured.result
    header = [
        "method", "exact", "difference to DDP", "ms a step", f"throughput over {REFERENCE}'s (minimum-maximum)",
        "MB across a host's link", "bound, ms", "time over bound",
    ]  # fmt: skip
    lines = []
    for name, method in rows.items():
        bound = measured.bound_s(method)
        step_s = result["step_s"][name]
        lines.append([
            name,
            f"no: {method.departs}" if method.departs else "yes",
            f"{max(result['difference'][name]):.0e}" if any(result["difference"][name]) else "0",
            f"{min_max(step_s).median * 1e3:.0f}",
            min_max(ratios(result["step_s"][REFERENCE], step_s)).text(),
            f"{inter_host_bytes(method.payload_bytes(result['shapes']), measured.job.num_hosts) / 1e6:.2f}",
            f"{bound * 1e3:.0f}",
            f"{min_max(step_s).median / bound:.2f}",
        ])  # fmt: skip
    return f"{measured.job.network}:\n\n{markdown_table(header, lines)}"


def draw_step_times(measured: Mapping[str, Measured], rows: Mapping[str, Method], path: Path, title: str) -> None:
    """Draw a panel for each network, a bar for each method; hatched are the methods that are not exact.

    Args:
        measured: by the name of the network.
        rows: the methods.
        path: of the PNG file.
        title: of the plot.
    """
    panels = {}
    for network, of_network in measured.items():
        panels[network] = [
            Bar(
                name,
                min_max(1e3 * seconds for seconds in of_network.result["step_s"][name]),
                1e3 * of_network.bound_s(method),
                hatched=bool(method.departs),
            )
            for name, method in rows.items()
        ]
    draw_bars(
        panels,
        path,
        title=title,
        axis="time of a step: median, minimum and maximum of the rounds",
        unit="ms",
        bound_label="bound: compute + loading, or bytes over rate",
        hatched_label="not exact",
        max_columns=3,
    )


def memory_table(peak_bytes: Mapping[str, list[int]]) -> str:
    """Return the table of peaks.

    Args:
        peak_bytes: method -> one value for each rank.
    """
    header = [
        "method",
        "peak above the state before `fit`, MB: largest of the ranks",
        f"more than {REFERENCE}",
        "ranks",
    ]
    reference = max(peak_bytes[REFERENCE])
    lines = []
    for name, peaks in peak_bytes.items():
        more = f"{(max(peaks) - reference) / 1e6:+.1f}"
        lines.append([name, f"{max(peaks) / 1e6:.1f}", more, ", ".join(f"{peak / 1e6:.1f}" for peak in peaks)])
    return markdown_table(header, lines)
