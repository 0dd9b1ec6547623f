"""The planner's batch size against a sweep: a ResNet on this machine's processor, one process, real compute."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_dp.models import CifarResNet
from lightning_dp.planner import (
    BatchPlan,
    Candidate,
    apply_algorithms,
    choose_batch_size,
    measure_candidates,
    measure_step,
)
from lightning_dp.planner.candidates import mean_square, resized
from lightning_dp.recompute import apply_recompute
from support.report import markdown_table
from support.spread import alternate, min_max
from support.training import quiet

POLICIES: tuple[Any, ...] = (None, "cheap")


def step_s(model: nn.Module, images: torch.Tensor, plan: BatchPlan) -> float:
    """Return the time of one step as the plan has it."""
    algorithms = apply_algorithms(model, plan.algorithms)
    recompute: Any = plan.recompute
    handle = apply_recompute(model, recompute) if recompute else None
    try:
        model.zero_grad()
        start_s = time.perf_counter()
        mean_square(model, images).backward()
        return time.perf_counter() - start_s
    finally:
        if handle is not None:
            handle.remove()
        algorithms.remove()


def peak_bytes(model: nn.Module, images: torch.Tensor, plan: BatchPlan) -> int:
    """Return the most memory that a step holds at a time as the plan has it."""
    algorithms = apply_algorithms(model, plan.algorithms)
    recompute: Any = plan.recompute or None
    try:
        return measure_step(model, images, recompute=recompute, repeats=1).total_bytes
    finally:
        algorithms.remove()


def compare_batch_sizes(options: argparse.Namespace) -> dict[str, Any]:
    """Let the planner choose a batch size within a bound, and measure all that fit, each with its best algorithms."""
    quiet()  # one thread: threads that wait for each other measure what else runs
    torch.manual_seed(0)
    model = CifarResNet(options.depth).train()
    images = torch.randn(min(options.batch_sizes), 3, 32, 32)
    bound_bytes = round(1e6 * options.memory_mb)
    candidates = measure_candidates(
        model, images, options.batch_sizes, bound_bytes, recompute=POLICIES, repeats=options.repeats
    )
    chosen = choose_batch_size(candidates)
    plans = {name_of(c.batch_size, c.recompute): choose_batch_size([c]) for c in candidates if fits(c)}
    sides: dict[str, Callable[[], float]] = {
        name: partial(step_s, model, resized(images, plan.batch_size), plan) for name, plan in plans.items()
    }
    measured_bytes = {name: peak_bytes(model, resized(images, plan.batch_size), plan) for name, plan in plans.items()}
    times_s = alternate(sides, options.batch_rounds)
    rates = {name: [plans[name].batch_size / value for value in times_s[name]] for name in plans}
    return {
        "bound_bytes": bound_bytes,
        "chosen": name_of(chosen.batch_size, chosen.recompute),
        "predicted_images_per_s": {name_of(*choice): rate for choice, rate in chosen.images_per_s.items()},
        "images_per_s": rates,
        # A plan knows what its algorithms hold, and the rest as the bound less what is left for them.
        "planned_bytes": {name: bound_bytes - plan.bound_bytes + plan.held_bytes for name, plan in plans.items()},
        "measured_bytes": measured_bytes,
    }


def name_of(batch_size: int, recompute: str | None) -> str:
    """Return batch size and recomputation, for a table."""
    return f"{batch_size} {recompute or 'plain'}"


def fits(candidate: Candidate) -> bool:
    """Return whether any choice of algorithms fits."""
    try:
        choose_batch_size([candidate])
    except ValueError:
        return False
    return True


def lost_images(results: dict[str, Any]) -> float:
    """Return by how much the chosen batch size has fewer images per second than the best, as a ratio; medians."""
    medians = {name: min_max(values).median for name, values in results["images_per_s"].items()}
    return 1 - medians[results["chosen"]] / max(medians.values())


def batch_table(results: dict[str, Any]) -> str:
    """Return the sweep as a table, and what was lost."""
    rows = [
        [
            f"{name}{' (chosen)' if name == results['chosen'] else ''}",
            f"{results['predicted_images_per_s'][name]:.1f}",
            min_max(values).text(1),
            f"{results['planned_bytes'][name] / 1e6:.1f}",
            f"{results['measured_bytes'][name] / 1e6:.1f}",
        ]
        for name, values in results["images_per_s"].items()
    ]
    header = ["batch size", "images/s, planned", "images/s, measured (minimum-maximum)"]
    table = markdown_table([*header, "peak, planned (MB)", "peak, measured (MB)"], rows)
    bound = results["bound_bytes"] / 1e6
    off = max(
        abs(results["planned_bytes"][name] / measured - 1) for name, measured in results["measured_bytes"].items()
    )
    return (
        f"{table}\n\nWithin {bound:.0f} MB the chosen batch size loses {lost_images(results):.1%} of the images/s. "
        f"Peaks are at most {off:.1%} off."
    )
