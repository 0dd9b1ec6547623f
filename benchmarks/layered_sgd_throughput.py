"""Step time of layered SGD and of its rivals on hosts with limited links: DDP, compressed DDP, FSDP2, local SGD.

    python benchmarks/layered_sgd_throughput.py                            # 2 hosts x 2 ranks, then 4 x 1; all rates
    python benchmarks/layered_sgd_throughput.py --clip 1.0                 # with clipping by the norm
    python benchmarks/layered_sgd_throughput.py --rates 200mbit --methods "layered SGD step, leader, int8"
    python benchmarks/layered_sgd_throughput.py --hosts 4 --per-host 1 --rates 200mbit 1gbit
    python benchmarks/layered_sgd_throughput.py --rates 1gbit none --compute real

The hosts are network namespaces of this machine; benchmarks/support/emulated_hosts.py says what that needs. Gradients
of 25.5 MB, 100 ms to load a batch. Emulated compute: the rank sleeps 50 ms in forward and 100 ms in backward, as one
whose device is at work; two cores can carry four ranks that way. Real compute: a convolutional network on the cores.

All methods run in the same processes, round after round, forward and backward in turn. A ratio compares two runs of
one round; its spread is the minimum and the maximum over the rounds. The first four steps of a run are not measured.
PowerSGD compresses from the third step on (start_powerSGD_iter=2, warm start and error feedback as torch recommends),
so every measured step is a compressed one; in a real training torch recommends to start after a tenth of the steps. All
its gradients are in one bucket: torch's hook crashes over gloo with several.

Bound: the larger of compute + loading, and the bytes that must cross a host's link over its rate: 2 (G-1)/G of the
payload for G hosts. The payload is the gradients; half of them for bf16, a fourth and the scales for int8; the factors
and the uncompressed vectors for PowerSGD; a fourth of the parameters for post-local SGD, which averages every fourth
step, and of the gradients for DDP that accumulates four batches. The int8 hook of DDP sends each rank's bytes directly
to all others, so twice the bound's bytes leave a host with two ranks.

Exact are the methods that compute synchronous SGD, up to the order of sums. The table shows for each one how far its
parameters are from DDP's at the end of a run: the largest difference over the largest distance that DDP moved any one.
Writes results.json, table.md and step_time.png for each topology.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from support.bars import Bar, draw_bars
from support.command_line import benchmark_parser, output_folder, parse
from support.data_parallel_methods import REFERENCE, Method, inter_host_bytes, methods
from support.emulated_compute import TimedModule, Timing, slow_loader
from support.emulated_hosts import bytes_per_s, rate_name
from support.host_jobs import Job, add_worker_option, measure_on_hosts, run_benchmark
from support.report import markdown_table, write_report
from support.sharded_strategies import flat_parameters
from support.spread import min_max, ratios, turn_order
from support.training import StepClock, make_trainer, quiet
from torch import Tensor

WARM_UP = 4  # so that the measured steps begin with a new window of accumulated batches
SMOKE = {
    "hosts": [2], "per_host": [1], "rates": ["1gbit"], "steps": 1, "rounds": 1, "width": 64,
    "load_ms": 1.0, "forward_ms": 1.0, "backward_ms": 1.0,
}  # fmt: skip

RateResult = dict[str, Any]  # step_s and difference: method -> one value a round; shapes: of the parameters


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


def worker(job: Job) -> RateResult:
    """One rank: train with every method in turn, round after round."""
    quiet()
    rows = chosen_methods(job.options, job.per_host)
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
    num_steps = job.options.steps + WARM_UP
    clock = StepClock(WARM_UP)
    options = {"max_steps": num_steps, "gradient_clip_val": job.options.clip, **method.trainer_options}
    trainer = make_trainer(method.make(), per_host=job.per_host, num_hosts=job.num_hosts, callbacks=[clock], **options)
    module = module_of(job)
    before = flat_parameters(module)
    trainer.fit(module, slow_loader(num_steps, job.world_size, job.options.compute, timing_of(job.options)))
    if trainer.is_global_zero:
        print(f"  {rate_name(job.rate):>14}  {name:24} {clock.step_s * 1e3:7.1f} ms a step", flush=True)
    return clock.step_s, before, flat_parameters(module)


def bound_s(options: argparse.Namespace, num_hosts: int, rate: str, payload_bytes: float) -> float:
    """Return the least time that a step can take: compute and loading, or the bytes over one host's link."""
    timing = timing_of(options)
    # Real compute depends on the machine, and is not known beforehand.
    compute_s = timing.forward_s + timing.backward_s if options.compute == "emulated" else 0.0
    crossing_s = inter_host_bytes(payload_bytes, num_hosts) / bytes_per_s(rate)
    return max(timing.load_s + compute_s, crossing_s)


def rate_table(options: argparse.Namespace, num_hosts: int, per_host: int, rate: str, result: RateResult) -> str:
    """Return the table of one rate: medians, and minimum and maximum of the rounds' ratios."""
    header = [
        "method", "exact", "difference to DDP", "ms a step", f"throughput over {REFERENCE}'s (minimum-maximum)",
        "MB across a host's link", "bound, ms", "time over bound",
    ]  # fmt: skip
    rows = []
    for name, method in chosen_methods(options, per_host).items():
        payload = method.payload_bytes(result["shapes"])
        bound = bound_s(options, num_hosts, rate, payload)
        step_s = result["step_s"][name]
        rows.append([
            name,
            f"no: {method.departs}" if method.departs else "yes",
            f"{max(result['difference'][name]):.0e}" if any(result["difference"][name]) else "0",
            f"{min_max(step_s).median * 1e3:.0f}",
            min_max(ratios(result["step_s"][REFERENCE], step_s)).text(),
            f"{inter_host_bytes(payload, num_hosts) / 1e6:.2f}",
            f"{bound * 1e3:.0f}",
            f"{min_max(step_s).median / bound:.2f}",
        ])  # fmt: skip
    return f"{rate_name(rate)}:\n\n{markdown_table(header, rows)}"


def draw(
    options: argparse.Namespace, num_hosts: int, per_host: int, results: dict[str, RateResult], path: Any, title: str
) -> None:
    """Draw a panel for each rate, a bar for each method; hatched are the methods that are not exact."""
    panels = {}
    for rate, result in results.items():
        panels[rate_name(rate)] = [
            Bar(
                name,
                min_max(1e3 * seconds for seconds in result["step_s"][name]),
                1e3 * bound_s(options, num_hosts, rate, method.payload_bytes(result["shapes"])),
                hatched=bool(method.departs),
            )
            for name, method in chosen_methods(options, per_host).items()
        ]
    draw_bars(
        panels,
        path,
        title=title,
        axis="ms a step: median, minimum and maximum of the rounds",
        bound_label="bound: compute + loading, or bytes over rate",
        hatched_label="not exact",
        max_columns=3,
    )


def report(arguments: argparse.Namespace) -> None:
    """Measure every topology at every rate, and write tables and plots."""
    topologies: Sequence[tuple[int, int]] = list(zip(arguments.hosts, arguments.per_host, strict=True))
    for num_hosts, per_host in topologies:
        chosen_methods(arguments, per_host)  # a wrong name ends here, not on the hosts
        clipped = "" if arguments.clip is None else "-clipped"
        folder = output_folder(arguments, f"{num_hosts}x{per_host}-{arguments.compute}{clipped}")
        title = f"{num_hosts} hosts x {per_host} ranks, {arguments.compute} compute{clipped.replace('-', ', ')}"
        results: dict[str, RateResult] = {}
        for rate in arguments.rates:
            print(f"{title}, {rate_name(rate)}", flush=True)
            results[rate] = measure_on_hosts(__file__, Job(arguments, num_hosts, per_host, rate), folder)[0]
        table = "\n\n".join(rate_table(arguments, num_hosts, per_host, *item) for item in results.items())
        write_report(folder, arguments, title, table, results)
        draw(arguments, num_hosts, per_host, results, folder / "step_time.png", title)


def main(argv: Sequence[str] | None = None) -> None:
    options = parser()
    arguments = parse(options, SMOKE, argv)
    if len(arguments.hosts) != len(arguments.per_host):
        options.error(f"--hosts {arguments.hosts} and --per-host {arguments.per_host} must be of equal length")
    run_benchmark(arguments, worker, report)


if __name__ == "__main__":
    main()
