"""Step time of layered SGD and of its rivals on hosts with limited links: DDP, compressed DDP, FSDP2, DeAR, local SGD.

    python benchmarks/layered_sgd_throughput.py                            # 2 hosts x 2 ranks, then 4 x 1; all rates
    python benchmarks/layered_sgd_throughput.py --clip 1.0                 # with clipping by the norm
    python benchmarks/layered_sgd_throughput.py --rates 200mbit --methods "layered SGD step, leader, int8"
    python benchmarks/layered_sgd_throughput.py --hosts 4 --per-host 1 --rates 200mbit 1gbit
    python benchmarks/layered_sgd_throughput.py --hosts 4 --per-host 2 --rates 1gbit --rounds 1
    python benchmarks/layered_sgd_throughput.py --rates 1gbit none --compute real
    python benchmarks/layered_sgd_throughput.py --rates 1gbit --slow-host 200mbit   # the last host's link
    python benchmarks/layered_sgd_throughput.py --rates 200mbit 1gbit --delay-ms 5  # between hosts, one way
    python benchmarks/layered_sgd_throughput.py --rates 1gbit --steps 4 --memory    # memory of each method, not time

The hosts are network namespaces of this machine; benchmarks/support/emulated_hosts.py says what that needs. Gradients
of 25.5 MB, 100 ms to load a batch. Emulated compute: the rank sleeps 50 ms in forward and 100 ms in backward, as one
whose device is at work; two cores can carry four ranks that way. Real compute: a convolutional network on the cores.

All methods run in the same processes, round after round, forward and backward in turn. A ratio compares two runs of
one round; its spread is the minimum and the maximum over the rounds. The first four steps of a run are not measured.
PowerSGD compresses from the third step on (start_powerSGD_iter=2, warm start and error feedback as torch recommends),
so every measured step is a compressed one; in a real training torch recommends to start after a tenth of the steps. All
its gradients are in one bucket: torch's hook crashes over gloo with several.

Bound: the larger of compute + loading, and the bytes that must cross a host's link over its rate: 2 (G-1)/G of the
payload for G hosts with equal links. All of the payload must cross a slow host's link, and 2 (G-1) payloads all links
together; a ring, which sends the same over every link, needs 2 (G-1)/G of the payload at the slow rate. A delay is not
in the bound. The payload is the gradients; half of them for bf16, a fourth and the scales for int8; the factors
and the uncompressed vectors for PowerSGD; a fourth of the parameters for post-local SGD, which averages every fourth
step, and of the gradients for DDP that accumulates four batches. The int8 hook of DDP sends each rank's bytes directly
to all others, so twice the bound's bytes leave a host with two ranks.

Exact are the methods that compute synchronous SGD, up to the order of sums. The table shows for each one how far its
parameters are from DDP's at the end of a run: the largest difference over the largest distance that DDP moved any one.

With --delay-ms a process in the place of the bridge holds each frame for so long. It shares the cores with the ranks;
what it took is printed after each network, and at unlimited rate it is the limit. The round trip is twice the delay.

With --memory each method trains in processes of its own. Measured is how far the resident memory of a rank, without the
code of libraries, rises above its level before `fit`, when it has the parameters only. On CPU no method locks pages.

DeAR's order (arXiv 2302.12445): reduce-scatter of each bucket in backward, all-gather in the next forward, in one ring
over all ranks. "DDP, nothing sent" trains with torch's noop_hook: what a step takes on these cores without a network.
"DDP 2.15, finalized after loading" is there from torch 2.15 on: DDP leaves its all-reduce in flight while the next
batch is loaded (`finalize_backward`), as overlap="load" does.

Writes results.json, table.md and step_time.png (not with --memory) for each topology.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from support.command_line import benchmark_parser, output_folder, parse
from support.data_parallel_methods import REFERENCE, Method, method_trainer, methods
from support.data_parallel_report import Measured, RateResult, draw_step_times, memory_table, rate_table
from support.emulated_compute import TimedModule, Timing, slow_loader
from support.emulated_hosts import bytes_per_s
from support.host_jobs import Job, add_worker_option, measure_on_hosts, run_benchmark
from support.peak_memory import peak_bytes
from support.report import write_report
from support.sharded_strategies import flat_parameters
from support.spread import turn_order
from support.training import StepClock, quiet
from torch import Tensor

WARM_UP = 4  # so that the measured steps begin with a new window of accumulated batches
SMOKE = {
    "hosts": [2], "per_host": [1], "rates": ["1gbit"], "steps": 1, "rounds": 1, "width": 64,
    "load_ms": 1.0, "forward_ms": 1.0, "backward_ms": 1.0,
}  # fmt: skip


def parser() -> argparse.ArgumentParser:
    options = benchmark_parser(__doc__, __file__)
    options.add_argument("--hosts", type=int, nargs="+", default=[2, 4], help="of each topology")
    options.add_argument("--per-host", type=int, nargs="+", default=[2, 1], help="ranks on a host, of each topology")
    options.add_argument(
        "--rates", nargs="+", default=["200mbit", "500mbit", "1gbit", "10gbit", "none"], help="of each host's link"
    )
    options.add_argument("--compute", choices=["emulated", "real"], default="emulated")
    # Post-local SGD averages in every fourth step: other numbers would count an average too many, or one too few.
    options.add_argument("--steps", type=int, default=12, help="measured steps of a run; a multiple of 4")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--load-ms", type=float, default=100.0)
    options.add_argument("--forward-ms", type=float, default=50.0, help="of emulated compute")
    options.add_argument("--backward-ms", type=float, default=100.0, help="of emulated compute")
    options.add_argument("--width", type=int, default=1024, help="of emulated layers; 1024 gives 25.5 MB")
    options.add_argument("--clip", type=float, help="clip gradients to this norm (default: no clipping)")
    options.add_argument("--methods", nargs="+", help=f"rows to measure beside {REFERENCE} (default: all)")
    options.add_argument("--slow-host", metavar="RATE", help="of the last host's link (default: as the others)")
    options.add_argument("--delay-ms", type=float, default=0.0, help="between hosts, one way")
    options.add_argument("--memory", action="store_true", help="measure memory, at the first of the rates, not time")
    add_worker_option(options)
    return options


def chosen_methods(options: argparse.Namespace, per_host: int) -> dict[str, Method]:
    """Return the rows of the table; the reference comes first."""
    rows = methods(per_host)
    if options.methods is None:
        return rows
    if unknown := [name for name in options.methods if name not in rows]:
        raise SystemExit(
            f"--methods {unknown[0]!r} is not known with {per_host} ranks on a host; use one of {list(rows)}"
        )
    return {name: row for name, row in rows.items() if name == REFERENCE or name in options.methods}


def timing_of(options: argparse.Namespace) -> Timing:
    return Timing(options.load_ms / 1e3, options.forward_ms / 1e3, options.backward_ms / 1e3)


def worker(job: Job) -> RateResult | int:
    """One rank: train with every method in turn, round after round; or return the peak memory of a single method."""
    quiet()
    rows = chosen_methods(job.options, job.per_host)
    if job.options.memory:
        (name,) = job.options.methods
        return peak_of_fit(job, rows[name])
    step_s: dict[str, list[float]] = {name: [] for name in rows}
    difference: dict[str, list[float]] = {name: [] for name in rows}
    for turn in range(job.options.rounds):
        trained: dict[str, Tensor] = {}
        for name in turn_order(rows, turn):
            seconds, start, trained[name] = train(job, name, rows[name])
            step_s[name].append(seconds)
        # Relative to what training changed: rounding in another order of sums is then below 1e-5.
        moved = (trained[REFERENCE] - start).abs().max()
        for name, parameters in trained.items():
            difference[name].append(float((parameters - trained[REFERENCE]).abs().max() / moved))
    shapes = [list(p.shape) for p in module_of(job).parameters()]
    return {"step_s": step_s, "difference": difference, "shapes": shapes}


def module_of(job: Job) -> TimedModule:
    return TimedModule(job.options.compute, timing_of(job.options), job.options.width)


def train(job: Job, name: str, method: Method) -> tuple[float, Tensor, Tensor]:
    """Train once; return the seconds a step, and all parameters before and after."""
    clock = StepClock(WARM_UP)
    module, fit = prepare(job, method, clock)
    before = flat_parameters(module)
    fit()
    if dist.get_rank() == 0:
        print(f"  {job.network:>14}  {name:24} {clock.step_s * 1e3:7.1f} ms a step", flush=True)
    return clock.step_s, before, flat_parameters(module)


def peak_of_fit(job: Job, method: Method) -> int:
    """Train once; return how far this rank's memory rises above its level before, when it has the parameters only."""
    _, fit = prepare(job, method)
    peak = peak_bytes(fit, torch.device("cpu"))
    if peak is None:
        raise RuntimeError("--memory needs /proc/self/clear_refs, with which the kernel forgets earlier peaks")
    return peak


def prepare(job: Job, method: Method, *callbacks: pl.Callback) -> tuple[TimedModule, Callable[[], None]]:
    """Return a module, and the function that trains it."""
    num_steps = job.options.steps + WARM_UP
    trainer = method_trainer(
        method, job.num_hosts, job.per_host, num_steps, *callbacks, gradient_clip_val=job.options.clip
    )
    module = module_of(job)
    loader = slow_loader(num_steps, job.world_size, job.options.compute, timing_of(job.options))
    return module, lambda: trainer.fit(module, loader)


def local_s(options: argparse.Namespace) -> float:
    """Return what a step takes without communication; real compute, which depends on the machine, is left out."""
    timing = timing_of(options)
    return timing.load_s + (timing.forward_s + timing.backward_s if options.compute == "emulated" else 0.0)


def measure_memory(arguments: argparse.Namespace, job: Job, folder: Path) -> dict[str, list[int]]:
    """Return each method's peak on each rank. Every method has processes of its own, which no other has left memory."""
    peaks = {}
    for name in chosen_methods(arguments, job.per_host):
        alone = argparse.Namespace(**{**vars(arguments), "methods": [name]})
        peaks[name] = measure_on_hosts(__file__, replace(job, options=alone), folder)
        print(f"  {name:40} {max(peaks[name]) / 1e6:7.1f} MB", flush=True)
    return peaks


def report(arguments: argparse.Namespace) -> None:
    """Measure every topology at every rate, and write tables and plots."""
    topologies: Sequence[tuple[int, int]] = list(zip(arguments.hosts, arguments.per_host, strict=True))
    for num_hosts, per_host in topologies:
        chosen_methods(arguments, per_host)  # a wrong name ends here, not on the hosts
        jobs = [
            Job(arguments, num_hosts, per_host, rate, arguments.slow_host, arguments.delay_ms)
            for rate in arguments.rates
        ]
        settings = [f"{num_hosts}x{per_host}", arguments.compute]
        settings += ["clipped"] if arguments.clip is not None else []
        settings += [f"slow-{arguments.slow_host}"] if arguments.slow_host else []
        settings += [f"delay-{arguments.delay_ms:g}ms"] if arguments.delay_ms else []
        title = f"{num_hosts} hosts x {per_host} ranks, {arguments.compute} compute"
        title += "" if arguments.clip is None else ", clipped"
        if arguments.memory:
            report_memory(arguments, jobs[0], output_folder(arguments, "-".join([*settings, "memory"])), title)
        else:
            report_times(arguments, jobs, output_folder(arguments, "-".join(settings)), title)


def report_memory(arguments: argparse.Namespace, job: Job, folder: Path, title: str) -> None:
    """Measure memory on one network."""
    title = f"memory, {title}, {job.network}"
    print(title, flush=True)
    peaks = measure_memory(arguments, job, folder)
    write_report(folder, arguments, title, memory_table(peaks), peaks)


def report_times(arguments: argparse.Namespace, jobs: Sequence[Job], folder: Path, title: str) -> None:
    """Measure step times on every network."""
    rows = chosen_methods(arguments, jobs[0].per_host)
    measured = {}
    for job in jobs:
        print(f"{title}, {job.network}", flush=True)
        result = measure_on_hosts(__file__, job, folder)[0]
        measured[job.network] = Measured(job, result, local_s(arguments))
    table = "\n\n".join(rate_table(each, rows) for each in measured.values())
    results = {each.job.rate: each.result for each in measured.values()}
    write_report(folder, arguments, title, table, results)
    draw_step_times(measured, rows, folder / "step_time.png", title)


def main(argv: Sequence[str] | None = None) -> None:
    options = parser()
    arguments = parse(options, SMOKE, argv)
    if len(arguments.hosts) != len(arguments.per_host):
        options.error(f"--hosts {arguments.hosts} and --per-host {arguments.per_host} must be of equal length")
    for rate in [*arguments.rates, *filter(None, [arguments.slow_host])]:
        bytes_per_s(rate)  # raises for one that tc would not take
    if not 0 <= arguments.delay_ms < float("inf"):
        options.error(f"--delay-ms {arguments.delay_ms:g} is not a time of 0 or more; use 0 for none")
    run_benchmark(arguments, worker, report)


if __name__ == "__main__":
    main()
