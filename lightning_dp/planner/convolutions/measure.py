"""Seconds and bytes of a function, measured in place."""

from __future__ import annotations

import gc
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from weakref import WeakSet

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, UntypedStorage, nn
from torch.profiler import ProfilerActivity, profile

from lightning_dp.planner.formulas import require_count
from lightning_dp.recompute.profile import timed
from lightning_dp.recompute.values import tensors_in
from lightning_dp.trial_run import unchanged, unchanged_parameters


def measure_time_s(function: Callable[[], Any], device: torch.device | str = "cpu", repeats: int = 5) -> float:
    """Return the median time of ``function``, after one call that is not timed.

    The function must not return before its work has been launched on ``device``; the clock waits for the work.
    """
    require_count("repeats", repeats)
    device = torch.device(device)
    times = [timed(function, (), {}, device)[1] for _ in range(repeats + 1)]
    return statistics.median(times[1:])


_LOG_LEVEL = "KINETO_LOG_LEVEL"


class MemoryUse(NamedTuple):
    """What a function allocated.

    Attributes:
        peak_bytes: most that was held at a time, beyond what was allocated before.
        kept_bytes: what was still held at its end, its result included. Negative if it released more.
        result: what it returned.
    """

    peak_bytes: int
    kept_bytes: int
    result: Any


def measure_memory(function: Callable[[], Any], device: torch.device | str = "cpu") -> MemoryUse:
    """Call ``function`` and return the memory that it used.

    Counted is what torch's allocator hands out, including what a kernel allocates through it. Memory that a library
    allocates by itself, such as oneDNN's scratch memory, is not seen. What a first call keeps for good, such as
    gradients, is counted: call the function once before to leave it out.
    """
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        result = function()
        torch.cuda.synchronize(device)
        kept = torch.cuda.memory_allocated(device) - before
        return MemoryUse(torch.cuda.max_memory_allocated(device) - before, kept, result)
    with _quiet(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = function()
    held = list(accumulate(_allocations(profiler), initial=0))
    return MemoryUse(max(held), held[-1], result)


def measure_peak_bytes(function: Callable[[], Any], device: torch.device | str = "cpu") -> int:
    """Return the most memory that ``function`` holds at a time, beyond what was allocated before; `measure_memory`."""
    return measure_memory(function, device).peak_bytes


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the profiler's library from writing two lines for each measurement. It reads the variable when it starts."""
    before = os.environ.get(_LOG_LEVEL)
    os.environ.setdefault(_LOG_LEVEL, "99")
    try:
        yield
    finally:
        if before is None:
            del os.environ[_LOG_LEVEL]


def _allocations(profiler: profile) -> list[int]:
    """Return the bytes of each allocation in host memory (positive) and each release (negative), in order of time."""
    # The trace in Chrome's format is the public form of these events.
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    changes = [
        (float(event["ts"]), int(event["args"]["Bytes"]))
        for event in events
        if event.get("name") == "[memory]" and event["args"]["Device Type"] == 0
    ]
    # Sorting is stable: events of one moment stay in the order in which they were recorded.
    return [change for _, change in sorted(changes, key=lambda event: event[0])]


# Trials that may use up the memory.

T = TypeVar("T")
# What torch's allocators on host memory say, in a RuntimeError of no class of its own.
_MESSAGES = ("out of memory", "can't allocate memory", "not enough memory")


def unless_out_of_memory(trial: Callable[[], T]) -> T | None:
    """Return the result of ``trial``, or None if it runs out of memory; what it had allocated is then free again."""
    try:
        return trial()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    # Outside of the handler: the error's frames hold the tensors of the step that failed.
    gc.collect()
    torch.cuda.empty_cache()  # does nothing without a GPU
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory is used up, on a device or on the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _MESSAGES)


# The layers of a model, as one forward pass meets them.


class LayerKind(Enum):
    """Which terms of the paper's equations a layer has."""

    CONVOLUTION = "convolution"
    POOLING = "pooling"
    LINEAR = "linear"
    OTHER = "other"  # not in the equations: counted as traced


CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
POOLINGS = (
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
    *(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
)


@dataclass(frozen=True)
class Layer:
    """One call of a module without submodules.

    Attributes:
        name: of the module in the model.
        type_name: of its class.
        kind: see `LayerKind`.
        input_shape: of its first tensor, batch included.
        output_shape: of its result, batch included.
        output_bytes: new memory for its results; 0 for a view, or a change in place.
        weight_bytes: of its weights; 0 if an earlier layer uses the same.
        bias_bytes: of its biases, or of all other parameters.
    """

    name: str
    type_name: str
    kind: LayerKind
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    output_bytes: int
    weight_bytes: int
    bias_bytes: int


def kind_of(module: nn.Module) -> LayerKind:
    """Return the kind of a module."""
    if isinstance(module, CONVOLUTIONS):
        return LayerKind.CONVOLUTION
    if isinstance(module, POOLINGS):
        return LayerKind.POOLING
    return LayerKind.LINEAR if isinstance(module, nn.Linear) else LayerKind.OTHER


def trace_layers(model: nn.Module, batch: Any, run: Callable[[nn.Module, Any], Any] | None = None) -> list[Layer]:
    """Run one forward pass, and return the layers in the order in which they were called.

    Layers are modules without submodules, and others that have parameters of their own. Functions that a forward calls
    itself (``F.relu``, additions) are no modules and do not appear. Model and batch may be on the meta device, so that
    a model that fits nowhere can be traced. Buffers and random number generators are put back afterwards.

    Args:
        model: in the mode in which it is to be traced.
        batch: the argument of its forward, or a tuple of its arguments; with ``run``, whatever that takes.
        run: called with model and batch in the place of the model's forward.

    Raises:
        ValueError: the model has no layers, a part of it is scripted, or the batch has no tensor.
    """
    tensors = tensors_of(batch)
    if not tensors:
        raise ValueError(
            f"the batch, a {type(batch).__name__}, contains no tensor; give the images that the model is called with"
        )
    seen = _Seen([*tensors, *model.parameters(), *model.buffers()])
    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                raise ValueError(f"{name or 'the model'} is scripted, which hides its layers; give the plain model")
            is_leaf = next(module.children(), None) is None
            # The parameters of a parametrized layer are those of a submodule.
            is_layer = is_leaf or isinstance(module, (*CONVOLUTIONS, nn.Linear))
            if is_layer or next(module.parameters(recurse=False), None) is not None:
                hooks.enter_context(module.register_forward_hook(partial(seen.add, name), with_kwargs=True))
        with unchanged(model), unchanged_parameters(model), torch.no_grad():
            if run is not None:
                run(model, batch)
            else:
                model(*(batch if isinstance(batch, tuple) else (batch,)))
    if not seen.layers:
        raise ValueError(f"{type(model).__name__} called no module; the planner reads layers of torch.nn")
    return seen.layers


class _Seen:
    """The layers so far, and the memory that they have allocated."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        self.layers: list[Layer] = []
        self._storages: WeakSet[UntypedStorage] = WeakSet(tensor.untyped_storage() for tensor in known)
        self._parameters: set[int] = set()

    def add(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        inputs, outputs = tensors_in([args, kwargs]), tensors_in(output)
        weight_bytes, bias_bytes = self._parameter_bytes(module)
        self.layers.append(
            Layer(
                name=name,
                type_name=type(module).__name__,
                kind=kind_of(module),
                input_shape=tuple(inputs[0].shape) if inputs else (),
                output_shape=tuple(outputs[0].shape) if outputs else (),
                output_bytes=sum(num_bytes(tensor) for tensor in outputs if self._is_new(tensor)),
                weight_bytes=weight_bytes,
                bias_bytes=bias_bytes,
            )
        )

    def _is_new(self, tensor: Tensor) -> bool:
        storage = tensor.untyped_storage()  # one object for as long as the memory exists
        is_new = storage not in self._storages
        self._storages.add(storage)
        return is_new

    def _parameter_bytes(self, module: nn.Module) -> tuple[int, int]:
        """Return the bytes of a module's weight and of its other parameters, without those of an earlier layer."""
        own = dict(module.named_parameters(recurse=False))
        sizes = {name: num_bytes(value) for name, value in own.items() if id(value) not in self._parameters}
        self._parameters.update(map(id, own.values()))
        weight_bytes = sizes.pop("weight", 0)
        return weight_bytes, sum(sizes.values())


def tensors_of(batch: Any) -> list[Tensor]:
    """Return the tensors of a batch: a tensor, or tensors in tuples, lists, mappings or dataclasses."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    apply_to_collection(batch, Tensor, note, allow_frozen=True)
    return found


def num_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()
