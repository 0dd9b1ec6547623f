"""The layers of a model, as one forward pass meets them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from math import prod
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_dp.planner.unchanged import unchanged
from lightning_dp.recompute.tensors import tensors_in


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
        ValueError: the model has no layers, or the batch no tensor.
    """
    tensors = tensors_of(batch)
    if not tensors:
        raise ValueError(
            f"the batch, a {type(batch).__name__}, contains no tensor; give the images that the model is called with"
        )
    seen = _Seen([*tensors, *model.parameters(), *model.buffers()])
    hooks = []
    try:
        for name, module in model.named_modules():
            is_leaf = next(module.children(), None) is None
            # The parameters of a parametrized layer are those of a submodule.
            is_layer = is_leaf or isinstance(module, (*CONVOLUTIONS, nn.Linear))
            if is_layer or next(module.parameters(recurse=False), None) is not None:
                hooks.append(module.register_forward_hook(seen.hook(name), with_kwargs=True))
        with unchanged(model), torch.no_grad():
            if run is not None:
                run(model, batch)
            else:
                model(*(batch if isinstance(batch, tuple) else (batch,)))
    finally:
        for hook in hooks:
            hook.remove()
    if not seen.layers:
        raise ValueError(f"{type(model).__name__} called no module; the planner reads layers of torch.nn")
    return seen.layers


class _Seen:
    """The layers so far, and the memory that they have allocated."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        self.layers: list[Layer] = []
        # Weak references keep an address from being used again, and so from being mistaken for known memory.
        self._storages: dict[int, StorageWeakRef] = {}
        self._parameters: set[int] = set()
        for tensor in known:
            self._is_new(tensor)

    def hook(self, name: str) -> Any:
        def remember(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            inputs, outputs = list(tensors_in([args, kwargs])), list(tensors_in(output))
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

        return remember

    def _is_new(self, tensor: Tensor) -> bool:
        reference = StorageWeakRef(tensor.untyped_storage())
        is_new = reference.cdata not in self._storages
        self._storages.setdefault(reference.cdata, reference)
        return is_new

    def _parameter_bytes(self, module: nn.Module) -> tuple[int, int]:
        weight_bytes = bias_bytes = 0
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in self._parameters:
                continue
            self._parameters.add(id(parameter))
            if name == "weight":
                weight_bytes += num_bytes(parameter)
            else:
                bias_bytes += num_bytes(parameter)
        return weight_bytes, bias_bytes


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
    return prod(tensor.shape) * tensor.element_size()
