"""The batch size, and an algorithm for each layer: equation 6 of arXiv 1709.06622 as an integer linear program."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from lightning_dp.planner.formulas import require_count, require_not_negative


@dataclass(frozen=True)
class Choice:
    """One algorithm for one layer, at one batch size.

    Attributes:
        algorithm: its name.
        time_s: T_kl, forward and backward.
        num_bytes: M_kl, memory that it keeps from forward to backward, beyond what all algorithms keep.
        workspace_bytes: memory that it needs only while it runs. Layers run one after another, so that the largest
            workspace counts, not the sum.

    Raises:
        ValueError: a time or size is negative.
    """

    algorithm: str
    time_s: float
    num_bytes: int = 0
    workspace_bytes: int = 0

    def __post_init__(self) -> None:
        for name in ("time_s", "num_bytes", "workspace_bytes"):
            require_not_negative(f"{name} of {self.algorithm!r}", getattr(self, name))


Layers = Mapping[str, Sequence[Choice]]


@dataclass(frozen=True)
class Candidate:
    """What is known of a training step at one batch size.

    Attributes:
        batch_size: X_mini, images per device.
        layers: choices for each convolution layer.
        bound_bytes: M_bound, equation 5: memory that is left for the algorithms. Negative if the step does not fit.
        other_s: time of the step outside of these layers.
        recompute: how the step recomputes activations (`Memonger`), "" if it does not.
    """

    batch_size: int
    layers: Layers
    bound_bytes: int
    other_s: float = 0.0
    recompute: str = ""

    def __post_init__(self) -> None:
        require_count("batch_size", self.batch_size)
        require_not_negative("other_s", self.other_s)
        for name, choices in self.layers.items():
            if not choices:
                raise ValueError(f"layer {name!r} has no algorithm to choose from")


@dataclass(frozen=True)
class BatchPlan:
    """The best batch size, and how its layers are computed.

    Attributes:
        batch_size: images per device.
        algorithms: of each layer, for `apply_algorithms`.
        step_s: time of a step.
        held_bytes: of the algorithms' memory.
        bound_bytes: what they may hold.
        recompute: policy of `Memonger`, "" for none.
        images_per_s: by batch size and policy, for all candidates that fit.
        peak_bytes: most that the step holds, without the optimizer's state; None unless `plan_batch_size` has run it.
    """

    batch_size: int
    algorithms: dict[str, str]
    step_s: float
    held_bytes: int
    bound_bytes: int
    recompute: str = ""
    images_per_s: dict[tuple[int, str], float] = field(default_factory=dict)
    peak_bytes: int | None = None

    def table(self) -> str:
        """Return the candidates as a Markdown table, the fastest first."""
        lines = ["| batch size | recomputation | images/s |", "|---|---|---|"]
        ranked = sorted(self.images_per_s.items(), key=lambda item: -item[1])
        lines += [f"| {size} | {recompute or 'none'} | {rate:.1f} |" for (size, recompute), rate in ranked]
        return "\n".join(lines)


def held_bytes(chosen: Collection[Choice]) -> int:
    """Return the memory of these choices, one for each layer: what they keep, and the largest workspace."""
    return sum(choice.num_bytes for choice in chosen) + max((c.workspace_bytes for c in chosen), default=0)


def choose_algorithms(layers: Layers, bound_bytes: int) -> dict[str, Choice] | None:
    """Return the choice for each layer that takes the least time within ``bound_bytes``, or None if none fits.

    Equation 6: one algorithm for each layer, the least sum of their times, memory within the bound. Solved by HiGHS
    (SciPy). A workspace, which the paper does not tell from other memory, counts once: the largest.

    Raises:
        ModuleNotFoundError: SciPy is not installed.
    """
    limit = bound_bytes
    while limit >= 0:
        chosen = _solve(layers, limit)
        if chosen is None:
            return None
        excess = held_bytes(chosen.values()) - bound_bytes
        if excess <= 0:
            return chosen
        # The solver keeps to the bound up to its tolerance. Ask again with a bound that is that much smaller.
        limit -= excess + 1
    return None


def require_solver() -> None:
    """Raise ModuleNotFoundError, with the remedy, if SciPy is not installed."""
    try:
        import scipy.optimize  # noqa: F401
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("to choose algorithms needs SciPy: pip install scipy", name="scipy") from error


def _solve(layers: Layers, bound_bytes: int) -> dict[str, Choice] | None:
    require_solver()
    import numpy as np
    from scipy.optimize import Bounds, LinearConstraint, milp

    options = [(name, choice) for name, choices in layers.items() for choice in choices]
    if not options:
        return {}
    # Numbers near 1: the solver's tolerances are absolute.
    memory_scale = max(1.0, bound_bytes / 1e3)
    time_scale = sum(choice.time_s for _, choice in options) / 1e3 or 1.0
    # The last variable is the largest workspace.
    num_variables = len(options) + 1
    times = np.array([*(choice.time_s / time_scale for _, choice in options), 0.0])
    one_each = np.zeros((len(layers), num_variables))
    workspaces = np.zeros((len(options), num_variables))
    memory = np.zeros((1, num_variables))
    memory[0, -1] = 1.0
    rows = {name: row for row, name in enumerate(layers)}
    for place, (name, choice) in enumerate(options):
        one_each[rows[name], place] = 1.0
        memory[0, place] = choice.num_bytes / memory_scale
        workspaces[place, place], workspaces[place, -1] = choice.workspace_bytes / memory_scale, -1.0
    result = milp(
        times,
        constraints=[
            LinearConstraint(one_each, 1.0, 1.0),
            LinearConstraint(workspaces, -np.inf, 0.0),
            LinearConstraint(memory, -np.inf, bound_bytes / memory_scale),
        ],
        integrality=np.array([1] * len(options) + [0]),
        bounds=Bounds(0, np.array([1.0] * len(options) + [np.inf])),
        options={"mip_rel_gap": 0.0},
    )
    if result.x is None:
        return None
    # Solvers return 0.9999999 for 1.
    return {name: choice for (name, choice), x in zip(options, result.x[:-1], strict=True) if round(x)}


def choose_batch_size(candidates: Sequence[Candidate]) -> BatchPlan:
    """Return the batch size with the most images per second, and the algorithm of each layer (section 3.1.3).

    For each candidate `choose_algorithms` finds the least time; the best quotient of images and time wins. Of equal
    ones the smaller batch wins, because it converges in no more epochs. `plan_batch_size` also runs the plans.

    Args:
        candidates: for example from `measure_candidates`. Recomputation is a further choice: give two candidates of
            one batch size.

    Raises:
        ValueError: there is no candidate, two are alike, or none fits into memory.
        ModuleNotFoundError: SciPy is not installed.
    """
    keys = [(candidate.batch_size, candidate.recompute) for candidate in candidates]
    if not keys or len(set(keys)) < len(keys):
        raise ValueError(f"candidates={keys} must be different batch sizes, at least one; or differ in recompute")
    plans: list[BatchPlan] = []
    for candidate in sorted(candidates, key=lambda c: (c.batch_size, c.recompute)):
        chosen = choose_algorithms(candidate.layers, candidate.bound_bytes)
        if chosen is None:
            continue
        step_s = candidate.other_s + sum(choice.time_s for choice in chosen.values())
        plans.append(plan_of(candidate, chosen, step_s, candidate.bound_bytes))
    if not plans:
        raise ValueError(
            f"none of the batch sizes {sorted({size for size, _ in keys})} fits into memory; add smaller ones, or use "
            "recomputation"
        )
    return fastest(plans)


def plan_of(
    candidate: Candidate, chosen: Mapping[str, Choice], step_s: float, bound_bytes: int, peak_bytes: int | None = None
) -> BatchPlan:
    """Return the plan of a candidate with one choice for each layer. For what follows them, see `BatchPlan`."""
    names = algorithms_of(chosen)
    held = held_bytes(chosen.values())
    return BatchPlan(candidate.batch_size, names, step_s, held, bound_bytes, candidate.recompute, peak_bytes=peak_bytes)


def algorithms_of(chosen: Mapping[str, Choice]) -> dict[str, str]:
    """Return the name of each layer's algorithm."""
    return {layer: choice.algorithm for layer, choice in chosen.items()}


def fastest(plans: Sequence[BatchPlan]) -> BatchPlan:
    """Return the plan with the most images per second, and its ``images_per_s`` of all plans.

    Raises:
        ValueError: there is none, or one takes no time.
    """
    if not plans:
        raise ValueError("no plan fits into memory any more, as it did before; something else has used it up meanwhile")
    if any(plan.step_s <= 0 for plan in plans):
        raise ValueError("a candidate takes no time at all; give the times of its layers, or other_s")
    rates = {(plan.batch_size, plan.recompute): plan.batch_size / plan.step_s for plan in plans}
    best = max(plans, key=lambda plan: rates[plan.batch_size, plan.recompute])
    return replace(best, images_per_s=rates)
