"""How `plan_batch_size` comes to its plan: it measures steps and layers, solves equation 6, and runs the plans.

1. `measure_candidates` runs a training step at each batch size (`measure_step`), and each convolution layer alone with
   each algorithm (`convolution_choices`).
2. `choose_algorithms` (`program`) picks an algorithm for each layer of a candidate.
3. `measure_plans` runs what was picked, and a few other plans, because layers that were measured alone do not tell what
   they cost together. The fastest that fits wins.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from lightning_dp.planner.convolutions.algorithms import (
    BACKEND,
    algorithms_for,
    apply_algorithms,
    convolve,
    require_not_compiled,
)
from lightning_dp.planner.convolutions.measure import (
    measure_memory,
    measure_peak_bytes,
    measure_time_s,
    num_bytes,
    tensors_of,
    trace_layers,
    unless_out_of_memory,
)
from lightning_dp.planner.convolutions.program import (
    BatchPlan,
    Candidate,
    Choice,
    Layers,
    algorithms_of,
    choose_algorithms,
    fastest,
    held_bytes,
    plan_of,
    require_solver,
)
from lightning_dp.planner.formulas import require_count
from lightning_dp.recompute.apply import PolicyName, apply_recompute, check_policy
from lightning_dp.recompute.values import tensors_in
from lightning_dp.trial_run import unchanged, unchanged_parameters

log = logging.getLogger(__name__)

Loss = Callable[[nn.Module, Any], Tensor]

# Of the plans of equation 6 for one candidate, each with the memory that the one before has left for algorithms.
NUM_PLANS = 3
# One algorithm in all layers is run if the layers, measured alone, take up to this many times the least.
WORTH_A_TRIAL = 1.5


def mean_square(model: nn.Module, batch: Any) -> Tensor:
    """Return the mean square of the model's outputs: a loss for any model, whose backward takes as long as another."""
    outputs = tensors_in(model(*(batch if isinstance(batch, tuple) else (batch,))))
    return torch.stack([output.square().mean() for output in outputs if output.is_floating_point()]).sum()


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


# 1. Candidates: a training step at each batch size, and what its layers could take instead.


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
            if extrapolated(totals, size) > room_bytes:
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


def extrapolated(totals: Sequence[tuple[int, int]], size: int) -> int:
    """Return the memory at a batch size, on the line through the last two measurements; 0 if there are fewer."""
    if len(totals) < 2:
        return 0
    (small, small_bytes), (large, large_bytes) = totals[-2:]
    return large_bytes + (large_bytes - small_bytes) * (size - large) // (large - small)


def _candidate(
    size: int, step: StepMeasurement, layers: dict[str, list[Choice]], memory_bytes: int, policy: str
) -> Candidate:
    """Take the backend's algorithms, with which the step was measured, out of its time and memory."""
    used = [next(choice for choice in found if choice.algorithm == BACKEND) for found in layers.values()]
    other_s = max(0.0, step.time_s - sum(choice.time_s for choice in used))
    bound_bytes = memory_bytes - (step.total_bytes - held_bytes(used))
    return Candidate(size, layers, bound_bytes, other_s, policy)


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
        with unchanged(model), unchanged_parameters(model):
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


def resized(batch: Any, batch_size: int, present_size: int | None = None) -> Any:
    """Return ``batch`` with each tensor's rows repeated or cut to ``batch_size``. Rows are the first dimension.

    Args:
        batch: tensors in any nesting.
        batch_size: to reach.
        present_size: that the batch was made with, if it is known. A tensor with several times as many rows, as one of
            several views of each image, or of a loader with larger batches, keeps that many for each of ``batch_size``.

    Raises:
        ValueError: it holds no tensor that has rows, so that it would stay as it is.
    """
    if not any(tensor.dim() for tensor in tensors_of(batch)):
        raise ValueError(
            f"no images were found in the batch, a {type(batch).__name__}; give a tensor, or tensors in tuples, lists, "
            "mappings or dataclasses"
        )

    def resize(tensor: Tensor) -> Tensor:
        if tensor.dim() == 0 or len(tensor) == 0:  # without rows: there may be no boxes in the images
            return tensor
        num_rows = batch_size * num_times(len(tensor), present_size)
        rows = torch.arange(num_rows, device=tensor.device) % len(tensor)
        chosen = tensor.index_select(0, rows)
        if tensor.dim() == 4 and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=torch.channels_last):
            return chosen.contiguous(memory_format=torch.channels_last)
        return chosen

    return apply_to_collection(batch, Tensor, resize, allow_frozen=True)


def num_times(num_rows: int, batch_size: int | None) -> int:
    """Return how many times ``batch_size`` so many rows are; 1 if that is no whole number, or not known."""
    return max(1, num_rows // batch_size) if batch_size and num_rows % batch_size == 0 else 1


# The choices of each convolution layer, one layer at a time.


def convolution_choices(
    model: nn.Module,
    batch: Any,
    repeats: int = 3,
    loss: Callable[[nn.Module, Any], Tensor] | None = None,
    memory_bytes: float = float("inf"),
) -> dict[str, list[Choice]]:
    """Measure all algorithms of all Conv2d layers of ``model`` at the batch size of ``batch``.

    Layers of equal sizes are measured once. A layer that is called several times has the sum of its calls. The gradient
    of a layer's input is part of it only if an earlier layer is trained: else backward does not compute it. Algorithms
    that there is not enough memory for are left out, and so are layers whose ``forward`` is replaced or that only the
    backend can compute.

    Args:
        model: in training mode.
        batch: the argument of its forward, or a tuple of its arguments; with ``loss``, whatever that takes.
        repeats: steps that are timed.
        loss: called with model and batch.
        memory_bytes: an algorithm is not tried if its spectra alone are larger.
    """
    modules = dict(model.named_modules())
    measured: dict[Any, Choice | None] = {}
    choices: dict[str, dict[str, Choice]] = {}
    is_trained_before = False
    with unchanged(model):
        for layer in trace_layers(model, batch, loss):
            if "parametrizations" in layer.name.split("."):  # a part of the layer that it belongs to
                continue
            module = modules[layer.name]
            needs_input_grad = is_trained_before
            is_trained_before |= any(parameter.requires_grad for parameter in module.parameters())
            if not isinstance(module, nn.Conv2d) or "forward" in vars(module) or algorithms_for(module) == (BACKEND,):
                continue
            found = {}
            for algorithm in algorithms_for(module):
                if algorithm == "fft" and _spectra_bytes(module, layer.input_shape) > memory_bytes:
                    continue
                key = (*_signature(module), layer.input_shape, needs_input_grad, algorithm)
                if key not in measured:
                    measure = partial(
                        measure_convolution, module, layer.input_shape, algorithm, needs_input_grad, repeats
                    )
                    # The backend's has just run as part of the step. If it does not fit now, something else is wrong.
                    measured[key] = measure() if algorithm == BACKEND else unless_out_of_memory(measure)
                if (choice := measured[key]) is not None:
                    found[algorithm] = choice
            before = choices.get(layer.name)
            if before is not None:
                found = {name: _sum(before[name], found[name]) for name in before.keys() & found.keys()}
            choices[layer.name] = found
    return {name: sorted(found.values(), key=lambda c: c.algorithm != BACKEND) for name, found in choices.items()}


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
        needs_input_grad: False if nothing before the layer is trained.
        repeats: steps that are timed.
    """
    weight = module.weight
    x = torch.randn(*input_shape, dtype=weight.dtype, device=weight.device, requires_grad=needs_input_grad)
    wanted = [tensor for tensor in (x, *module.parameters()) if tensor.requires_grad]

    def forward() -> Tensor:
        with torch.enable_grad():
            return convolve(module, x, algorithm)

    cotangent = torch.randn_like(forward())

    def backward(out: Tensor) -> tuple[Tensor, ...]:
        if not wanted:  # the layer is frozen, and nothing before it is trained
            return ()
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


def _signature(module: nn.Conv2d) -> tuple[Any, ...]:
    size = (*module.weight.shape, *module.stride, *module.dilation, module.groups, module.padding)
    bias = None if module.bias is None else module.bias.requires_grad
    # A parametrization takes time of its own, so such a layer is like no other.
    own = id(module) if is_parametrized(module) else None
    return (*size, module.padding_mode, bias, module.weight.requires_grad, module.weight.dtype, own)


def _spectra_bytes(module: nn.Conv2d, input_shape: Sequence[int]) -> int:
    """Return what FFT holds at least: the spectra of padded input, filters and output, in complex numbers."""
    assert not isinstance(module.padding, str)
    images = input_shape[0] if len(input_shape) == 4 else 1
    height, width = (size + 2 * padding for size, padding in zip(input_shape[-2:], module.padding, strict=True))
    planes = images * (module.in_channels + module.out_channels) + module.in_channels * module.out_channels
    return planes * height * (width // 2 + 1) * 2 * max(4, module.weight.element_size())


def _sum(a: Choice, b: Choice) -> Choice:
    workspace = max(a.workspace_bytes, b.workspace_bytes)
    return Choice(a.algorithm, a.time_s + b.time_s, a.num_bytes + b.num_bytes, workspace)


# 3. Plans, run.


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
    plans = [
        _fastest_plan(model, resized(batch, candidate.batch_size), candidate, memory_bytes, loss, repeats)
        for candidate in candidates
    ]
    return [plan for plan in plans if plan is not None]


def _fastest_plan(
    model: nn.Module, batch: Any, candidate: Candidate, memory_bytes: int, loss: Loss, repeats: int
) -> BatchPlan | None:
    """Run the plans of a candidate, each once, and return the fastest; None if none fits."""
    tried: dict[tuple[str, ...], tuple[dict[str, Choice], StepMeasurement]] = {}

    def run(chosen: dict[str, Choice]) -> StepMeasurement:
        key = tuple(choice.algorithm for choice in chosen.values())
        if key not in tried:
            algorithms = apply_algorithms(model, algorithms_of(chosen))
            recompute: Any = candidate.recompute or None
            try:
                step = unless_out_of_memory(partial(measure_step, model, batch, loss, recompute, repeats))
            except RuntimeError as error:  # `view` refuses the strides of channels_last
                if set(key) <= {BACKEND}:
                    raise
                log.warning("A plan with %s is left out: the step raised %s", ", ".join(sorted(set(key))), error)
                step = None
            finally:
                algorithms.remove()
            tried[key] = chosen, step or StepMeasurement(float("inf"), memory_bytes + 1)
        return tried[key][1]

    # The plan of equation 6, and again with the memory that it really leaves.
    bound_bytes = candidate.bound_bytes
    for _ in range(NUM_PLANS):
        planned = choose_algorithms(candidate.layers, bound_bytes)
        if planned is None:
            break
        bound_bytes = memory_bytes - (run(planned).total_bytes - held_bytes(planned.values()))
    for uniform in _uniform_plans(candidate.layers):
        run(uniform)
    fitting = [(chosen, step) for chosen, step in tried.values() if step.total_bytes <= memory_bytes]
    if not fitting:
        return None
    chosen, step = min(fitting, key=lambda trial: trial[1].time_s)
    bound_bytes = memory_bytes - (step.total_bytes - held_bytes(chosen.values()))
    return plan_of(candidate, chosen, step.time_s, bound_bytes, step.total_bytes)


def _uniform_plans(layers: Layers) -> Iterator[dict[str, Choice]]:
    """Yield each algorithm in all layers that it can compute, unless they are slow by themselves.

    The backend's always: the candidate was measured with it, so that it fits.
    """
    least_s = sum(min(choice.time_s for choice in choices) for choices in layers.values())
    for algorithm in dict.fromkeys(choice.algorithm for choices in layers.values() for choice in choices):
        chosen = {
            name: next((c for c in choices if c.algorithm == algorithm), choices[0])  # BACKEND is the first
            for name, choices in layers.items()
        }
        alone_s = sum(choice.time_s for choice in chosen.values())
        if algorithm == BACKEND or alone_s <= WORTH_A_TRIAL * least_s:
            yield chosen
