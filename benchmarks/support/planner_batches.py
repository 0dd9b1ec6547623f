"""The planner's batch size against a sweep: a ResNet on this machine's processor, one process, real compute."""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_dp.models import CifarResNet
from lightning_dp.planner import BatchPlan, apply_algorithms, choose_batch_size, measure_candidates
from lightning_dp.planner.convolutions.measured_plans import mean_square, measure_plans
from lightning_dp.planner.convolutions.program import fastest
from lightning_dp.recompute import apply_recompute
from support.report import markdown_table
from support.spread import alternate, min_max
from support.training import quiet

POLICIES: tuple[Any, ...] = (None, "cheap")


@contextmanager
def applied(model: nn.Module, plan: BatchPlan) -> Iterator[None]:
    """Let the model compute as the plan has it."""
    algorithms = apply_algorithms(model, plan.algorithms)
    policy: Any = plan.recompute
    recomputation = apply_recompute(model, policy) if policy else None
    try:
        yield
    finally:
        if recomputation is not None:
            recomputation.remove()
        algorithms.remove()


def step_s(model: nn.Module, images: torch.Tensor, plan: BatchPlan) -> float:
    """Return the time of one step as the plan has it."""
    with applied(model, plan):
        model.zero_grad()
        start_s = time.perf_counter()
        mean_square(model, images).backward()
        return time.perf_counter() - start_s


def network(depth: int) -> nn.Module:
    """Return the model."""
    quiet()  # one thread: threads that wait for each other measure what else runs
    torch.manual_seed(0)
    return CifarResNet(depth).train()


def images_of(batch_size: int) -> torch.Tensor:
    """Return noise."""
    return torch.randn(batch_size, 3, 32, 32)


def resident_bytes(depth: int, plan: BatchPlan) -> int:
    """Return by how much steps of the plan make the memory of a new process grow, by the system's account."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(_resident_bytes, depth, plan).result()


def _resident_bytes(depth: int, plan: BatchPlan) -> int:
    model = network(depth)
    with applied(model, plan):
        mean_square(model, images_of(1)).backward()  # what is loaded or kept for any step does not count
        before = _largest_resident_bytes()
        for _ in range(2):
            model.zero_grad()
            mean_square(model, images_of(plan.batch_size)).backward()
    return _largest_resident_bytes() - before


def _largest_resident_bytes() -> int:
    # Not getrusage: its figure begins with that of the process that started this one.
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0])


def compare_batch_sizes(options: argparse.Namespace) -> dict[str, Any]:
    """Let the planner choose a batch size within a bound, and measure all that fit, each with its best algorithms."""
    model = network(options.depth)
    images = images_of(min(options.batch_sizes))
    bound_bytes = round(1e6 * options.memory_mb)
    candidates = measure_candidates(
        model, images, options.batch_sizes, bound_bytes, recompute=POLICIES, repeats=options.repeats
    )
    summed = choose_batch_size(candidates)
    plans = {name_of(p.batch_size, p.recompute): p for p in measure_plans(model, images, candidates, bound_bytes)}
    chosen = fastest(list(plans.values()))
    batches = {name: images_of(plan.batch_size) for name, plan in plans.items()}
    sides: dict[str, Callable[[], float]] = {
        name: partial(step_s, model, batches[name], plan) for name, plan in plans.items()
    }
    times_s = alternate(sides, options.batch_rounds)
    return {
        "bound_bytes": bound_bytes,
        "chosen": name_of(chosen.batch_size, chosen.recompute),
        "chosen_by_sums": name_of(summed.batch_size, summed.recompute),
        "predicted_images_per_s": {name_of(*choice): rate for choice, rate in chosen.images_per_s.items()},
        "summed_images_per_s": {name_of(*choice): rate for choice, rate in summed.images_per_s.items()},
        "images_per_s": {name: [plans[name].batch_size / value for value in times_s[name]] for name in plans},
        "planned_bytes": {name: plan.peak_bytes for name, plan in plans.items()},
        "resident_bytes": {name: resident_bytes(options.depth, plan) for name, plan in plans.items()},
    }


def name_of(batch_size: int, recompute: str | None) -> str:
    """Return batch size and recomputation, for a table."""
    return f"{batch_size} {recompute or 'plain'}"


def lost_images(results: dict[str, Any]) -> float:
    """Return by how much the chosen batch size has fewer images per second than the best, as a ratio; medians."""
    medians = {name: min_max(values).median for name, values in results["images_per_s"].items()}
    return 1 - medians[results["chosen"]] / max(medians.values())


def batch_table(results: dict[str, Any]) -> str:
    """Return the sweep as a table, and what was lost."""
    mega = {
        kind: {name: value / 1e6 for name, value in results[f"{kind}_bytes"].items()}
        for kind in ("planned", "resident")
    }
    rows = [
        [
            f"{name}{' (chosen)' if name == results['chosen'] else ''}",
            f"{results['summed_images_per_s'][name]:.1f}",
            f"{results['predicted_images_per_s'][name]:.1f}",
            min_max(values).text(1),
            f"{mega['planned'][name]:.1f}",
            f"{mega['resident'][name]:.1f}",
        ]
        for name, values in results["images_per_s"].items()
    ]
    header = ["batch size", "images/s, sum of layers", "images/s, planned", "images/s, measured (minimum-maximum)"]
    table = markdown_table([*header, "peak, planned (MB)", "growth of the process (MB)"], rows)
    bound = results["bound_bytes"] / 1e6
    return (
        f"{table}\n\nWithin {bound:.0f} MB the chosen batch size loses {lost_images(results):.1%} of the images/s. "
        f"Sums of layers choose {results['chosen_by_sums']}."
    )
