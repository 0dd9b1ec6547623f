"""What each method would make of a measured step, in a table, a plot and a sentence each; and the plan file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_dp.planner.formulas import amdahl_efficiency
from lightning_dp.planner.network import Network
from lightning_dp.planner.simulation import (
    LARGER_BATCH,
    METHODS,
    Method,
    StepTime,
    all_reduce_s,
    inter_group_s,
    sent_bytes,
    simulate,
)
from lightning_dp.planner.workload import Block, StepProfile, Workload, join_shapes

PLAN_VERSION = 1
# A share of a step, or of the gradients, that the report names.
WORTH_NAMING = 0.05


@dataclass(frozen=True)
class Prediction:
    """A method, the time of its step, and why.

    Attributes:
        method: its name in `METHODS`.
        time: as simulated.
        reason: one sentence.
    """

    method: str
    time: StepTime
    reason: str


@dataclass(frozen=True)
class Diagnosis:
    """Where a job's step goes, and where each method would bring it.

    Attributes:
        profile: what was measured.
        network: the links, measured or given. None if one rank is asked about.
        world_size: number of ranks that the predictions are for.
        predictions: the most images per second first.
    """

    profile: StepProfile
    network: Network | None
    world_size: int
    predictions: tuple[Prediction, ...]

    @property
    def best(self) -> Prediction | None:
        """The fastest of the methods that compute what DDP computes, and that the recipes have."""
        usable = [p for p in self.predictions if METHODS[p.method].is_exact and self._overrides(p.method)]
        return usable[0] if usable else None

    def _overrides(self, method: str) -> list[str] | None:
        return overrides_of(method, self.profile, self.world_size)

    def __str__(self) -> str:
        profile = self.profile
        worst = max(profile.parts().items(), key=lambda part: part[1])
        batches = f" in each of {profile.accumulate} batches" if profile.accumulate > 1 else ""
        lines = [
            f"{profile.strategy}, {profile.world_size} ranks, {profile.batch_size} images per rank{batches}: "
            f"{worst[1] / profile.step_s:.0%} of a step is {worst[0]} ({profile.num_steps} steps measured).",
            "",
            profile.table(),
            "",
            f"Overhead ratio (Lemma 3.1): {profile.overhead_ratio:.3f}. "
            + self._efficiencies(profile.overhead_ratio, (2, 4, 8)),
        ]
        if self.network is None:
            lines += ["", "One rank needs no network. To predict for more: Diagnose(network=..., world_size=...)."]
            return "\n".join(lines)
        if self.profile.batch_norm_s:
            lines += ["", self._batch_norm_advice()]
        lines += [
            "",
            f"Simulated, {self.world_size} ranks:",
            "",
            "| method | ms per step | images/s | why |",
            "|---|---|---|---|",
        ]
        for p in self.predictions:
            lines.append(f"| {p.method} | {1e3 * p.time.step_s:.1f} | {p.time.images_per_s:.1f} | {p.reason} |")
        if notes := self._not_counted():
            lines += ["", *notes]
        if self.best is not None:
            lines += ["", f"Use {self.best.method}. {self.best.reason}{self._batch_norm_first()}"]
        return "\n".join(lines)

    def _batch_norm_advice(self) -> str:
        return (
            f"Global batch norm waits {1e3 * self.profile.batch_norm_s:.1f} ms per step for statistics and for slower "
            "ranks. No simulated time has these waits; the row of ddp_global_batch_norm has the bare messages. With 8 "
            "images per device or more, local statistics do: AdaptiveGlobalBatchNorm(max_batch_size=...)."
        )

    def _batch_norm_first(self) -> str:
        """Return what to change before the strategy, if global batch norm takes a good part of the step."""
        share = self.profile.batch_norm_s / self.profile.step_s
        if share < WORTH_NAMING:
            return ""
        return f" But first: {share:.0%} of the measured step is batch norm's waits, and no strategy changes them."

    def _not_counted(self) -> list[str]:
        """Return a line for each thing that the rows leave out, or that has no row."""
        profile, lines = self.profile, []
        if profile.why_no_recomputation:
            lines.append(f"Memonger is not among them: {profile.why_no_recomputation}")
        if any(METHODS[p.method].recompute for p in self.predictions):
            lines.append(
                "The rows of Memonger are without the time in which it records each step, up to a third of a step of "
                "small layers."
            )
        unplaced = sum(layer.num_bytes for layer in profile.layers if not layer.forward_s)
        total = sum(layer.num_bytes for layer in profile.layers)
        if total and unplaced / total >= WORTH_NAMING:
            lines.append(
                f"{unplaced / total:.0%} of the gradients' bytes belong to no module that the forward calls; they are "
                "simulated as the last ones of backward."
            )
        return lines

    @staticmethod
    def _efficiencies(ratio: float, sizes: Sequence[int]) -> str:
        if ratio == float("inf"):
            return "Nothing is computed that more GPUs could divide."
        values = ", ".join(f"{amdahl_efficiency(size, ratio):.0%} on {size}" for size in sizes)
        return f"If it stayed so, efficiency would be {values} GPUs."

    def save(self, path: str | Path, method: str | None = None) -> None:
        """Write the plan: what to override in the recipes for a method, and the figures behind it.

        The file is YAML, in the part of it that is also JSON.

        Args:
            path: of the file.
            method: one of the predicted methods, also one that changes what is computed. None: `best`.

        Raises:
            ValueError: no method was predicted, or not this one, or the recipes do not have it.
        """
        if self.best is None:
            raise ValueError("there is no plan: no method was predicted; use Diagnose(network=..., world_size=...)")
        chosen = self.best
        if method is not None:
            known = {p.method: p for p in self.predictions if self._overrides(p.method)}
            if method not in known:
                raise ValueError(f"there is no plan for method={method!r}; use one of {', '.join(known)}")
            chosen = known[method]
        values = {
            "version": PLAN_VERSION,
            "overrides": self._overrides(chosen.method),
            "method": chosen.method,
            "reason": chosen.reason,
            "world_size": self.world_size,
            "measured_ms": {name: round(1e3 * seconds, 3) for name, seconds in self.profile.parts().items()},
            "predicted_ms": {p.method: round(1e3 * p.time.step_s, 3) for p in self.predictions},
        }
        Path(path).write_text(json.dumps(values, indent=2) + "\n")

    def plot(self, path: str | Path, world_sizes: Sequence[int] | None = None) -> None:
        """Draw step time against number of ranks for each method. Needs matplotlib.

        For a method with larger batches it is the time for as many images as the others have in a step.

        Raises:
            ValueError: no network is known.
        """
        from matplotlib.figure import Figure

        if self.network is None:
            raise ValueError("no network is known; give it, Diagnose(network=...)")
        per_node = self.network.ranks_per_node
        sizes = world_sizes or [per_node * 2**power for power in range(8)]
        figure = Figure(figsize=(7.2, 4.4), layout="constrained")
        axes = figure.subplots()
        for prediction in self.predictions:
            rates = [
                simulate(self.profile.workload(), self.network, size, prediction.method).images_per_s for size in sizes
            ]
            images = self.profile.batch_size * self.profile.accumulate
            times = [1e3 * size * images / rate for size, rate in zip(sizes, rates, strict=True)]
            axes.plot(sizes, times, "o-", markersize=3, label=prediction.method)
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.set_xlabel("ranks")
        axes.set_ylabel(f"simulated step time (ms), {self.profile.batch_size} images per rank")
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=7)
        figure.savefig(path, dpi=120)


def read_overrides(path: str | Path) -> list[str]:
    """Return the overrides of a plan file, for the command line of ``recipes/train.py``.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is no plan of this version.
    """
    remedy = "make it again with recipes/plan.py"
    try:
        plan = json.loads(Path(path).read_text())
        version, overrides = plan["version"], plan["overrides"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no plan ({type(error).__name__}: {error}); {remedy}") from error
    if version != PLAN_VERSION:
        raise ValueError(f"{path} has version {version}, and this package reads version {PLAN_VERSION}; {remedy}")
    if not isinstance(overrides, list) or not all(isinstance(text, str) and "=" in text for text in overrides):
        raise ValueError(f"{path}: overrides={overrides!r} must be a list of texts like 'strategy=ddp'; {remedy}")
    return overrides


def make_diagnosis(profile: StepProfile, network: Network | None, world_size: int | None = None) -> Diagnosis:
    """Simulate all methods that apply to a measured job, and rank them.

    Args:
        profile: what was measured.
        network: the links; None if they are not known.
        world_size: number of ranks to predict for; by default, those of the job.
    """
    size = profile.world_size if world_size is None else world_size
    if network is None or size == 1:
        return Diagnosis(profile, network if size > 1 else None, size, ())
    workload = profile.workload()
    names = [name for name, method in METHODS.items() if method.applies_to(workload)]
    if network.num_nodes(size) == 1:
        names = [name for name in names if METHODS[name].family != "layered_sgd"]
    times = {name: simulate(workload, network, size, name) for name in names}
    predictions = [Prediction(name, time, reason(name, workload, network, size, time)) for name, time in times.items()]
    return Diagnosis(profile, network, size, tuple(sorted(predictions, key=lambda p: -p.time.images_per_s)))


# A sentence for each method: why its step takes as long as it does.

ROUNDED = {
    "bf16": ", rounded to 16 bits",
    "int8": ", rounded to 8 bits (their processor time not counted)",
    "power_sgd": ", as factors of rank 4 (their processor time not counted)",
}


def reason(name: str, workload: Workload, network: Network, world_size: int, time: StepTime) -> str:
    """Return a sentence: why a step of this method takes as long as it does."""
    method = METHODS[name]
    waits = f"waits {1e3 * time.waiting_s:.0f} ms of {1e3 * time.step_s:.0f} ms"
    if method.family == "hybrid":
        head = workload.head
        assert head is not None
        sent = 2 * workload.accumulate * (world_size - 1) * (head.feature_bytes + head.hidden_bytes)
        return f"Sends {sent / 1e6:.1f} MB of activations for {head.num_bytes / 1e6:.1f} MB of gradients; {waits}."
    if method.recompute:
        return _recomputes(method, workload, waits)
    if method.global_batch_norm:
        exchanges = 2 * workload.accumulate * workload.num_batch_norms
        exchange_s = exchanges * network.small_exchange_s(world_size)
        return (
            f"DDP that also gathers batch norm's statistics {exchanges} times, {1e3 * exchange_s:.0f} ms, "
            f"for batches below 8 images per rank; {waits}."
        )
    gradients = _gradients(workload)
    rounded = ROUNDED.get(str(method.compression), "")
    if method.family == "layered_sgd":
        between_s = inter_group_s(gradients, method, network, world_size)
        behind = "loading" if method.overlap == "load" else "loading, backward and the next forward"
        return f"Hides {1e3 * between_s:.0f} ms between nodes{rounded}, behind {behind}; {waits}."
    megabytes = sent_bytes(gradients, method.compression) / 1e6
    if method.accumulate > 1:
        batches = method.accumulate * workload.accumulate
        return f"Sends {megabytes:.1f} MB once in {batches} batches, a larger batch; {waits}."
    network_s = all_reduce_s(gradients, method, network, world_size)
    how = " by ring_all_reduce_hook" if method.all_reduce == "ring" else ""
    place = "after" if method.first_bucket_bytes >= workload.gradient_bytes else "behind"
    rounded += "," if rounded else ""
    return f"All-reduces {megabytes:.1f} MB{rounded}{how} in {1e3 * network_s:.0f} ms, {place} backward; {waits}."


def _recomputes(method: Method, workload: Workload, waits: str) -> str:
    plan = workload.recomputation
    assert plan is not None
    held, plain = plan.held_bytes / 1e6, plan.plain_bytes / 1e6
    if method.recompute != LARGER_BATCH:
        again_ms = 1e3 * plan.recompute_s
        return f"DDP that holds {held:.1f} of {plain:.1f} MB of activations for {again_ms:.0f} ms of compute; {waits}."
    images = plan.batch_factor * workload.batch_size
    return (
        f"{images} images per rank in the {plain:.1f} MB of activations of {workload.batch_size}, for one all-reduce "
        f"of {workload.gradient_bytes / 1e6:.1f} MB; {waits}."
    )


def _gradients(workload: Workload) -> Block:
    """Return all gradients as one block."""
    blocks = workload.whole().blocks
    return Block(workload.gradient_bytes, 0.0, 0.0, shapes=join_shapes(blocks))


# What `recipes/train.py` is told to use a method.

POWER_SGD = "{_target_:lightning_dp.strategies.PowerSGD,rank:4}"
# The other methods are no option of the recipes: Lightning ignores communication hooks on CPU.
OVERRIDES = {
    "ddp": ["strategy=ddp"],
    "ddp_accumulate_4": ["strategy=ddp"],  # and as many times as many batches as the job has in a step
    "ddp_global_batch_norm": ["strategy=ddp", "callbacks=agbn"],
    "layered_sgd_load": ["strategy=layered_sgd", "strategy.overlap=load"],
    "layered_sgd_step": ["strategy=layered_sgd", "strategy.overlap=step"],
    "layered_sgd_step_sharded": ["strategy=layered_sgd", "strategy.overlap=step", "strategy.communicator=sharded"],
    "layered_sgd_step_bf16": ["strategy=layered_sgd", "strategy.overlap=step", "strategy.compression=bf16"],
    "layered_sgd_step_int8": ["strategy=layered_sgd", "strategy.overlap=step", "strategy.compression=int8"],
    "layered_sgd_step_power_sgd": [
        "strategy=layered_sgd",
        "strategy.overlap=step",
        f"strategy.compression={POWER_SGD}",
    ],
    "hybrid_a": ["strategy=krizhevsky_hybrid", "strategy.scheme=a"],
    "hybrid_b": ["strategy=krizhevsky_hybrid", "strategy.scheme=b"],
    "hybrid_c": ["strategy=krizhevsky_hybrid", "strategy.scheme=c"],
}
MEMONGER = ("ddp_memonger", "ddp_memonger_larger_batch")
"""Their options depend on the job: a budget in bytes, and the number of images."""
WITH_PLAN = (*OVERRIDES, *MEMONGER)
"""The methods that the recipes have."""


def overrides_of(name: str, profile: StepProfile, world_size: int) -> list[str] | None:
    """Return the overrides for a method, None if the recipes do not have it, or the job has no plan for it.

    Args:
        name: in `METHODS`.
        profile: the measured job.
        world_size: number of ranks that will train. ``data.batch_size`` counts the images of all of them.
    """
    if name not in MEMONGER:
        found = OVERRIDES.get(name)
        if METHODS[name].accumulate > 1 and found is not None:
            return [*found, f"trainer.accumulate_grad_batches={METHODS[name].accumulate * profile.accumulate}"]
        return found
    plan = profile.recomputation
    if plan is None:
        return None
    is_larger = name == "ddp_memonger_larger_batch"
    factor = plan.batch_factor if is_larger else 1
    overrides = [
        "strategy=ddp",
        "callbacks=memonger",
        "callbacks.memonger.policy=budget",
        # A budget is for the batch that is trained with, and activations grow with it.
        f"callbacks.memonger.budget_bytes={round(factor * plan.held_bytes)}",
    ]
    return overrides + ([f"data.batch_size={factor * profile.batch_size * world_size}"] if is_larger else [])
