"""What to change in a measured job, and what each method would make of its step: a text, a plot, and the plan file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lightning_dp.planner.advice import (
    Advice,
    Plan,
    add_workers,
    advice_of,
    are_equal,
    changes_for,
    choose_plan,
    expected_error,
    larger_batch_gain,
    was_measured,
)
from lightning_dp.planner.formulas import amdahl_efficiency
from lightning_dp.planner.network import Link, Network
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
from lightning_dp.planner.workload import WORTH_NAMING, StepProfile, Workload, joined

PLAN_VERSION = 1
ALONE = Network(Link(0.0, 1.0), Link(0.0, 1.0))  # of one rank, which sends nothing


@dataclass(frozen=True)
class Prediction:
    """A method, the time of its step, and why.

    Attributes:
        method: its name in `METHODS`.
        time: as simulated, with the changes of the plan.
        reason: one sentence.
        error: expected relative error of the time.
    """

    method: str
    time: StepTime
    reason: str
    error: float


@dataclass(frozen=True)
class Diagnosis:
    """Where a job's step goes, what to change, and where each method would bring it.

    Attributes:
        profile: what was measured.
        network: the links, measured or given. None if one rank is asked about.
        world_size: number of ranks that the predictions are for.
        predictions: the most images per second first.
        plan: the changes and the method that are proposed.
        advice: the parts of the plan.
        now: the job as it is, but with DDP, as simulated.
        is_present_job: whether the predictions are for the measured ranks and their own network.
        gain_of_larger_batch: by how much more images per second the plan has with twice the batch.
    """

    profile: StepProfile
    network: Network | None
    world_size: int
    predictions: tuple[Prediction, ...]
    plan: Plan
    advice: tuple[Advice, ...]
    now: StepTime
    is_present_job: bool
    gain_of_larger_batch: float

    @property
    def best(self) -> Prediction | None:
        """The row of the plan. None if one rank is asked about."""
        return next((p for p in self.predictions if p.method == self.plan.method), None)

    def __str__(self) -> str:
        profile = self.profile
        worst = max(profile.parts().items(), key=lambda part: part[1])
        batches = f" in each of {profile.accumulate} batches" if profile.accumulate > 1 else ""
        ratio = profile.overhead_ratio
        sections = [
            f"{profile.strategy}, {profile.world_size} ranks, {profile.batch_size} images per rank{batches}: "
            f"{worst[1] / profile.step_s:.0%} of a step is {worst[0]} ({profile.num_steps} steps measured).",
            self._advice_text(),
            *self._on_request(),
            profile.table(),
            f"Overhead ratio (Lemma 3.1): {ratio:.3f}. {_efficiencies(ratio)}",
            self._rows() if self.predictions else
            "One rank needs no network. To predict for more: Diagnose(network=..., world_size=...).",
            *self._notes(),
        ]  # fmt: skip
        return "\n\n".join(sections)

    def _advice_text(self) -> str:
        """Return what to change, what it brings and how sure that is."""
        plan, error = self.plan, f"± {self.plan.error:.0%}"
        now = f"{1e3 * self.now.step_s:.1f} ms per step (simulated)"
        if self.is_present_job:
            now = (
                f"{1e3 * self.profile.step_s:.1f} ms per step (measured; {1e3 * self.now.step_s:.1f} simulated as DDP)"
            )
        if not self.advice:
            keep = "keep" if self.profile.strategy == "DDPStrategy" else "use"
            what = f": {keep} {plan.method}" if self.predictions else ""  # one rank needs no method
            return (
                f"**Nothing to gain{what}.** No other method or change is predicted to save more of "
                f"{now} than the error of the prediction, {error}."
            )
        rows = [
            f"| {part.what} | `{' '.join(part.overrides)}` | {1e3 * part.saves_s:.1f} ms | {part.sure} |"
            for part in self.advice
        ]
        # A step of the plan may have more images.
        as_many_s = self.now.step_s * self.now.images_per_s / plan.images_per_s
        become = f"**{now} become {1e3 * as_many_s:.1f} ms for as many images (simulated, {error})**"
        header = ["| change | override | saves | how sure |", "|---|---|---|---|"]
        return "\n".join([f"{become}, {plan.images_per_s:.1f} images/s:", "", *header, *rows])

    def _on_request(self) -> list[str]:
        """Return what would be faster than the plan, but changes what is computed, or is for models that do not fit."""
        plan, lines = self.plan, []
        faster = [
            p
            for p in self.predictions
            if overrides_of(p.method, self.profile, self.world_size)
            and p.time.images_per_s > plan.images_per_s
            and not are_equal(p.time, p.error, plan.time, plan.error)
        ]
        if faster:
            equal = [p for p in faster if are_equal(p.time, p.error, faster[0].time, faster[0].error)]
            named = min(equal, key=lambda p: not METHODS[p.method].is_exact)
            what = "the same result" if METHODS[named.method].is_exact else "another result"
            lines.append(
                f"- `plan.method={named.method}`, {what}: {_ratio(named.time, plan.time)} the time for as many images. "
                f"{named.reason}"
            )
        if self.gain_of_larger_batch > plan.error:
            lines.append(
                f"- Twice the batch: {self.gain_of_larger_batch:.0%} more images/s (simulated). `FindBatchSize()` "
                "measures which size fits and is the fastest; Memonger makes room where memory bounds it."
            )
        waits_s = self.profile.batch_norm_s
        keeps_waits = plan.workload.batch_norm_s == self.profile.workload().batch_norm_s
        if keeps_waits and waits_s >= WORTH_NAMING * self.profile.step_s:
            lines.append(
                "- `callbacks.adaptive_global_batch_norm.global_phase=after_converged`: statistics are local until "
                f"training has converged, which saves up to {1e3 * waits_s:.1f} ms per step until then."
            )
        return ["\n".join(["Faster, on request only:", *lines])] if lines else []

    def _rows(self) -> str:
        """Return the table of methods: first that of the plan, then the others, the fastest first."""
        changes = f", with {' '.join(o for c in self.plan.changes for o in c.overrides)}" if self.plan.changes else ""
        job = f"{self.world_size} ranks of {self.profile.batch_size} images{changes}"
        lines = [
            f"Simulated, {job}; the first row is the plan:",
            "",
            "| method | ms per step | error | images/s | time against the plan | why |",
            "|---|---|---|---|---|---|",
        ]
        for p in sorted(self.predictions, key=lambda p: p.method != self.plan.method):
            is_equal = are_equal(p.time, p.error, self.plan.time, self.plan.error)
            against = "equal" if is_equal else _ratio(p.time, self.plan.time)
            error = f"± {p.error:.0%}" + ("" if was_measured(p.method) else " (of methods like it)")
            times = f"{1e3 * p.time.step_s:.1f} | {error} | {p.time.images_per_s:.1f} | {against}"
            lines.append(f"| {p.method} | {times} | {p.reason} |")
        return "\n".join(lines)

    def _notes(self) -> list[str]:
        """Return what a reader must know of the rows."""
        profile, lines = self.profile, []
        if profile.load_s >= WORTH_NAMING * profile.step_s and add_workers(profile) is None:
            lines.append(
                f"No worker process is proposed for the {1e3 * profile.load_s:.1f} ms of loading: the loader has no "
                "option for it, or no core is free."
            )
        if profile.waits_for_workers:
            lines.append(
                f"The step waits for {profile.num_workers} worker process(es) of the loader: no method alone is faster."
            )
        if profile.unmeasured:
            lines.append(f"Not measured, and so part of compute here: {' and '.join(profile.unmeasured)}.")
        if self.predictions and self.world_size != profile.world_size:
            lines.append(
                f"Each of the {self.world_size} ranks has as many images as measured, {profile.batch_size}. With data "
                "of this package, whose `data.batch_size` is that of all ranks, it is "
                f"{self.world_size * profile.batch_size}."
            )
        if profile.batch_norm_s and self.world_size != profile.world_size:
            lines.append(f"Batch norm's waits are those of {profile.world_size} ranks. More ranks wait longer.")
        network = self.network
        if network is not None and _has_one_link(network) and self.world_size > network.ranks_per_node:
            lines.append("Links between nodes count as fast as those within one; give others: Diagnose(network=...).")
        if profile.why_no_recomputation:
            lines.append(f"Memonger is not among them: {profile.why_no_recomputation}")
        unplaced = sum(layer.num_bytes for layer in profile.layers if not layer.forward_s)
        total = sum(layer.num_bytes for layer in profile.layers)
        if total and unplaced / total >= WORTH_NAMING:
            lines.append(
                f"{unplaced / total:.0%} of the gradients' bytes belong to no module that the forward calls; they are "
                "simulated as the last ones of backward."
            )
        return lines

    def save(self, path: str | Path) -> None:
        """Write the plan: what to override in the recipes, and the figures behind it.

        The file is YAML, in the part of it that is also JSON.

        Raises:
            ValueError: one rank is asked about, and there is nothing to change.
        """
        overrides = [override for change in self.plan.changes for override in change.overrides]
        if self.best is not None:
            overrides = [*(overrides_of(self.plan.method, self.profile, self.world_size) or []), *overrides]
        if not overrides:
            raise ValueError("there is no plan: no method was predicted; use Diagnose(network=..., world_size=...)")
        num_batches = self.world_size * self.profile.accumulate
        values = {
            "version": PLAN_VERSION,
            "overrides": overrides,
            "method": self.plan.method,
            "world_size": self.world_size,
            "images_per_rank": round(self.plan.images_per_s * self.plan.time.step_s / num_batches),
            "step_ms": round(1e3 * self.plan.time.step_s, 3),
            "error": self.plan.error,
            "advice": [{**vars(part), "overrides": list(part.overrides)} for part in self.advice],
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

        from lightning_dp.planner.plots import colors_of, label_lines

        if self.network is None:
            raise ValueError("no network is known; give it, Diagnose(network=...)")
        per_node = self.network.ranks_per_node
        sizes = world_sizes or [per_node * 2**power for power in range(8)]
        figure = Figure(figsize=(7.2, 4.4), layout="constrained")
        axes = figure.subplots()
        ends = []
        for prediction, color in zip(self.predictions, colors_of(p.method for p in self.predictions), strict=True):
            rates = [simulate(self.plan.workload, self.network, size, prediction.method).images_per_s for size in sizes]
            images = self.profile.batch_size * self.profile.accumulate
            times = [1e3 * size * images / rate for size, rate in zip(sizes, rates, strict=True)]
            axes.plot(sizes, times, "o-", markersize=3, color=color)
            ends.append((prediction.method, sizes[-1], times[-1], color))
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(size) for size in sizes])
        unknown = "; links between nodes as fast as within one" if _has_one_link(self.network) else ""
        axes.set_xlabel(f"ranks{unknown}")
        axes.set_ylabel(f"simulated step time, {self.profile.batch_size} images per rank")
        axes.yaxis.set_major_formatter("{x:g} ms")
        axes.set_ylim(bottom=0)
        label_lines(axes, ends)
        figure.savefig(path, dpi=120)


def read_overrides(path: str | Path) -> list[str]:
    """Return the overrides of a plan file, for the command line of ``recipes/train.py``.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is no plan of this version.
    """
    overrides: list[str] = read_plan(path)["overrides"]
    return overrides


def read_plan(path: str | Path) -> dict[str, Any]:
    """Return all that a plan file holds. For what it raises, see `read_overrides`."""
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
    return dict(plan)


def make_diagnosis(
    profile: StepProfile,
    network: Network | None,
    world_size: int | None = None,
    method: str | None = None,
    is_probed: bool = False,
) -> Diagnosis:
    """Choose a plan for a measured job, and simulate all methods that apply to it.

    Args:
        profile: what was measured.
        network: the links; None if they are not known.
        world_size: number of ranks to predict for; by default, those of the job.
        method: the one that the plan is for. None: any that computes what DDP computes.
        is_probed: whether the network was measured between the ranks of the job.

    Raises:
        ValueError: the job or the recipes do not have the method.
    """
    size = profile.world_size if world_size is None else world_size
    if network is None or size == 1:
        network, size = ALONE, 1
    is_alone = size == 1
    workload = profile.workload()
    names = ["ddp"] if is_alone else _methods_for(workload, network, size)
    usable = _usable(names, method, profile, size)
    is_present_job = (is_probed or is_alone) and size == profile.world_size
    least_error = 0.0
    if is_present_job and (is_alone or profile.strategy == "DDPStrategy"):  # the simulated step was measured
        workload, least_error = _with_rest(workload, profile, network)
    now = simulate(workload, network, size, "ddp")

    def error_of(name: str) -> float:
        return max(least_error, expected_error(name, profile.cores_per_rank))

    plan = choose_plan(workload, network, size, changes_for(profile, network, size), usable, error_of)
    predictions = []
    for name in () if is_alone else names:
        time = simulate(plan.workload, network, size, name)
        predictions.append(Prediction(name, time, reason(name, plan.workload, network, size, time), error_of(name)))
    why = reason(plan.method, plan.workload, network, size, plan.time)
    advice = advice_of(plan, workload, network, size, why, overrides_of(plan.method, profile, size) or [])
    rows = tuple(sorted(predictions, key=lambda p: -p.time.images_per_s))
    gain = larger_batch_gain(plan, network, size)
    return Diagnosis(profile, None if is_alone else network, size, rows, plan, advice, now, is_present_job, gain)


def _usable(names: Sequence[str], method: str | None, profile: StepProfile, world_size: int) -> list[str]:
    """Return the methods that a plan may choose among: ``method``, or those that compute what DDP computes.

    Raises:
        ValueError: the job or the recipes do not have the method.
    """
    has_plan = [name for name in names if overrides_of(name, profile, world_size)]
    if method is None:
        # Layered FSDP is for models that do not fit on a device, which is not known here.
        return [name for name in has_plan if METHODS[name].is_exact and METHODS[name].family != "layered_fsdp"]
    if method not in has_plan:
        is_alone = world_size == 1
        remedy = ". On one rank no other is predicted: give Diagnose(network=..., world_size=...)" if is_alone else ""
        raise ValueError(f"there is no plan for method={method!r}; use one of {', '.join(has_plan)}{remedy}")
    return [method]


def _with_rest(workload: Workload, profile: StepProfile, network: Network) -> tuple[Workload, float]:
    """Return the workload with what the measured step takes beyond its simulation, and the error of the latter.

    What the simulation does not know of DDP is then in all rows, and none is surer than that of the measured step.
    """
    rest_s = profile.step_s - simulate(workload, network, profile.world_size, "ddp").step_s
    return replace(workload, rest_s=max(0.0, rest_s)), abs(rest_s) / profile.step_s


def _methods_for(workload: Workload, network: Network, world_size: int) -> list[str]:
    names = [name for name, method in METHODS.items() if method.applies_to(workload)]
    without = {"layered_sgd", "layered_fsdp"} if network.num_nodes(world_size) == 1 else set()
    if network.ranks_per_node == 1:  # over which nothing can be sharded
        without.add("layered_fsdp")
    return [name for name in names if METHODS[name].family not in without]


def _has_one_link(network: Network) -> bool:
    """Return whether links between nodes count as fast as those within one: on one node a probe finds no others."""
    return network.ranks_per_node > 1 and network.inter == network.intra


def _ratio(time: StepTime, other: StepTime) -> str:
    return f"{other.images_per_s / time.images_per_s:.2f} x"


def _efficiencies(ratio: float) -> str:
    if ratio == float("inf"):
        return "Nothing is computed that more GPUs could divide."
    values = ", ".join(f"{amdahl_efficiency(size, ratio):.0%} on {size}" for size in (2, 4, 8))
    return f"If it stayed so, efficiency would be {values} GPUs."


# A sentence for each method: why its step takes as long as it does.

ROUNDED = {"bf16": ", rounded to 16 bits", "int8": ", rounded to 8 bits", "power_sgd": ", as factors of rank 4"}


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
    gradients = joined(workload.whole().blocks)
    rounded = ROUNDED.get(str(method.compression), "")
    if codec_s := workload.codec_s.get(str(method.compression), 0.0):
        codec_s /= network.ranks_per_node if method.family == "layered_fsdp" else 1  # each rank compresses its shard
        rounded += f" in {1e3 * codec_s:.0f} ms of processor time"
    if method.family in ("layered_sgd", "layered_fsdp"):
        between_s = inter_group_s(gradients, method, network, world_size)
        behind = "loading" if method.overlap == "load" else "loading, backward and the next forward"
        hides = f"Hides {1e3 * between_s:.0f} ms between nodes{rounded}, behind {behind}; {waits}."
        if method.family == "layered_sgd":
            return hides
        ranks = network.ranks_per_node
        return f"Each of a node's {ranks} ranks holds 1/{ranks} of parameters, gradients and optimizer states. {hides}"
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
        return (
            f"DDP that holds {held:.1f} of {plain:.1f} MB of activations for {1e3 * plan.recompute_s:.0f} ms of "
            f"compute and {1e3 * plan.record_s:.0f} ms of recording; {waits}."
        )
    images = plan.batch_factor * workload.batch_size
    return (
        f"{images} images per rank in the {plain:.1f} MB of activations of {workload.batch_size}, for one all-reduce "
        f"of {workload.gradient_bytes / 1e6:.1f} MB; {waits}."
    )


# What `recipes/train.py` is told to use a method.

# The recipes have no option for the others: Lightning ignores communication hooks of DDP on CPU.
WITH_PLAN = tuple(
    name
    for name, method in METHODS.items()
    if method.family != "ddp" or (method.compression == 1.0 and method.all_reduce == "native")
)
STRATEGIES = {"hybrid": "krizhevsky_hybrid"}  # the others have the name of their family
POWER_SGD = "{_target_:lightning_dp.strategies.PowerSGD,rank:4}"
# Added to the job's callbacks: `callbacks=agbn` would take away its Memonger, `callbacks=memonger` its batch norm.
PLATEAU = "{_target_:lightning_dp.Plateau,monitor:train/loss,patience:3,min_delta:0.001,mode:min}"
GLOBAL_BATCH_NORM = (
    f"++callbacks.adaptive_global_batch_norm={{_target_:lightning_dp.AdaptiveGlobalBatchNorm,convergence:{PLATEAU}}}"
)


def overrides_of(name: str, profile: StepProfile, world_size: int) -> list[str] | None:
    """Return the overrides for a method, None if the recipes do not have it, or the job has no plan for it.

    Args:
        name: in `METHODS`.
        profile: the measured job.
        world_size: number of ranks that will train. ``data.batch_size`` counts the images of all of them.
    """
    method, plan = METHODS[name], profile.recomputation
    if name not in WITH_PLAN or (method.recompute and plan is None):
        return None
    overrides = [f"strategy={STRATEGIES.get(method.family, method.family)}"]
    if method.family == "hybrid":
        overrides.append(f"strategy.scheme={method.scheme}")
    if method.family in ("layered_sgd", "layered_fsdp"):
        overrides.append(f"strategy.overlap={method.overlap}")
    if method.communicator != "leader":
        overrides.append(f"strategy.communicator={method.communicator}")
    if method.compression != 1.0:
        compressor = POWER_SGD if method.compression == "power_sgd" else method.compression
        overrides.append(f"strategy.compression={compressor}")
    if method.accumulate > 1:
        overrides.append(f"trainer.accumulate_grad_batches={method.accumulate * profile.accumulate}")
    if method.global_batch_norm:
        overrides.append(GLOBAL_BATCH_NORM)
    if method.recompute and plan is not None:
        factor = plan.batch_factor if method.recompute == LARGER_BATCH else 1
        # A budget is for the batch that is trained with, and activations grow with it.
        memonger = f"_target_:lightning_dp.Memonger,policy:budget,budget_bytes:{round(factor * plan.held_bytes)}"
        overrides.append(f"++callbacks.memonger={{{memonger}}}")
        if method.recompute == LARGER_BATCH:
            overrides.append(f"data.batch_size={factor * profile.batch_size * world_size}")
    return overrides
