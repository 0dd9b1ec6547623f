"""What to change in a job, and what it brings. Where the time of a step goes decides what is proposed.

- Loading: worker processes of the loader.
- Batch norm's waits: statistics of fewer ranks, or only in a part of training.
- Exposed communication: another method; `choose_plan` combines it with the two above.
- Compute: nothing. A larger batch, and Memonger where memory bounds it, are named, because they change the training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from lightning_dp.planner.network import Network
from lightning_dp.planner.simulation import METHODS, StepTime, simulate
from lightning_dp.planner.workload import WORTH_NAMING, StepProfile, Workload

# Images in the statistics of batch norm. From so many on, more make no difference that was found: section 4.3 of Liu et
# al. 2018, and docs/measurements/adaptive_global_batch_norm.md.
ENOUGH_IMAGES = 8


@dataclass(frozen=True)
class Change:
    """Something to change in a job besides its method.

    Attributes:
        what: as an order.
        overrides: for ``recipes/train.py``.
        sure: how sure it is that it saves as much as simulated.
        apply: returns the workload with the change.
    """

    what: str
    overrides: tuple[str, ...]
    sure: str
    apply: Callable[[Workload], Workload]


@dataclass(frozen=True)
class Advice:
    """A part of the plan.

    Attributes:
        what: to change, as an order.
        overrides: for ``recipes/train.py``.
        saves_s: of a step, after the changes before it.
        sure: how sure that is.
    """

    what: str
    overrides: tuple[str, ...]
    saves_s: float
    sure: str


def changes_for(profile: StepProfile, network: Network, world_size: int) -> list[Change]:
    """Return the changes for those parts of a step that are worth naming, the largest part first."""
    parts = profile.parts()
    found = {
        "loading": add_workers(profile),
        "batch norm's waits": share_statistics(profile, network, world_size),
    }
    named = [part for part in found if parts[part] >= WORTH_NAMING * profile.step_s]
    return [change for part in sorted(named, key=lambda p: -parts[p]) if (change := found[part]) is not None]


def add_workers(profile: StepProfile) -> Change | None:
    """Return the change to as many worker processes as hide loading; None if no core is free for one."""
    if profile.num_workers is None:
        return None
    # With workers, a batch is waited for because they are slower than the rank: one of them takes so long for a batch.
    batch_s = profile.load_s / profile.accumulate
    if profile.num_workers:
        batch_s = profile.num_workers * profile.step_s / profile.accumulate
    busy_s = (profile.step_s - profile.load_s) / profile.accumulate
    wanted = max(profile.num_workers + 1, math.ceil(batch_s / busy_s) if busy_s > 0 else 1)
    free = wanted if profile.cores_per_rank is None else int(profile.cores_per_rank) - 1
    number = min(wanted, free)
    if number <= profile.num_workers:
        return None
    cores = "if so many cores are free" if profile.cores_per_rank is None else f"{free} cores of each rank are free"
    return Change(
        f"Load batches in {number} worker process{'es' * (number > 1)} of each rank (now {profile.num_workers})",
        (f"data.num_workers={number}",),
        f"at most, {cores}",
        lambda workload: replace(workload, load_s=batch_s / number, loads_in_background=True),
    )


def share_statistics(profile: StepProfile, network: Network, world_size: int) -> Change | None:
    """Return the change to statistics of as few ranks as have `ENOUGH_IMAGES`; None if no more ranks share them now."""
    size = next(size for size in range(1, world_size + 1) if _is_group(size, profile, network, world_size))
    present = min(profile.statistics_ranks or world_size, world_size)
    if size >= present or not profile.batch_norm_s:
        return None
    before_s, after_s = network.small_exchange_s(present), network.small_exchange_s(size)
    left = after_s / before_s if before_s else 0.0
    exchanges = 2 * profile.accumulate * profile.num_batch_norms
    messages_s = min(exchanges * (before_s - after_s), (1 - left) * profile.batch_norm_s)
    whose = "each rank's own batch" if size == 1 else f"groups of {size} ranks"
    return Change(
        f"Take batch norm's statistics from {whose} ({size * profile.batch_size} images; {ENOUGH_IMAGES} are enough)",
        (f"callbacks.adaptive_global_batch_norm.group_size={size}",),
        f"at least {1e3 * messages_s:.1f} ms, the messages; the rest are waits for slower ranks, and may move",
        lambda workload: replace(workload, batch_norm_s=left * workload.batch_norm_s),
    )


def _is_group(size: int, profile: StepProfile, network: Network, world_size: int) -> bool:
    """Return whether groups of ``size`` ranks have enough images, and fill the nodes and the job; or are the job."""
    per_node = network.ranks_per_node
    is_whole = world_size % size == 0 and (per_node % size == 0 or size % per_node == 0)
    return size == world_size or (is_whole and size * profile.batch_size >= ENOUGH_IMAGES)


@dataclass(frozen=True)
class Plan:
    """Changes and a method that go together.

    Attributes:
        changes: besides the method.
        method: in `METHODS`.
        workload: with the changes.
        time: as simulated.
        error: expected relative error of the time.
    """

    changes: tuple[Change, ...]
    method: str
    workload: Workload
    time: StepTime
    error: float

    @property
    def images_per_s(self) -> float:
        """Of all ranks."""
        return self.time.images_per_s

    @property
    def num_changes(self) -> int:
        """How many things differ from plain DDP."""
        return len(self.changes) + (self.method != "ddp")


def are_equal(time: StepTime, error: float, other: StepTime, other_error: float) -> bool:
    """Return whether two predictions differ by less than the error of the one that is less sure."""
    rates = sorted((time.images_per_s, other.images_per_s))
    return rates[1] <= rates[0] * (1 + max(error, other_error))


def choose_plan(
    workload: Workload,
    network: Network,
    world_size: int,
    changes: Sequence[Change],
    methods: Sequence[str],
    error_of: Callable[[str], float],
) -> Plan:
    """Return the plainest of the plans that are as fast as the fastest: with the fewest changes, then the first method.

    Args:
        workload: the job as it is.
        network: the links.
        world_size: number of ranks.
        changes: which may be made, each with or without the others.
        methods: which may be used, the plainest first.
        error_of: expected relative error of a method's time.
    """
    plans = []
    for number in range(len(changes) + 1):
        for chosen in combinations(changes, number):
            changed = apply_changes(workload, chosen)
            for name in methods:
                time = simulate(changed, network, world_size, name)
                plans.append(Plan(chosen, name, changed, time, error_of(name)))
    fastest = max(plans, key=lambda plan: plan.images_per_s)
    equal = [plan for plan in plans if are_equal(plan.time, plan.error, fastest.time, fastest.error)]
    return min(equal, key=lambda plan: (plan.num_changes, methods.index(plan.method), -plan.images_per_s))


def apply_changes(workload: Workload, changes: Sequence[Change]) -> Workload:
    """Return the workload with all of the changes."""
    for change in changes:
        workload = change.apply(workload)
    return workload


def advice_of(
    plan: Plan, workload: Workload, network: Network, world_size: int, reason: str, overrides: Sequence[str]
) -> tuple[Advice, ...]:
    """Return the parts of a plan, each with what it saves after those before it. The method is the last part.

    Args:
        plan: what is proposed.
        workload: the job without the plan.
        network: the links.
        world_size: number of ranks.
        reason: why the method is as fast as it is.
        overrides: of the method.
    """
    images = workload.batch_size * workload.accumulate * world_size
    rate = simulate(workload, network, world_size, "ddp").images_per_s
    advice = []
    for number, change in enumerate(plan.changes, 1):
        changed = apply_changes(workload, plan.changes[:number])
        next_rate = simulate(changed, network, world_size, "ddp").images_per_s
        advice.append(Advice(change.what, change.overrides, images / rate - images / next_rate, change.sure))
        rate = next_rate
    if plan.method != "ddp":
        saves_s = images / rate - images / plan.images_per_s
        advice.append(Advice(f"Use {plan.method}: {reason}", tuple(overrides), saves_s, f"± {plan.error:.0%}"))
    return tuple(advice)


def larger_batch_gain(plan: Plan, network: Network, world_size: int) -> float:
    """Return by how much more images per second twice the batch has, with the method and changes of a plan."""
    method = replace(METHODS[plan.method], recompute="")
    now = simulate(plan.workload, network, world_size, method)
    return simulate(plan.workload.larger(2), network, world_size, method).images_per_s / now.images_per_s - 1


# How far off predicted step times are: mean absolute errors over the 20 cells of `benchmarks/planner_choices.py`
# (2026-11-26), in a run without real-time priority. docs/measurements/planner.md says how they have become smaller.

# (data-parallel methods and the hybrid's scheme a; schemes b and c, compressors but those of 16 bits, layered FSDP)
OWN_CORES = (0.035, 0.083)  # the cells of four hosts with one rank each
SHARED_CORES = (0.065, 0.110)  # the cells of two ranks on a host, and of eight hosts: more ranks than cores are free
# Beside its computation a rank needs a core for messages.
ENOUGH_CORES = 2


def expected_error(name: str, cores_per_rank: float | None) -> float:
    """Return the expected relative error of a predicted step time.

    Args:
        name: in `METHODS`.
        cores_per_rank: processor cores of a machine over its ranks. None: enough.
    """
    method = METHODS[name]
    is_plain = method.scheme not in ("b", "c") or method.family != "hybrid"
    is_plain = is_plain and method.compression not in ("int8", "power_sgd") and method.family != "layered_fsdp"
    errors = OWN_CORES if cores_per_rank is None or cores_per_rank >= ENOUGH_CORES else SHARED_CORES
    return errors[0] if is_plain else errors[1]


def was_measured(name: str) -> bool:
    """Return whether the method was among those of the cells. Others are given the error of those like them."""
    method = METHODS[name]
    return not method.recompute and not method.global_batch_norm and method.family != "layered_fsdp"
