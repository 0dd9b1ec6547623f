"""Plans of equation 6, run: layers that were measured alone do not tell what they cost together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from lightning_dp.planner.algorithms import BACKEND, apply_algorithms
from lightning_dp.planner.batch_size import (
    BatchPlan,
    Candidate,
    Choice,
    choose_algorithms,
    fastest,
    held_bytes,
    require_solver,
)
from lightning_dp.planner.candidates import (
    Loss,
    StepMeasurement,
    mean_square,
    measure_candidates,
    measure_step,
    resized,
)
from lightning_dp.planner.out_of_memory import unless_out_of_memory
from lightning_dp.recompute.apply import PolicyName

# Of the plans of equation 6 for one candidate, each with the memory that the one before has left for algorithms.
NUM_PLANS = 3
# One algorithm in all layers is run if the layers, measured alone, take up to this many times the least.
WORTH_A_TRIAL = 1.5


def plan_batch_size(
    model: nn.Module,
    batch: Any,
    batch_sizes: Sequence[int],
    memory_bytes: int,
    loss: Loss = mean_square,
    recompute: Sequence[PolicyName | None] = (None,),
    optimizer_bytes: int = 0,
    repeats: int = 3,
) -> BatchPlan:
    """Return the batch size, algorithms and recomputation with the most images per second, each plan measured.

    Equation 6 (arXiv 1709.06622) adds up layers that were measured alone. In the network, a layer's input often has the
    memory format of its algorithm already, so that the sum is too large. Therefore the plans of each candidate are run:
    that of equation 6, again with the memory that it really leaves, and one algorithm in all layers, unless the layers
    by themselves take more than 1.5 times the least with it. Losses that contain gradients cannot be planned.

    Args:
        model: in training mode. It stays as it was.
        batch: an example: its images are repeated or left out to reach a batch size.
        batch_sizes: to be considered; images per device.
        memory_bytes: of the device, as far as training may use it.
        loss: called with model and batch.
        recompute: policies of `Memonger` to be considered; None is training without it.
        optimizer_bytes: of the optimizer's state.
        repeats: steps that are timed.

    Raises:
        ValueError: no batch fits into ``memory_bytes``.
        ModuleNotFoundError: SciPy is not installed.
    """
    require_solver()
    candidates = measure_candidates(
        model, batch, batch_sizes, memory_bytes, loss, recompute, optimizer_bytes=optimizer_bytes, repeats=repeats
    )
    return fastest(measure_plans(model, batch, candidates, memory_bytes - optimizer_bytes, loss, repeats))


def measure_plans(
    model: nn.Module,
    batch: Any,
    candidates: Sequence[Candidate],
    memory_bytes: int,
    loss: Loss = mean_square,
    repeats: int = 3,
) -> list[BatchPlan]:
    """Return the fastest plan of each candidate, as measured. A candidate with none within ``memory_bytes`` has none.

    Args:
        model: see `plan_batch_size`.
        batch: see `plan_batch_size`.
        candidates: what `measure_candidates` has made of them.
        memory_bytes: of the device, without the optimizer's state.
        loss: see `plan_batch_size`.
        repeats: see `plan_batch_size`.
    """
    plans = []
    for candidate in candidates:
        trials = _Trials(model, resized(batch, candidate.batch_size), candidate, memory_bytes, loss, repeats)
        trials.run_planned()
        trials.run_uniform()
        plans += trials.fastest()
    return plans


class _Trials:
    """Runs plans of one candidate, each once."""

    def __init__(
        self, model: nn.Module, batch: Any, candidate: Candidate, memory_bytes: int, loss: Loss, repeats: int
    ) -> None:
        self._model, self._batch, self._loss, self._repeats = model, batch, loss, repeats
        self._candidate, self._memory_bytes = candidate, memory_bytes
        self._steps: dict[tuple[str, ...], StepMeasurement] = {}
        self._fitting: list[BatchPlan] = []

    def fastest(self) -> list[BatchPlan]:
        """Return the fastest plan that fits, or nothing."""
        return sorted(self._fitting, key=lambda plan: plan.step_s)[:1]

    def run_planned(self) -> None:
        """Run the plan of equation 6, and again with the memory that it really leaves."""
        bound_bytes = self._candidate.bound_bytes
        for _ in range(NUM_PLANS):
            chosen = choose_algorithms(self._candidate.layers, bound_bytes)
            if chosen is None:
                break
            other_bytes = self._run(chosen).total_bytes - held_bytes(list(chosen.values()))
            bound_bytes = self._memory_bytes - other_bytes

    def run_uniform(self) -> None:
        """Run each algorithm in all layers that it can compute, unless they are slow by themselves.

        The backend's always: the candidate was measured with it, so that it fits.
        """
        layers = self._candidate.layers
        least_s = sum(min(choice.time_s for choice in choices) for choices in layers.values())
        for algorithm in dict.fromkeys(choice.algorithm for choices in layers.values() for choice in choices):
            chosen = {
                name: next((c for c in choices if c.algorithm == algorithm), choices[0])  # BACKEND is the first
                for name, choices in layers.items()
            }
            alone_s = sum(choice.time_s for choice in chosen.values())
            if algorithm == BACKEND or alone_s <= WORTH_A_TRIAL * least_s:
                self._run(chosen)

    def _run(self, chosen: Mapping[str, Choice]) -> StepMeasurement:
        names = {name: choice.algorithm for name, choice in chosen.items()}
        key = tuple(names.values())
        if key not in self._steps:
            step = self._steps[key] = self._measure(names)
            if step.total_bytes <= self._memory_bytes:
                self._fitting.append(
                    BatchPlan(
                        self._candidate.batch_size,
                        names,
                        step.time_s,
                        held := held_bytes(list(chosen.values())),
                        self._memory_bytes - (step.total_bytes - held),
                        self._candidate.recompute,
                        peak_bytes=step.total_bytes,
                    )
                )
        return self._steps[key]

    def _measure(self, algorithms: Mapping[str, str]) -> StepMeasurement:
        recompute: Any = self._candidate.recompute or None
        handle = apply_algorithms(self._model, algorithms)
        try:
            step = unless_out_of_memory(
                lambda: measure_step(self._model, self._batch, self._loss, recompute, self._repeats)
            )
        finally:
            handle.remove()
        return step or StepMeasurement(float("inf"), self._memory_bytes + 1)
