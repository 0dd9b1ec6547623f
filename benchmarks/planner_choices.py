"""Does the planner choose well? Its choices and step times in twenty cells, against a sweep of all methods.

    python benchmarks/planner_choices.py                        # 20 cells and the batch sizes
    python benchmarks/planner_choices.py --list                 # the cells, and how long each takes (computed)
    python benchmarks/planner_choices.py --cells head-4x1-300mbit even-2x2-1gbit --parts cells
    python benchmarks/planner_choices.py --parts batches        # the batch sizes only

A cell is a model, hosts and the rate of their links: 100 Mbit/s to 10 Gbit/s; 2x2, 4x1, 4x2 and 8x1 hosts x ranks;
three models of 10 to 12 MB. In each one DDP trains with `Diagnose`, as a user would: it times the parts of a step,
probes the network between the ranks, and chooses a method. Nothing is fitted on a cell. Then every method trains in
turn, round after round, in the same processes: the sweep, which is the oracle. A choice is compared with the fastest
of the methods that the planner may choose (exact ones that the recipes have), and each predicted step time with the
measured one.

The hosts are network namespaces of this machine; benchmarks/support/emulated_hosts.py says what that needs. Compute is
emulated: the rank sleeps, as one whose device is at work, so that few cores can carry eight ranks. What remains is the
processor time of sums, copies and the optimizer, which the ranks share: it makes the steps of all methods longer, those
of int8 and PowerSGD most. The planner sees of it what DDP's profile and its probes show. So errors here are
larger than on machines of their own, most of all with eight ranks and at high rates.

Each cell's result is written at once, to cells/NAME.json; a rerun measures what is missing, and what was measured with
other options. `--list` says how long it takes.

Batch sizes: ResNet-20 on images of 32x32, one process with one thread, real compute. The planner chooses among a few
sizes, with and without recomputation, within a bound of memory, as `plan_batch_size` does. The sweep measures images
per second of all that fit, in turn, and by how much the memory of a process grows that computes as planned. Writes
results.json, table.md, choices.png and batch_sizes.png.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from support.bars import Bar, draw_bars
from support.command_line import benchmark_parser, output_folder, parse
from support.data_parallel_methods import Method, method_trainer
from support.emulated_compute import Timing, slow_loader
from support.host_jobs import Job, add_worker_option, measure_on_hosts, run_benchmark
from support.planner_batches import batch_table, compare_batch_sizes
from support.planner_cells import Cell, CellModule, all_cells, cell_methods, cell_of, estimated_s
from support.planner_report import cell_table, draw_cells
from support.report import write_report
from support.spread import min_max, turn_order
from support.training import StepClock, quiet

from lightning_dp.planner import Diagnose, make_diagnosis

WARM_UP = 4  # so that the measured steps begin with a new window of accumulated batches
CELLS, BATCHES = "cells", "batches"
# What a result depends on. A rerun with other values measures again.
SETTINGS = ("steps", "rounds", "load_ms", "forward_ms", "backward_ms")
SMOKE = {
    "cells": ["head-2x1-1gbit"], "steps": 4, "rounds": 1, "load_ms": 1.0, "forward_ms": 1.0, "backward_ms": 1.0,
    "batch_sizes": [2, 4], "depth": 8, "repeats": 1, "batch_rounds": 1,
}  # fmt: skip


def parser() -> argparse.ArgumentParser:
    options = benchmark_parser(__doc__, __file__)
    options.add_argument("--cells", nargs="+", default=[cell.name for cell in all_cells()], metavar="NAME")
    options.add_argument("--parts", nargs="+", choices=[CELLS, BATCHES], default=[CELLS, BATCHES])
    options.add_argument("--list", action="store_true", help="print the cells and their times (computed), and end")
    # DDP that accumulates batches updates in every fourth step.
    options.add_argument("--steps", type=int, default=8, help="measured steps of a run; a multiple of 4")
    options.add_argument("--rounds", type=int, default=2)
    options.add_argument("--load-ms", type=float, default=100.0)
    options.add_argument("--forward-ms", type=float, default=50.0)
    options.add_argument("--backward-ms", type=float, default=100.0)
    options.add_argument("--batch-sizes", type=int, nargs="+", default=[8, 16, 32, 64, 128])
    options.add_argument("--depth", type=int, default=20, help="of the ResNet whose batch size is chosen")
    options.add_argument("--memory-mb", type=float, default=400.0, help="of a training step, without the optimizer")
    options.add_argument("--repeats", type=int, default=3, help="timed steps of each batch size, for the planner")
    options.add_argument("--batch-rounds", type=int, default=5, help="of the sweep over batch sizes")
    add_worker_option(options)
    return options


def timing_of(options: argparse.Namespace) -> Timing:
    return Timing(options.load_ms / 1e3, options.forward_ms / 1e3, options.backward_ms / 1e3)


def fit(job: Job, cell: Cell, method: Method, num_steps: int, callback: Any) -> None:
    """Train once, on this rank."""
    trainer = method_trainer(method, cell.num_hosts, cell.per_host, num_steps, callback)
    timing = timing_of(job.options)
    trainer.fit(CellModule(cell.model, timing), slow_loader(num_steps, job.world_size, "emulated", timing))


def worker(job: Job) -> dict[str, Any]:
    """One rank: diagnose DDP, then train with every method in turn."""
    quiet()
    cell = cell_of(job.options.cell)
    rows = cell_methods(cell)
    num_steps = job.options.steps + WARM_UP
    start_s = time.perf_counter()
    # No plan of recomputation: emulated compute keeps nothing.
    diagnose = Diagnose(num_steps=job.options.steps, stop=True, memonger=False)
    fit(job, cell, rows["ddp"], num_steps, diagnose)
    measured = diagnose.diagnosis
    assert measured is not None
    assert measured.network is not None
    # The plan may also propose worker processes. The sweep trains without them.
    found = make_diagnosis(replace(measured.profile, num_workers=None), measured.network, is_probed=True)
    assert found.best is not None
    took_s = time.perf_counter() - start_s
    step_s: dict[str, list[float]] = {name: [] for name in rows}
    for turn in range(job.options.rounds):
        for name in turn_order(rows, turn):
            clock = StepClock(WARM_UP)
            fit(job, cell, rows[name], num_steps, clock)
            step_s[name].append(clock.step_s)
            if dist.get_rank() == 0:
                print(f"  {cell.name:>20}  {name:28} {clock.step_s * 1e3:7.1f} ms a step", flush=True)
    return {
        "chosen": found.best.method,
        "predicted_s": {p.method: p.time.step_s for p in found.predictions},
        "step_s": step_s,
        "profile_s": found.profile.parts(),
        "inter": vars(measured.network.inter),
        "intra": vars(measured.network.intra),
        "overhead_s": measured.network.overhead_s,
        "direct_bytes_per_s": measured.network.direct_bytes_per_s,
        "diagnosis_s": took_s,
    }


def measure_cell(arguments: argparse.Namespace, cell: Cell, folder: Path) -> dict[str, Any]:
    """Return the result of a cell: that of an earlier run with the same settings, or measured now."""
    path = folder / "cells" / f"{cell.name}.json"
    settings = {name: getattr(arguments, name) for name in SETTINGS}
    if path.exists():
        before: dict[str, Any] = json.loads(path.read_text())
        if before["settings"] == settings:
            print(f"{cell.name}: measured before, {path}", flush=True)
            return before
    options = argparse.Namespace(**{**vars(arguments), "cell": cell.name})
    job = Job(options, cell.num_hosts, cell.per_host, cell.rate)
    start_s = time.monotonic()
    logs = folder / "logs"
    logs.mkdir(exist_ok=True)
    result = measure_on_hosts(__file__, job, logs)[0]
    load_average = Path("/proc/loadavg").read_text().split()[0]
    result = {**result, "settings": settings, "took_s": time.monotonic() - start_s, "load_average_at_end": load_average}
    path.parent.mkdir(exist_ok=True)
    # Renamed when it is whole: an interrupted run leaves no half of a file.
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps(result, indent=1))
    partial.replace(path)
    return result


def times_of(arguments: argparse.Namespace) -> dict[str, float]:
    """Return about how long each cell takes (s)."""
    num_steps = arguments.steps + WARM_UP
    timing = timing_of(arguments)
    return {name: estimated_s(cell_of(name), timing, num_steps, arguments.rounds) for name in arguments.cells}


def report(arguments: argparse.Namespace) -> None:
    """Measure cells and batch sizes, and write table and plots."""
    folder = output_folder(arguments)
    tables, results = [], {}
    if CELLS in arguments.parts:
        print(f"about {sum(times_of(arguments).values()) / 60:.0f} min for {len(arguments.cells)} cells", flush=True)
        cells = {name: measure_cell(arguments, cell_of(name), folder) for name in arguments.cells}
        tables.append(cell_table(cells))
        results[CELLS] = cells
        draw_cells(cells, folder / "choices.png")
    if BATCHES in arguments.parts:
        batches = compare_batch_sizes(arguments)
        tables.append(batch_table(batches))
        results[BATCHES] = batches
        bars = [Bar(name, min_max(values)) for name, values in batches["images_per_s"].items()]
        title = f"ResNet-{arguments.depth}, one thread; chosen: {batches['chosen']}"
        draw_bars({"": bars}, folder / "batch_sizes.png", title=title, axis="images/s", digits=1)
    write_report(folder, arguments, "Choices of the planner against a sweep", "\n\n".join(tables), results)


def main(argv: Sequence[str] | None = None) -> None:
    options = parser()
    arguments = parse(options, SMOKE, argv)
    if arguments.steps < 1 or arguments.steps % 4:
        options.error(f"--steps {arguments.steps} is no multiple of 4; DDP that accumulates updates in each fourth")
    try:
        times = times_of(arguments)
    except ValueError as error:
        options.error(f"--cells: {error}")
    if arguments.list:
        for name, seconds in times.items():
            print(f"{name:20} {seconds / 60:5.1f} min")
        print(f"{'all':20} {sum(times.values()) / 60:5.1f} min")
        return
    run_benchmark(arguments, worker, report)


if __name__ == "__main__":
    main()
