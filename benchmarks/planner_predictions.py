"""How far off the planner's simulation is: published and measured figures, few of them fitted, the others predicted.

    python benchmarks/planner_predictions.py

Nothing is run but the simulation, so there is no spread and the machine does not matter. Four sets of figures: step
times of docs/measurements/layered_sgd.md on emulated hosts; the efficiencies of arXiv 1906.05936, section 5.4; the
speedups of arXiv 1404.5997, Table 1; MLPerf Training 3.0, ResNet-50 on NVIDIA H100. Each set has a few constants that
nobody published, fitted on as many of its figures. Writes results.json, table.md and predictions.png.

Then a sweep: each method's efficiency against the number of ranks, up to 10,000, on a made-up cluster, also with an
oversubscribed core, a slow host, and two rails, of which one may fail; scaling.png draws it. Last, the simulation of a
large job is itself timed (processor time).
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from support.command_line import benchmark_parser, output_folder, parse
from support.headless import pyplot
from support.report import markdown_table, write_report

from lightning_dp.planner import METHODS, Block, Head, Link, Network, Workload, simulate
from lightning_dp.planner.plots import colors_of, label_lines

SMOKE: dict[str, object] = {"ranks": 16}
# TCP's headers, as measured by benchmarks/all_reduce.py: all-reduces take 1.045 times the bytes over the rate.
TCP = 1.045
HOSTS, PARALLEL, HYBRID, MLPERF = "emulated hosts", "layered SGD paper", "one weird trick", "MLPerf 3.0"


@dataclass(frozen=True)
class Point:
    """One figure.

    Attributes:
        set_name: which set it belongs to.
        label: what it is.
        published: its value.
        predicted: the simulation's.
        is_fitted: whether a constant was fitted on it.
    """

    set_name: str
    label: str
    published: float
    predicted: float
    is_fitted: bool

    @property
    def error(self) -> float:
        """Relative error."""
        return self.predicted / self.published - 1


def fit(function: Callable[[float], float], target: float, low: float, high: float) -> float:
    """Return where a monotonic function has the value ``target``, between ``low`` and ``high``."""
    is_rising = function(high) > function(low)
    for _ in range(32):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if (function(middle) < target) == is_rising else (low, middle)
    return math.sqrt(low * high)


# --- step times on emulated hosts: two hosts of two ranks, 25.5 MB, 150 ms of compute, 100 ms of loading ---

RATES = {"200 Mbit/s": 2e8, "500 Mbit/s": 5e8, "1 Gbit/s": 1e9, "10 Gbit/s": 1e10, "unlimited": 1e13}
MEASURED_MS = {
    "ddp": (1849, 849, 542, 321, 330),
    "layered_sgd_load": (1270, 622, 401, 285, 285),
    "layered_sgd_step": (1147, 498, 297, 301, 304),
    "layered_sgd_load_sharded": (1284, 624, 398, 282, 285),
    "layered_sgd_step_sharded": (1148, 481, 297, 298, 303),
}
HOST_METHODS = {
    **METHODS,
    "layered_sgd_load_sharded": replace(METHODS["layered_sgd_load"], communicator="sharded"),
}


def host_step_ms(method: str, rate: float, host_s: float, copy_bytes_per_s: float) -> float:
    """Return a step of `benchmarks/support/emulated_compute.py`'s network.

    Args:
        method: name of the method.
        rate: of a host's link, in bits per second.
        host_s: time that four ranks on two cores lose to each other, beside the emulated compute.
        copy_bytes_per_s: what gloo reaches on these cores where no link limits it.
    """
    elements = [64 * 1024, *[1024 * 1024] * 6, 1024 * 10]
    blocks = tuple(Block(4.0 * n, (0.05 + host_s / 3) / 8, (0.1 + 2 * host_s / 3) / 8) for n in elements)
    inter = Link(2e-4, min(rate / 8 / TCP, copy_bytes_per_s))
    network = Network(inter, Link(1e-4, 1e9), ranks_per_node=2)
    return 1e3 * simulate(Workload(blocks, load_s=0.1), network, 4, HOST_METHODS[method]).step_s


def emulated_hosts() -> list[Point]:
    """Fit the two constants of the cores on the column without a limit; predict the others."""
    unlimited = RATES["unlimited"]
    host_s = fit(lambda value: host_step_ms("layered_sgd_load", unlimited, value, 1e9), 285, 1e-3, 0.2)
    copy = fit(lambda value: host_step_ms("ddp", unlimited, host_s, value), 330, 1e8, 1e10)
    points = []
    for method, times in MEASURED_MS.items():
        for (label, rate), measured in zip(RATES.items(), times, strict=True):
            is_fitted = label == "unlimited" and method in ("layered_sgd_load", "ddp")
            predicted = host_step_ms(method, rate, host_s, copy)
            points.append(Point(HOSTS, f"{method}, {label} (ms)", measured, predicted, is_fitted))
    return points


# --- arXiv 1906.05936: ResNet-50 on K80s, four workers on a node, efficiency relative to one node ---


def efficiency(method: str, num_workers: int, latency: float, load: float) -> float:
    """Return the efficiency in percent, in units of one node's compute time.

    Large all-reduces on few bytes per second are not what limits there: the paper's Figure 2 grows linearly with the
    number of workers, as the latency term of a ring does. So the bytes do not count.
    """
    workload = Workload.uniform(0.0, 1 / 3, 2 / 3, num_blocks=1, load_s=load)
    network = Network(Link(latency, 1.0), Link(0.0, 1.0), ranks_per_node=4)
    return 100 * simulate(workload, network, 4, "ddp").step_s / simulate(workload, network, num_workers, method).step_s


def fit_latency(load: float) -> float:
    """Return the latency with which conventional SGD has its efficiency on 256 workers."""
    return fit(lambda value: efficiency("ddp", 256, value, load), 63.8, 1e-5, 1e-1)


def fit_load(latency: float) -> float:
    """Return the loading time with which layered SGD has its efficiency on 256 workers."""
    return fit(lambda value: efficiency("layered_sgd_load", 256, latency, value), 93.1, 1e-4, 0.12)


def layered_sgd_paper() -> list[Point]:
    """Fit latency and loading time on 256 workers; predict fewer."""
    load = 0.05
    for _ in range(6):  # each depends a little on the other
        latency = fit_latency(load)
        load = fit_load(latency)
    figures = {("ddp", 256): 63.8, ("layered_sgd_load", 256): 93.1, ("ddp", 8): 98.7, ("layered_sgd_load", 32): 100.0}
    return [
        Point(PARALLEL, f"{method}, {size} workers (%)", value, efficiency(method, size, latency, load), size == 256)
        for (method, size), value in figures.items()
    ]


# --- arXiv 1404.5997, Table 1: AlexNet with one tower on K20s, scheme b, 128 images per GPU ---

ONE_GPU_S = 98.05 * 3600 / (90 * 1281167 / 128)
FILTERS = ((64, 3 * 121), (192, 64 * 25), (384, 192 * 9), (384, 384 * 9), (256, 384 * 9))
# "Convolutional layers cumulatively contain about 90-95% of the computation, about 5% of the parameters" (section 2).
HEAD_PART = 0.07


def hybrid_speedup(num_gpus: int, bytes_per_s: float) -> float:
    """Return the speedup over one GPU. Four GPUs share a switch, and the way between the two switches."""
    trunk_s = (1 - HEAD_PART) * ONE_GPU_S / len(FILTERS)
    blocks = tuple(Block(4.0 * out * (size + 1), trunk_s / 3, 2 * trunk_s / 3) for out, size in FILTERS)
    head_s = HEAD_PART * ONE_GPU_S
    weights = 9216 * 4096 + 4096 * 4096 + 4096 * 1000
    head = Head(4.0 * weights, head_s / 3, 2 * head_s / 3, 4.0 * 128 * 9216, 4.0 * 128 * 2 * 4096)
    link = Link(1e-4, bytes_per_s)
    workload = Workload(blocks, batch_size=128, head=head)
    return num_gpus * ONE_GPU_S / simulate(workload, Network(link, link, 4), num_gpus, "hybrid_b").step_s


def one_weird_trick() -> list[Point]:
    """Fit the bandwidth that the program reached on two GPUs; predict four and eight."""
    bandwidth = fit(lambda value: hybrid_speedup(2, value), 1.95, 5e8, 5e10)
    figures = {2: 1.95, 4: 3.74, 8: 6.25}
    return [
        Point(HYBRID, f"scheme b, {size} GPUs (x)", value, hybrid_speedup(size, bandwidth), size == 2)
        for size, value in figures.items()
    ]


# --- MLPerf Training 3.0, ResNet-50 on H100, minutes ---

MINUTES = {8: 13.466, 64: 2.664, 512: 0.509, 768: 0.369, 3584: 0.183}
FITTED_SIZES = (8, 512, 3584)


def mlperf() -> list[Point]:
    """Fit W N^p + s on three sizes; predict two.

    No simulation of steps gives these: more GPUs mean larger batches, which need more epochs, and no source says how
    many. The power p stands for both, s for what does not shrink (start, evaluation).
    """
    small, middle, large = FITTED_SIZES

    def constants(fixed: float) -> tuple[float, float]:
        power = math.log((MINUTES[middle] - fixed) / (MINUTES[small] - fixed)) / math.log(middle / small)
        return (MINUTES[small] - fixed) / small**power, power

    def minutes(size: int, fixed: float) -> float:
        work, power = constants(fixed)
        return work * size**power + fixed

    fixed = fit(lambda value: minutes(large, value), MINUTES[large], 1e-4, 0.18)
    return [
        Point(MLPERF, f"{size} GPUs (min)", value, minutes(size, fixed), size in FITTED_SIZES)
        for size, value in MINUTES.items()
    ]


def all_points() -> list[Point]:
    """Return the figures of all sets."""
    return [*emulated_hosts(), *layered_sgd_paper(), *one_weird_trick(), *mlperf()]


def mean_error(points: Sequence[Point]) -> float:
    """Return the mean absolute relative error of the predicted figures."""
    predicted = [abs(point.error) for point in points if not point.is_fitted]
    return sum(predicted) / len(predicted)


def choices() -> dict[str, tuple[str, str, float]]:
    """Return for each rate the method with the least predicted time, the best measured one, and the loss in time."""
    points = {point.label: point for point in emulated_hosts()}
    found = {}
    for place, label in enumerate(RATES):
        chosen = min(MEASURED_MS, key=lambda method: points[f"{method}, {label} (ms)"].predicted)
        best = min(MEASURED_MS, key=lambda method: MEASURED_MS[method][place])
        found[label] = (chosen, best, MEASURED_MS[chosen][place] / MEASURED_MS[best][place] - 1)
    return found


def simulation_s(num_ranks: int) -> dict[str, float]:
    """Return the processor time (s) that simulating ranks of different speed takes, for each data-parallel method."""
    gigabit, local = Link(latency_s=2e-4, bytes_per_s=120e6), Link(latency_s=1e-4, bytes_per_s=1e9)
    network = Network(inter=gigabit, intra=local, ranks_per_node=8)
    workload = Workload.uniform(gradient_bytes=25.5e6, forward_s=0.05, backward_s=0.1, load_s=0.1)
    workload = replace(workload, jitter=0.05)
    seconds = {}
    for name, method in METHODS.items():
        if method.applies_to(workload):  # without a head, batch norm and Memonger's plan
            start_s = time.process_time()
            simulate(workload, network, num_ranks, name)
            seconds[name] = time.process_time() - start_s
    return seconds


# --- a sweep over the number of ranks: ResNet-50's bytes on nodes of eight devices with one 100 Gbit/s link each ---

SWEEP_RANKS = (8, 16, 64, 256, 1024, 4096, 10_000)
RACK_RANKS = 256  # nodes of a rack share a switch; what leaves it goes over the core
OVERSUBSCRIPTION = 4
SLOW_HOST = 1.2  # all ranks wait for the slowest, in each step: they are as fast as it is
CLUSTERS = ("full core", "oversubscribed core", "one slow host", "two rails", "two rails, one host lost one")


def efficiencies(cluster: str) -> dict[str, list[float]]:
    """Return each method's images per second over those of as many ranks that never wait, by number of ranks."""
    found: dict[str, list[float]] = {}
    alone = sweep_workload(1.0)
    for size in SWEEP_RANKS:
        is_shared = cluster == "oversubscribed core" and size > RACK_RANKS
        # Ranks of a ring or a tree are placed at random, so that nearly all messages leave the rack.
        rate = 12.5e9 / (OVERSUBSCRIPTION if is_shared else 1)
        # A host with two rails sends half of each message over each. An all-reduce is as fast as its slowest host: one
        # that has lost a rail makes all of them as slow as with a single rail.
        inter = Link(1e-5, 2 * rate if cluster == "two rails" else rate)
        network = Network(inter, Link(5e-6, 200e9), ranks_per_node=8, all_reduce="auto")
        workload = sweep_workload(SLOW_HOST if cluster == "one slow host" else 1.0)
        for name, method in METHODS.items():
            # A compressed sum of layered SGD is simulated as if each node sent to all others at once.
            is_compressed = method.compression != 1.0 and method.family != "ddp"
            if method.applies_to(workload) and not is_compressed:
                rate = simulate(workload, network, size, name).images_per_s
                found.setdefault(name, []).append(rate * alone.compute_s / (size * alone.batch_size))
    return found


def sweep_workload(factor: float) -> Workload:
    """Return a step of 120 ms, in which each layer takes ``factor`` times as long."""
    return Workload.uniform(102e6, factor * 0.04, factor * 0.08, num_blocks=50, batch_size=64)


def draw_sweep(sweep: dict[str, dict[str, list[float]]], path: Path) -> None:
    """Draw efficiency against ranks, a panel for each cluster."""
    plt = pyplot()
    num_rows = math.ceil(len(sweep) / 3)
    figure, panels = plt.subplots(num_rows, 3, figsize=(15.6, 4.6 * num_rows), layout="constrained", sharey=True)
    for unused in panels.flat[len(sweep) :]:
        unused.remove()
    for axes, (cluster, lines) in zip(panels.flat, sweep.items(), strict=False):
        ends = []
        for (name, values), color in zip(lines.items(), colors_of(lines), strict=True):
            axes.plot(SWEEP_RANKS, [100 * value for value in values], "o-", markersize=3, color=color)
            ends.append((name, SWEEP_RANKS[-1], 100 * values[-1], color))
        axes.set_xscale("log")
        axes.set_title(cluster)
        axes.set_xlabel("ranks")
        axes.yaxis.set_major_formatter("{x:g} %")
        label_lines(axes, ends)
    figure.savefig(path, dpi=90)
    plt.close(figure)


def sweep_table(sweep: dict[str, dict[str, list[float]]]) -> str:
    """Return a table for the largest number of ranks: a row for each method, a column for each cluster."""
    rows = [[name, *(f"{lines[name][-1]:.1%}" for lines in sweep.values())] for name in next(iter(sweep.values()))]
    return markdown_table([f"efficiency of {SWEEP_RANKS[-1]} ranks", *sweep], rows)


def draw(points: Sequence[Point], path: Path) -> None:
    """Draw predicted over published figures, a row for each."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(8.4, 0.24 * len(points) + 1.2), layout="constrained")
    for is_fitted, marker, label in ((True, "D", "fitted"), (False, "o", "predicted")):
        places = [place for place, point in enumerate(points) if point.is_fitted == is_fitted]
        axes.plot([100 * points[place].error for place in places], places, marker, label=label)
    axes.axvspan(-10, 10, color="0.93", zorder=0, label="within 10 %")
    axes.axvline(0, color="0.5", linewidth=0.8)
    axes.set_yticks(range(len(points)), [f"{p.set_name}: {p.label}" for p in points], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("predicted over published, difference in %")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def parser() -> argparse.ArgumentParser:
    options = benchmark_parser(__doc__, __file__)
    options.add_argument("--ranks", type=int, default=10_000, help="of the job whose simulation is timed")
    return options


def main(argv: Sequence[str] | None = None) -> None:
    options = parser()
    arguments = parse(options, SMOKE, argv)
    if arguments.ranks < 1:
        options.error(f"--ranks {arguments.ranks} is not a number of ranks; give 1 or more")
    folder = output_folder(arguments)
    points = all_points()
    rows = []
    for p in points:
        difference = "fitted" if p.is_fitted else f"{p.error:+.1%}"
        rows.append([p.set_name, p.label, f"{p.published:.4g}", f"{p.predicted:.4g}", difference])
    table = markdown_table(["set", "figure", "published", "simulated", "difference"], rows)
    for name in (HOSTS, PARALLEL, HYBRID, MLPERF):
        table += f"\n\n{name}: mean error {mean_error([p for p in points if p.set_name == name]):.1%}"
    took_s = simulation_s(arguments.ranks)
    table += f"\n\nSimulating {arguments.ranks} ranks of different speed takes"
    table += f" {min(took_s.values()):.1f} to {max(took_s.values()):.1f} s of one core for each method."
    sweep = {cluster: efficiencies(cluster) for cluster in CLUSTERS}
    table += f"\n\n{sweep_table(sweep)}"
    draw_sweep(sweep, folder / "scaling.png")
    draw(points, folder / "predictions.png")
    results = {
        "sweep": sweep,
        "simulation_s": took_s,
        "points": [vars(point) for point in points],
        "choices": choices(),
    }
    write_report(folder, arguments, "Predicted and published figures", table, results)


if __name__ == "__main__":
    main()
