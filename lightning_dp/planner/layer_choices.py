"""Choices for equation 6, measured: the algorithms of each convolution layer, one layer at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from lightning_dp.planner.algorithms import BACKEND, algorithms_for, convolve
from lightning_dp.planner.batch_size import Choice
from lightning_dp.planner.measure import measure_memory, measure_time_s
from lightning_dp.planner.out_of_memory import unless_out_of_memory
from lightning_dp.planner.trace import num_bytes, trace_layers


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

    def backward(out: Tensor) -> Any:
        return torch.autograd.grad(out, wanted, cotangent, retain_graph=True)

    if not wanted:  # a frozen layer, with nothing before it that is trained
        return Choice(
            algorithm, measure_time_s(forward, weight.device, repeats), 0, _extra_bytes(forward, weight.device)
        )
    time_s = measure_time_s(lambda: backward(forward()), weight.device, repeats)
    there = measure_memory(forward, weight.device)
    back = measure_memory(lambda: backward(there.result), weight.device)
    return Choice(
        algorithm,
        time_s,
        max(0, there.kept_bytes - num_bytes(there.result)),
        max(0, there.peak_bytes - there.kept_bytes, back.peak_bytes - back.kept_bytes),
    )


def convolution_choices(
    model: nn.Module,
    batch: Any,
    repeats: int = 3,
    loss: Callable[[nn.Module, Any], Tensor] | None = None,
    memory_bytes: float = float("inf"),
) -> dict[str, list[Choice]]:
    """Measure all algorithms of all Conv2d layers of ``model`` at the batch size of ``batch``.

    Layers of equal sizes are measured once. A layer that is called several times has the sum of its calls. Algorithms
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
                measured[key] = _measured(module, layer.input_shape, algorithm, needs_input_grad, repeats)
            if (choice := measured[key]) is not None:
                found[algorithm] = choice
        before = choices.get(layer.name)
        if before is not None:
            found = {name: _sum(before[name], found[name]) for name in before.keys() & found.keys()}
        choices[layer.name] = found
    return {name: sorted(found.values(), key=lambda c: c.algorithm != BACKEND) for name, found in choices.items()}


def _measured(module: nn.Conv2d, shape: Sequence[int], algorithm: str, needs_grad: bool, repeats: int) -> Choice | None:
    """Return the choice, or None if the device has not enough memory for it."""
    devices = [module.weight.device] if module.weight.is_cuda else []
    measure = partial(measure_convolution, module, shape, algorithm, needs_grad, repeats)
    with torch.random.fork_rng(devices):
        # The backend's has just run as part of the step. If it does not fit now, something else is wrong.
        return measure() if algorithm == BACKEND else unless_out_of_memory(measure)


def _extra_bytes(forward: Callable[[], Tensor], device: torch.device) -> int:
    """Return what a forward holds at a time, beyond its result."""
    use = measure_memory(forward, device)
    return max(0, use.peak_bytes - use.kept_bytes)


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
