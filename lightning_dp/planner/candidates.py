"""Candidates for `choose_batch_size`, measured: each layer's algorithms, and the step around them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dp.planner.algorithms import BACKEND, algorithms_for, convolve
from lightning_dp.planner.batch_size import Candidate, Choice, held_bytes
from lightning_dp.planner.checks import require_count
from lightning_dp.planner.measure import measure_memory, measure_peak_bytes, measure_time_s
from lightning_dp.planner.trace import num_bytes, trace_layers
from lightning_dp.recompute.activations import unchanged
from lightning_dp.recompute.apply import PolicyName, apply_recompute
from lightning_dp.recompute.tensors import tensors_in

Loss = Callable[[nn.Module, Any], Tensor]


def mean_square(model: nn.Module, batch: Any) -> Tensor:
    """Return the mean square of the model's outputs: a loss for any model, whose backward takes as long as another."""
    outputs = tensors_in(model(*(batch if isinstance(batch, tuple) else (batch,))))
    return torch.stack([output.square().mean() for output in outputs if output.is_floating_point()]).sum()


def measure_convolution(
    module: nn.Conv2d,
    input_shape: Sequence[int],
    algorithm: str,
    needs_input_grad: bool = True,
    repeats: int = 3,
) -> Choice:
    """Run a convolution layer forward and backward with one algorithm, and return its time and memory.

    Converting the input to the algorithm's memory format is part of both. Input, filters, output and their gradients
    are not part of the memory: all algorithms need them.

    Args:
        module: a layer.
        input_shape: (N, C, H, W), batch included.
        algorithm: one of `algorithms_for`.
        needs_input_grad: False for the first layer of a model.
        repeats: steps that are timed.
    """
    weight = module.weight
    x = torch.randn(*input_shape, dtype=weight.dtype, device=weight.device, requires_grad=needs_input_grad)
    wanted = [tensor for tensor in (x, *module.parameters()) if tensor.requires_grad]

    def forward() -> Tensor:
        with torch.enable_grad():
            return convolve(module, x, algorithm)

    cotangent = torch.randn_like(forward())

    def backward(out: Tensor) -> Any:
        return torch.autograd.grad(out, wanted, cotangent, retain_graph=True)

    time_s = measure_time_s(lambda: backward(forward()), weight.device, repeats)
    there = measure_memory(forward, weight.device)
    back = measure_memory(lambda: backward(there.result), weight.device)
    return Choice(
        algorithm,
        time_s,
        max(0, there.kept_bytes - num_bytes(there.result)),
        max(0, there.peak_bytes - there.kept_bytes, back.peak_bytes - back.kept_bytes),
    )


def convolution_choices(model: nn.Module, batch: Any, repeats: int = 3) -> dict[str, list[Choice]]:
    """Measure all algorithms of all Conv2d layers of ``model`` at the batch size of ``batch``.

    Layers of equal sizes are measured once. A layer that is called several times has the sum of its calls.
    """
    modules = dict(model.named_modules())
    measured: dict[Any, Choice] = {}
    choices: dict[str, list[Choice]] = {}
    for place, layer in enumerate(trace_layers(model, batch)):
        module = modules[layer.name]
        if not isinstance(module, nn.Conv2d):
            continue
        found = []
        for algorithm in algorithms_for(module):
            key = (*_signature(module), layer.input_shape, place > 0, algorithm)
            if key not in measured:
                measured[key] = measure_convolution(module, layer.input_shape, algorithm, place > 0, repeats)
            found.append(measured[key])
        before = choices.get(layer.name)
        choices[layer.name] = found if before is None else list(map(_sum, before, found))
    return choices


def _signature(module: nn.Conv2d) -> tuple[Any, ...]:
    size = (*module.weight.shape, *module.stride, *module.dilation, module.groups, module.padding)
    return (*size, module.padding_mode, module.bias is None, module.weight.requires_grad)


def _sum(a: Choice, b: Choice) -> Choice:
    workspace = max(a.workspace_bytes, b.workspace_bytes)
    return Choice(a.algorithm, a.time_s + b.time_s, a.num_bytes + b.num_bytes, workspace)


def resized(batch: Any, batch_size: int) -> Any:
    """Return ``batch`` with each tensor's rows repeated or cut to ``batch_size``. Rows are the first dimension."""
    if isinstance(batch, Tensor):
        rows = torch.arange(batch_size, device=batch.device) % len(batch)
        return batch.index_select(0, rows)
    if isinstance(batch, dict):
        return {name: resized(value, batch_size) for name, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return type(batch)(resized(value, batch_size) for value in batch)
    return batch


@dataclass(frozen=True)
class StepMeasurement:
    """A training step without the optimizer.

    Attributes:
        time_s: forward and backward.
        total_bytes: most that is held at a time: parameters, buffers, gradients, batch and activations.
    """

    time_s: float
    total_bytes: int


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
    tensors = [*model.parameters(), *model.buffers(), *tensors_in(batch)]
    return StepMeasurement(time_s, peak_bytes + sum(map(num_bytes, tensors)))


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
    the batch. One that does not fit, or that the device refuses, ends the list of its policy.

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
        ValueError: not even the smallest batch fits.
    """
    require_count("memory_bytes", memory_bytes)
    for size in batch_sizes:
        require_count("batch_sizes", size)
    candidates = []
    choices: dict[int, dict[str, list[Choice]]] = {}
    needed = 0
    for policy in recompute:
        totals: list[tuple[int, int]] = []
        for size in sorted(set(batch_sizes)):
            needed = _extrapolated(totals, size) + optimizer_bytes
            if needed > memory_bytes:
                break
            images = resized(batch, size)
            try:
                step = measure_step(model, images, loss, policy, repeats)
                if size not in choices:
                    choices[size] = convolution_choices(model, images, repeats)
            except torch.OutOfMemoryError:
                break
            totals.append((size, step.total_bytes))
            needed = step.total_bytes + optimizer_bytes
            if needed <= memory_bytes:
                candidates.append(_candidate(size, step, choices[size], memory_bytes - optimizer_bytes, policy or ""))
    if not candidates:
        raise ValueError(
            f"memory_bytes={memory_bytes} holds none of batch_sizes={sorted(set(batch_sizes))}: the smallest needs "
            f"about {needed} bytes; use smaller batches, or recompute=('cheap',)"
        )
    return candidates


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
