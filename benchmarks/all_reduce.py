"""Ring all-reduce against star and the backend's own, on hosts whose links are limited to a rate.

    python benchmarks/collectives.py                                        # about 12 minutes
    python benchmarks/collectives.py --hosts 2 4 --megabytes 1 --repeats 2  # a quick look

The hosts are network namespaces of this machine (see benchmarks/hosts.py for what that needs), one rank each, over
gloo. The methods take turns in each repetition. A time is that of the slowest rank, from a barrier on. Beside it
stands the bandwidth bound: the bytes that the busiest rank sends (`lightning_dp.collectives.cost`) over the rate; TCP
and Ethernet headers alone cost 4.5 % on top. Writes a table, results.json and collectives.png to
runs/benchmarks/collectives.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.emulated_hosts import Hosts, bytes_per_s, worker_or_hosts
from support.report import describe_machine, output_folder

from lightning_dp.collectives import ring_all_reduce, star_all_reduce
from lightning_dp.collectives.cost import ring_cost, star_cost

METHODS: dict[str, Callable[[torch.Tensor], Any]] = {
    "ring": ring_all_reduce,
    "ring16": lambda tensor: ring_all_reduce(tensor, wire_dtype=torch.bfloat16),
    "native": dist.all_reduce,
    "star": star_all_reduce,
}
LABELS = {"ring": "ring (ours)", "ring16": "ring, bfloat16 on the wire", "native": "gloo's own", "star": "star"}
LARGE_BYTES = 16 * 2**20


def worker(arguments: argparse.Namespace) -> None:
    """One rank on one host: every size and method in turn; rank 0 writes the seconds."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    seconds: dict[str, dict[str, list[float]]] = {}
    for megabytes in arguments.megabytes:
        tensor = torch.empty(int(megabytes * 2**18))
        times: dict[str, list[float]] = {method: [] for method in METHODS}
        for repeat in range(-1, arguments.repeats):  # the first is a warm-up
            order = list(METHODS) if repeat % 2 else list(METHODS)[::-1]
            for method in order:
                tensor.fill_(rank + 1)
                dist.barrier()
                begin = time.perf_counter()
                METHODS[method](tensor)
                took = torch.tensor(time.perf_counter() - begin)
                assert bool((tensor == world_size * (world_size + 1) / 2).all()), f"{method} gave a wrong sum"
                dist.all_reduce(took, dist.ReduceOp.MAX)
                if repeat >= 0:
                    times[method].append(float(took))
        seconds[str(megabytes)] = times
    if rank == 0:
        arguments.worker.write_text(json.dumps(seconds))
    dist.barrier()
    dist.destroy_process_group()


def measure(num_hosts: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Run `worker` on ``num_hosts`` hosts; a record for each size and method."""
    with tempfile.TemporaryDirectory() as folder, Hosts(num_hosts, arguments.rate) as hosts:
        result = Path(folder, "seconds.json")
        command = [sys.executable, str(Path(__file__).resolve()), "--worker", str(result)]
        command += ["--repeats", str(arguments.repeats), "--megabytes", *map(str, arguments.megabytes)]
        ranks = [["env", f"RANK={rank}", f"WORLD_SIZE={num_hosts}", *command] for rank in range(num_hosts)]
        rendezvous = {"MASTER_ADDR": hosts.address(0), "MASTER_PORT": "29500"}
        hosts.run(ranks, environment=rendezvous, timeout_s=3600.0)
        seconds = json.loads(result.read_text())
    rate = bytes_per_s(arguments.rate)
    records = []
    for megabytes, times in seconds.items():
        elements = int(float(megabytes) * 2**18)
        bounds = {"star": star_cost(elements, 4, num_hosts, is_reducer=True).time_bound_s(rate)}
        bounds["ring"] = bounds["native"] = ring_cost(elements, 4, num_hosts).time_bound_s(rate)
        bounds["ring16"] = bounds["ring"] / 2
        for method, values in times.items():
            records.append(
                {"num_hosts": num_hosts, "num_bytes": 4 * elements, "method": method, "bound_s": bounds[method]}
                | {"seconds": values, "median_s": statistics.median(values)}
            )
    return records


def find(records: list[dict[str, Any]], num_hosts: int, num_bytes: int, method: str) -> dict[str, Any]:
    wanted = (num_hosts, num_bytes, method)
    return next(r for r in records if (r["num_hosts"], r["num_bytes"], r["method"]) == wanted)


def table(records: list[dict[str, Any]]) -> list[str]:
    """Markdown: medians in milliseconds, and ratios of the repetitions' pairs with their least and greatest."""
    lines = [
        "| hosts | MB | bound ms | ring ms | ring / bound | native ms | native / ring "
        "| bf16 wire ms | bf16 wire / ring | star ms | star / ring |",
        "|" + "---|" * 11,
    ]
    for ring in (r for r in records if r["method"] == "ring"):
        others = [find(records, ring["num_hosts"], ring["num_bytes"], name) for name in ("native", "ring16", "star")]
        over_bound = [seconds / ring["bound_s"] for seconds in ring["seconds"]]
        cells = [str(ring["num_hosts"]), f"{ring['num_bytes'] / 2**20:g}", f"{ring['bound_s'] * 1e3:.0f}"]
        cells += [f"{ring['median_s'] * 1e3:.0f}", spread(over_bound)]
        for other in others:
            ratios = [theirs / ours for theirs, ours in zip(other["seconds"], ring["seconds"], strict=True)]
            cells += [f"{other['median_s'] * 1e3:.0f}", spread(ratios)]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def claims(records: list[dict[str, Any]]) -> list[str]:
    """Hold the figures against the laws, at the largest size."""
    num_bytes = max(r["num_bytes"] for r in records)
    hosts = sorted({r["num_hosts"] for r in records})
    rings = [find(records, n, num_bytes, "ring")["median_s"] / (2 * (n - 1) / n) for n in hosts]
    stars = [find(records, n, num_bytes, "star")["median_s"] / (n - 1) for n in hosts]
    large = [r["median_s"] / r["bound_s"] for r in records if r["method"] == "ring" and r["num_bytes"] >= LARGE_BYTES]
    size = f"{num_bytes / 2**20:g} MB"
    lines = [
        f"ring time over 2(N-1)/N, at {size}, from {hosts[0]} to {hosts[-1]} hosts: x {rings[-1] / rings[0]:.3f} "
        f"(greatest {max(rings) / rings[0]:.3f}; law: 1, aim: at most 1.15)",
        f"star time over N-1, at {size}: x {stars[-1] / stars[0]:.3f} (law: 1, it grows linearly)",
    ]
    if large:
        lines.append(f"ring over its bandwidth bound, 16 MB and more: at most {max(large):.3f} (aim: 1.15)")
    return lines


def picture(records: list[dict[str, Any]], rate: str, path: Path) -> None:
    """Time against the number of hosts at the largest size, and time over bound against size at the most hosts."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    hosts, sizes = sorted({r["num_hosts"] for r in records}), sorted({r["num_bytes"] for r in records})
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2))
    for color, method in zip(("tab:blue", "tab:cyan", "tab:gray", "tab:red"), METHODS, strict=True):
        at_hosts = [find(records, n, sizes[-1], method) for n in hosts]
        at_sizes = [find(records, hosts[-1], size, method) for size in sizes]
        errors = [
            [r["median_s"] - min(r["seconds"]) for r in at_hosts],
            [max(r["seconds"]) - r["median_s"] for r in at_hosts],
        ]
        medians = [r["median_s"] for r in at_hosts]
        left.errorbar(hosts, medians, yerr=errors, marker="o", capsize=3, color=color, label=LABELS[method])
        right.plot(
            [size / 2**20 for size in sizes],
            [r["median_s"] / r["bound_s"] for r in at_sizes],
            marker="o",
            color=color,
            label=LABELS[method],
        )
        if method in ("ring", "star"):
            left.plot(hosts, [r["bound_s"] for r in at_hosts], ":", color=color, label=f"bound of the {method}")
    left.set(xlabel="hosts", ylabel="seconds", xticks=hosts, ylim=(0, None), title=f"{sizes[-1] / 2**20:g} MB")
    right.set(xlabel="MB", ylabel="time / bandwidth bound", xscale="log", ylim=(0.9, None), title=f"{hosts[-1]} hosts")
    right.axhline(1.0, color="black", linewidth=0.8, linestyle=":")
    left.legend()
    right.legend()
    figure.suptitle(f"All-reduce of float32, {rate} a host in each direction")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def measure_and_report(arguments: argparse.Namespace) -> None:
    """Measure on the hosts, and write tables and pictures."""
    records: list[dict[str, Any]] = []
    print(f"{describe_machine()}; {arguments.rate} a host in each direction; load {os.getloadavg()[0]:.1f}", flush=True)
    for num_hosts in sorted(arguments.hosts):
        records += measure(num_hosts, arguments)
        print("\n".join(table([r for r in records if r["num_hosts"] == num_hosts])), flush=True)
    lines = [*table(records), "", *claims(records)]
    folder = output_folder("collectives")
    (folder / "table.md").write_text("\n".join(lines) + "\n")
    summary = {"machine": describe_machine(), "rate": arguments.rate, "results": records}
    (folder / "results.json").write_text(json.dumps(summary, indent=1))
    picture(records, arguments.rate, folder / "collectives.png")
    print("\n".join(["", *lines, "", f"written to {folder}"]))


def main() -> None:
    parser = argparse.ArgumentParser(description="Ring, star and native all-reduce on rate-limited hosts")
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4, 6, 8])
    parser.add_argument("--megabytes", type=float, nargs="+", default=[0.25, 1, 4, 16, 32], help="of 2**20 bytes")
    parser.add_argument("--rate", default="200mbit", help="of each host in each direction")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    worker_or_hosts(arguments, worker, measure_and_report)


if __name__ == "__main__":
    main()
