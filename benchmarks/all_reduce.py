"""Time of ring all-reduce, against star and the backend's own, on hosts whose links are limited to a rate.

    python benchmarks/all_reduce.py                                        # 2, 4, 6 and 8 hosts; 0.25 to 32 MB
    python benchmarks/all_reduce.py --hosts 2 4 --megabytes 1 --rounds 2   # a quick look

The hosts are network namespaces of this machine (benchmarks/support/emulated_hosts.py says what that needs), one rank
each, over gloo. The methods run in turn, round after round; a ratio compares two methods of one round, and its spread
is the minimum and the maximum over the rounds. A time is that of the slowest rank, from a barrier on. Bound: the bytes
that the busiest rank sends (`lightning_dp.planner.traffic`) over the rate; the headers of TCP and Ethernet alone add
4.5 %. Writes results.json, table.md and time.png.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from support.bars import Bar, draw_bars
from support.command_line import benchmark_parser, output_folder, parse
from support.emulated_hosts import bytes_per_s, rate_name
from support.host_jobs import Job, add_worker_option, measure_on_hosts, run_benchmark
from support.report import markdown_table, write_report
from support.spread import min_max, ratios, turn_order

from lightning_dp.collectives import ring_all_reduce, star_all_reduce
from lightning_dp.planner.traffic import ring_cost, star_cost

METHODS: dict[str, Callable[[torch.Tensor], Any]] = {
    "ring (ours)": ring_all_reduce,
    "gloo's own": dist.all_reduce,
    "ring, bfloat16 on the wire": lambda tensor: ring_all_reduce(tensor, wire_dtype=torch.bfloat16),
    "star": star_all_reduce,
}
RING, GLOO, RING_BF16, STAR = METHODS
LARGE_BYTES = 16 * 2**20
SMOKE = {"hosts": [2], "megabytes": [0.25], "rounds": 2, "rate": "1gbit"}

Record = dict[str, Any]  # of one number of hosts, size and method


def parser() -> argparse.ArgumentParser:
    options = benchmark_parser(__doc__, __file__)
    options.add_argument("--hosts", type=int, nargs="+", default=[2, 4, 6, 8])
    options.add_argument("--megabytes", type=float, nargs="+", default=[0.25, 1, 4, 16, 32], help="of 2**20 bytes")
    options.add_argument("--rate", default="200mbit", help="of each host's link; not none, for there must be a bound")
    options.add_argument("--rounds", type=int, default=5)
    add_worker_option(options)
    return options


def worker(job: Job) -> dict[str, dict[str, list[float]]]:
    """One rank: every size and method in turn; return the seconds."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    total = sum(range(1, job.world_size + 1))
    seconds: dict[str, dict[str, list[float]]] = {}
    for megabytes in job.options.megabytes:
        tensor = torch.empty(int(megabytes * 2**18))
        times: dict[str, list[float]] = {method: [] for method in METHODS}
        for turn in range(job.options.rounds + 1):
            for method in turn_order(METHODS, turn):
                tensor.fill_(rank + 1)
                dist.barrier()
                begin = time.perf_counter()
                METHODS[method](tensor)
                slowest = torch.tensor(time.perf_counter() - begin)
                assert bool((tensor == total).all()), f"{method} gave a wrong sum"
                dist.all_reduce(slowest, dist.ReduceOp.MAX)
                if turn > 0:  # the first round warms up
                    times[method].append(float(slowest))
        seconds[str(megabytes)] = times
    dist.barrier()
    dist.destroy_process_group()
    return seconds


def measure(arguments: argparse.Namespace, num_hosts: int, folder: Path) -> list[Record]:
    """Run `worker` on ``num_hosts`` hosts; return a record for each size and method."""
    seconds = measure_on_hosts(__file__, Job(arguments, num_hosts, 1, arguments.rate), folder)[0]
    rate = bytes_per_s(arguments.rate)
    records = []
    for megabytes, times in seconds.items():
        elements = int(float(megabytes) * 2**18)
        ring_bound = ring_cost(elements, 4, num_hosts).time_bound_s(rate)
        bounds = {
            RING: ring_bound,
            GLOO: ring_bound,
            RING_BF16: ring_bound / 2,
            STAR: star_cost(elements, 4, num_hosts, is_reducer=True).time_bound_s(rate),
        }
        for method, values in times.items():
            size = {"num_hosts": num_hosts, "num_bytes": 4 * elements}
            records.append({**size, "method": method, "bound_s": bounds[method], "seconds": values})
    return records


def find(records: Sequence[Record], num_hosts: int, num_bytes: int, method: str) -> Record:
    """Return the record of one cell."""
    wanted = (num_hosts, num_bytes, method)
    return next(r for r in records if (r["num_hosts"], r["num_bytes"], r["method"]) == wanted)


def time_table(records: Sequence[Record]) -> str:
    """Return medians in milliseconds, and ratios of the rounds with minimum and maximum."""
    header = [
        "hosts", "MB", "bound of a ring, ms", "ring, ms", "ring / bound", "gloo, ms", "gloo / ring",
        "ring bf16, ms", "ring bf16 / ring", "star, ms", "star / ring",
    ]  # fmt: skip
    rows = []
    for ring in (record for record in records if record["method"] == RING):
        bound_s = ring["bound_s"]
        cells = [str(ring["num_hosts"]), f"{ring['num_bytes'] / 2**20:g}", f"{bound_s * 1e3:.0f}"]
        cells += [f"{median(ring['seconds']) * 1e3:.0f}", min_max(s / bound_s for s in ring["seconds"]).text()]
        for method in (GLOO, RING_BF16, STAR):
            other = find(records, ring["num_hosts"], ring["num_bytes"], method)
            cells += [
                f"{median(other['seconds']) * 1e3:.0f}",
                min_max(ratios(other["seconds"], ring["seconds"])).text(),
            ]
        rows.append(cells)
    return markdown_table(header, rows)


def laws(records: Sequence[Record]) -> str:
    """Compare the figures with the laws that they should follow, at the largest size."""
    num_bytes = max(record["num_bytes"] for record in records)
    hosts = sorted({record["num_hosts"] for record in records})
    rings = [median(find(records, n, num_bytes, RING)["seconds"]) / (2 * (n - 1) / n) for n in hosts]
    stars = [median(find(records, n, num_bytes, STAR)["seconds"]) / (n - 1) for n in hosts]
    large = [
        median(record["seconds"]) / record["bound_s"]
        for record in records
        if record["method"] == RING and record["num_bytes"] >= LARGE_BYTES
    ]
    size = f"{num_bytes / 2**20:g} MB"
    lines = [
        f"Ring, time over 2(N-1)/N at {size}, from {hosts[0]} to {hosts[-1]} hosts: x {rings[-1] / rings[0]:.3f} "
        f"(greatest {max(rings) / rings[0]:.3f}; law: 1, aim: at most 1.15).",
        f"Star, time over N-1 at {size}: x {stars[-1] / stars[0]:.3f} (law: 1).",
    ]
    if large:
        lines.append(f"Ring over its bound at 16 MB and more: at most {max(large):.3f} (aim: 1.15).")
    return "\n".join(lines)


def draw(records: Sequence[Record], rate: str, path: Path) -> None:
    """Draw a panel for each number of hosts at the largest size, and one for each size at the most hosts."""
    hosts = sorted({record["num_hosts"] for record in records})
    sizes = sorted({record["num_bytes"] for record in records})
    cells = [(num_hosts, sizes[-1]) for num_hosts in hosts] + [(hosts[-1], size) for size in sizes[:-1]]
    panels = {}
    for num_hosts, size in cells:
        found = [find(records, num_hosts, size, method) for method in METHODS]
        panels[f"{num_hosts} hosts, {size / 2**20:g} MB"] = [
            Bar(record["method"], min_max(1e3 * s for s in record["seconds"]), 1e3 * record["bound_s"])
            for record in found
        ]
    draw_bars(
        panels,
        path,
        title=f"All-reduce of float32, {rate_name(rate)} a host in each direction",
        axis="time: median, minimum and maximum of the rounds",
        unit="ms",
        bound_label="bound: bytes of the busiest rank over rate",
        max_columns=4,
    )


def report(arguments: argparse.Namespace) -> None:
    """Measure, and write the table and the plot."""
    folder = output_folder(arguments)
    records: list[Record] = []
    for num_hosts in sorted(arguments.hosts):
        records += measure(arguments, num_hosts, folder)
        print(time_table([record for record in records if record["num_hosts"] == num_hosts]), flush=True)
    title = f"All-reduce, {rate_name(arguments.rate)} a host in each direction, median of {arguments.rounds}"
    write_report(folder, arguments, title, f"{time_table(records)}\n\n{laws(records)}", records)
    draw(records, arguments.rate, folder / "time.png")


def main(argv: Sequence[str] | None = None) -> None:
    run_benchmark(parse(parser(), SMOKE, argv), worker, report)


if __name__ == "__main__":
    main()
