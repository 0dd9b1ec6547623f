"""Candidates for `choose_batch_size`: training steps, measured at each batch size."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from lightning_dp.planner.algorithms import BACKEND, require_not_compiled
from lightning_dp.planner.batch_size import Candidate, Choice, held_bytes
from lightning_dp.planner.checks import require_count
from lightning_dp.planner.layer_choices import convolution_choices
from lightning_dp.planner.measure import measure_peak_bytes, measure_time_s
from lightning_dp.planner.out_of_memory import unless_out_of_memory
from lightning_dp.planner.trace import num_bytes, tensors_of
from lightning_dp.planner.unchanged import unchanged
from lightning_dp.recompute.apply import PolicyName, apply_recompute, check_policy
from lightning_dp.recompute.tensors import tensors_in

log = logging.getLogger(__name__)

Loss = Callable[[nn.Module, Any], Tensor]


def mean_square(model: nn.Module, batch: Any) -> Tensor:
    """Return the mean square of the model's outputs: a loss for any model, whose backward takes as long as another."""
    outputs = tensors_in(model(*(batch if isinstance(batch, tuple) else (batch,))))
    return torch.stack([output.square().mean() for output in outputs if output.is_floating_point()]).sum()


def resized(batch: Any, batch_size: int) -> Any:
    """Return ``batch`` with each tensor's rows repeated or cut to ``batch_size``. Rows are the first dimension.

    Raises:
        ValueError: it holds no tensor that has rows, so that it would stay as it is.
    """
    found = False

    def resize(tensor: Tensor) -> Tensor:
        nonlocal found
        if tensor.dim() == 0:
            return tensor
        found = True
        rows = torch.arange(batch_size, device=tensor.device) % len(tensor)
        chosen = tensor.index_select(0, rows)
        if tensor.dim() == 4 and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=torch.channels_last):
            return chosen.contiguous(memory_format=torch.channels_last)
        return chosen

    result = apply_to_collection(batch, Tensor, resize, allow_frozen=True)
    if not found:
        raise ValueError(
            f"no images were found in the batch, a {type(batch).__name__}; give a tensor, or tensors in tuples, lists, "
            "mappings or dataclasses"
        )
    return result


@dataclass(frozen=True)
class StepMeasurement:
    """A training step without the optimizer.

    Attributes:
        time_s: forward and backward.
        total_bytes: most that is held at a time: parameters, buffers, gradients, batch and activations.
        recomputes: whether something was dropped and computed again.
    """

    time_s: float
    total_bytes: int
    recomputes: bool = False


def measure_step(
    model: nn.Module, batch: Any, loss: Loss = mean_square, recompute: PolicyName | None = None, repeats: int = 3
) -> StepMeasurement:
    """Run forward and backward of ``model``, and return time and memory. Model and gradients stay as they were.

    Args:
        model: in training mode.
        batch: its input, or whatever ``loss`` takes.
        loss: called with model and batch.
        recompute: a policy of `apply_recompute`.
        repeats: steps that are timed.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    device = parameters[0].device if parameters else torch.device("cpu")
    handle = None if recompute is None else apply_recompute(model, recompute)

    def step() -> None:
        for parameter in parameters:
            parameter.grad = None
        with torch.enable_grad():
            loss(model, batch).backward()

    try:
        with _gradients_kept(parameters), unchanged(model):
            time_s = measure_time_s(step, device, repeats)
            for parameter in parameters:
                parameter.grad = None  # so that the step allocates them, and they are counted
            peak_bytes = measure_peak_bytes(step, device)
    finally:
        if handle is not None:
            handle.remove()
    recomputes = handle is not None and handle.dropped_bytes > 0
    if recompute is not None and not recomputes:
        log.warning(
            "recompute=%r keeps everything in this step, so it is the step without: the policy finds nothing to drop "
            "in this model, or the loss does not call the model itself but a method or a part of it",
            recompute,
        )
    tensors = [*model.parameters(), *model.buffers(), *tensors_of(batch)]
    return StepMeasurement(time_s, peak_bytes + sum(map(num_bytes, tensors)), recomputes)


@contextmanager
def _gradients_kept(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    before = [parameter.grad for parameter in parameters]
    try:
        yield
    finally:
        for parameter, grad in zip(parameters, before, strict=True):
            parameter.grad = grad


def measure_candidates(
    model: nn.Module,
    batch: Any,
    batch_sizes: Sequence[int],
    memory_bytes: int,
    loss: Loss = mean_square,
    recompute: Sequence[PolicyName | None] = (None,),
    optimizer_bytes: int = 0,
    repeats: int = 3,
) -> list[Candidate]:
    """Measure a training step and its convolution layers at each batch size, for `choose_batch_size`.

    A step is run only if it fits into ``memory_bytes``, as far as the smaller steps tell: memory grows linearly with
    the batch. One that does not fit, or that the device refuses, ends the list of its policy. A step in which the
    policy drops nothing is no candidate: it is the step without.

    Args:
        model: in training mode.
        batch: an example: its images are repeated or left out to reach a batch size.
        batch_sizes: to be considered; images per device.
        memory_bytes: of the device, as far as training may use it.
        loss: see `measure_step`.
        recompute: policies of `Memonger` to be considered; None is training without it.
        optimizer_bytes: of the optimizer's state.
        repeats: steps that are timed.

    Raises:
        ValueError: not even the smallest batch fits, or no policy of ``recompute`` drops anything.
    """
    _check(model, batch_sizes, memory_bytes, recompute, optimizer_bytes)
    room_bytes = memory_bytes - optimizer_bytes
    candidates = []
    choices: dict[int, dict[str, list[Choice]]] = {}
    measured_bytes: list[int] = []
    for policy in recompute:
        totals: list[tuple[int, int]] = []
        for size in sorted(set(batch_sizes)):
            if _extrapolated(totals, size) > room_bytes:
                break
            images = resized(batch, size)
            step = unless_out_of_memory(partial(measure_step, model, images, loss, policy, repeats))
            if step is None:
                break
            if policy is not None and not step.recomputes:
                continue
            totals.append((size, step.total_bytes))
            measured_bytes.append(step.total_bytes)
            if step.total_bytes > room_bytes:
                break
            if size not in choices:
                choices[size] = convolution_choices(model, images, repeats, loss, room_bytes)
            candidates.append(_candidate(size, step, choices[size], room_bytes, policy or ""))
    if not candidates:
        need = "each one runs out of memory, or its recomputation drops nothing"
        if measured_bytes:
            need = f"the smallest needs about {min(measured_bytes) + optimizer_bytes} bytes"
        raise ValueError(
            f"memory_bytes={memory_bytes} holds none of batch_sizes={sorted(set(batch_sizes))} with "
            f"recompute={tuple(recompute)}: {need}; use smaller batches, or other policies, such as (None, 'cheap')"
        )
    return candidates


def _check(
    model: nn.Module,
    batch_sizes: Sequence[int],
    memory_bytes: int,
    recompute: Sequence[PolicyName | None],
    optimizer_bytes: int,
) -> None:
    """Raise ValueError for what no measurement can mend."""
    require_not_compiled(model)
    require_count("memory_bytes", memory_bytes)
    require_count("optimizer_bytes", optimizer_bytes, least=0)
    for size in batch_sizes:
        require_count("batch_sizes", size)
    if not batch_sizes or not recompute or isinstance(recompute, str) or len(set(recompute)) < len(recompute):
        raise ValueError(
            f"batch_sizes={batch_sizes!r}, recompute={recompute!r}: give at least one of each, such as (16, 32) and "
            "(None, 'cheap'), and none twice"
        )
    for policy in recompute:
        if policy is not None:
            check_policy(policy)


def _candidate(
    size: int, step: StepMeasurement, layers: dict[str, list[Choice]], memory_bytes: int, policy: str
) -> Candidate:
    """Take the backend's algorithms, with which the step was measured, out of its time and memory."""
    used = [next(choice for choice in found if choice.algorithm == BACKEND) for found in layers.values()]
    other_s = max(0.0, step.time_s - sum(choice.time_s for choice in used))
    bound_bytes = memory_bytes - (step.total_bytes - held_bytes(used))
    return Candidate(size, layers, bound_bytes, other_s, policy)


def _extrapolated(totals: Sequence[tuple[int, int]], size: int) -> int:
    """Return the memory at a batch size, on the line through the last two measurements; 0 if there are fewer."""
    if len(totals) < 2:
        return 0
    (small, small_bytes), (large, large_bytes) = totals[-2:]
    return large_bytes + (large_bytes - small_bytes) * (size - large) // (large - small)
