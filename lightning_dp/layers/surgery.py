"""Conversion of a model to global batch norm layers in place, and back."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_dp._private.torch_names import BatchNorm, OptimizedModule, child_entries, has_compiled_forward
from lightning_dp.layers.global_batch_norm import (
    GlobalBatchNorm,
    GlobalBatchNorm1d,
    GlobalBatchNorm2d,
    GlobalBatchNorm3d,
)

_GLOBAL: dict[type[BatchNorm], type[GlobalBatchNorm]] = {
    nn.BatchNorm1d: GlobalBatchNorm1d,
    nn.BatchNorm2d: GlobalBatchNorm2d,
    nn.BatchNorm3d: GlobalBatchNorm3d,
}
_PLAIN = {new: old for old, new in _GLOBAL.items()}


class _Kept(nn.Module):
    """A layer that a global one has replaced, and that something outside the module tree has kept.

    In training it would normalize with local statistics, without a word. In evaluation it computes what the global one
    does. The two share their attributes: a mode or momentum that is set on one of them is that of both.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            raise RuntimeError(
                "a batch norm layer was called that a global one has replaced: something outside the module tree, such "
                "as a plain list or a function, has kept the old layer; use an nn.ModuleList, or an attribute of the "
                "module"
            )
        output: torch.Tensor = super().forward(x)
        return output

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles are plain layers: nothing would put them back."""
        reduced: Any = super().__reduce_ex__(protocol)
        make, (_, *arguments), state, *rest = reduced
        return make, (_kind(self), *arguments), _plain_attributes(state), *rest


_KEPT: dict[type[BatchNorm], type[BatchNorm]] = {kind: type(kind.__name__, (_Kept, kind), {}) for kind in _GLOBAL}
_BEFORE: dict[Any, type[BatchNorm]] = {kept: kind for kind, kept in _KEPT.items()}


def _kind(layer: nn.Module) -> Any:
    """Return the class of ``layer``, of one that was replaced that of before."""
    return _BEFORE.get(type(layer), type(layer))


# The attributes that a global layer has beside those of PyTorch's layer.
_GLOBAL_ATTRIBUTES = vars(GlobalBatchNorm1d(1)).keys() - vars(nn.BatchNorm1d(1)).keys()


def _plain_attributes(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if name not in _GLOBAL_ATTRIBUTES}


class NoEffectWarning(UserWarning):
    """A call or a callback has found nothing to work on: no batch norm layer, or nothing to recompute."""


def apply_global_batch_norm(model: nn.Module, group: dist.ProcessGroup | None = None) -> int:
    """Replace each BatchNorm1d/2d/3d in ``model`` by its global counterpart, in place, with global statistics.

    The new layer has the same parameter and buffer tensors, so that optimizers stay valid and the state_dict does not
    change. It also has the same training mode and hooks. A layer that is registered at several places is replaced by
    one layer at all of them. Layers that are already global only get ``group``. References outside the module tree,
    for example in a plain list, keep the old layer, which raises an error if it is called in training.
    `revert_global_batch_norm` is the reverse.

    Args:
        model: contains the layers. It cannot be a batch norm layer itself.
        group: the ranks that share statistics. None is the default group.

    Returns:
        Number of layers replaced. If the model has no batch norm layer, 0 and a `NoEffectWarning`.

    Raises:
        ValueError: ``model`` is a batch norm layer, or contains one with another forward, such as SyncBatchNorm, or one
            that is compiled or scripted on its own. The model has not been changed then.
    """
    for name, module in model.named_modules():
        _check_convertible(name, module)
    to_convert = {module for module in model.modules() if isinstance(module, BatchNorm) and _kind(module) in _GLOBAL}
    _replace(model, {layer: _to_global(layer) for layer in to_convert})
    layers = global_batch_norm_layers(model)
    for layer in layers:
        layer.group = group
    if not layers:
        warnings.warn(
            f"{type(model).__name__} has no BatchNorm1d, 2d or 3d: nothing was converted", NoEffectWarning, stacklevel=2
        )
    return len(to_convert)


def revert_global_batch_norm(model: nn.Module, names: Collection[str] | None = None) -> int:
    """Replace each GlobalBatchNorm1d/2d/3d in ``model`` by PyTorch's layer, in place. No rank needs to wait for others.

    The exact reverse of `apply_global_batch_norm`: the converted layers are put back at their places, with the present
    parameter and buffer tensors, training mode and hooks. In a copy of a converted model, new layers take their places.
    A reverted model can be scripted, traced, fused and quantized, as before the conversion.

    Args:
        model: contains the layers. It cannot be a batch norm layer itself.
        names: names of the layers to revert, as in ``model.named_modules()``. None: all.

    Returns:
        Number of layers replaced. It is 0 if the model has no global batch norm layer.

    Raises:
        ValueError: a layer to revert is ``model`` itself, has another forward, or is compiled on its own. The model has
            not been changed then.
    """
    to_revert: set[GlobalBatchNorm] = set()
    for name, module in model.named_modules():
        if isinstance(module, GlobalBatchNorm) and (names is None or name in names):
            _require_replaceable(name, module, _PLAIN, "revert")
            to_revert.add(module)
    _replace(model, {layer: _to_plain(layer) for layer in to_revert})
    return len(to_revert)


def global_batch_norm_layers(model: nn.Module) -> list[GlobalBatchNorm]:
    """Return the global batch norm layers in ``model``, each once, in the order of ``model.modules()``."""
    return [module for module in model.modules() if isinstance(module, GlobalBatchNorm)]


def unconverted_layer_names(model: nn.Module) -> list[str]:
    """Return the names of the batch norm layers in ``model`` that are not global ones."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, BatchNorm) and not isinstance(module, GlobalBatchNorm)
    ]


def _replace(model: nn.Module, replacements: Mapping[nn.Module, nn.Module]) -> None:
    """Put the replacement of each layer at all places of the layer in ``model``."""
    for parent in list(model.modules()):
        for name, child in child_entries(parent):
            if child is not None and child in replacements:
                setattr(parent, name, replacements[child])


def _check_convertible(name: str, module: nn.Module) -> None:
    """Raise ValueError for a batch norm layer whose behavior a conversion would lose, or that it cannot reach."""
    if isinstance(module, torch.jit.ScriptModule):
        if module.original_name.startswith(("BatchNorm", "SyncBatchNorm")):
            raise ValueError(
                f"cannot convert layer {name!r}, a {module.original_name}: it is scripted; script the "
                "model after training"
            )
        return
    if isinstance(module, OptimizedModule):
        for _, child in child_entries(module):
            if isinstance(child, BatchNorm):
                raise ValueError(_refusal("convert", name, child, _COMPILED))
    if isinstance(module, BatchNorm) and not isinstance(module, GlobalBatchNorm):
        _require_replaceable(name, module, _GLOBAL, "convert")


_COMPILED = "it is compiled on its own, and the compiled code would keep calling the old layer; compile the whole model"


def _require_replaceable(name: str, module: nn.Module, kinds: Collection[type[nn.Module]], action: str) -> None:
    """Raise ValueError if replacing ``module`` would lose its behavior, or not take effect."""
    if _kind(module) not in kinds or "forward" in vars(module):
        remedy = (
            "its own forward would be lost; replace it by a plain BatchNorm layer or by GlobalBatchNorm1d/2d/3d. (A "
            "lazy layer becomes a plain one in its first forward)"
        )
    elif has_compiled_forward(module):
        remedy = _COMPILED
    elif name == "":
        remedy = "it has no parent module; put it into an nn.Sequential, or build the other layer yourself"
    else:
        return
    raise ValueError(_refusal(action, name, module, remedy))


def _refusal(action: str, name: str, module: nn.Module, remedy: str) -> str:
    return f"cannot {action} layer {name!r}, a {type(module).__name__}: {remedy}"


def _to_global(layer: BatchNorm) -> GlobalBatchNorm:
    """Return a global layer with the contents of ``layer``, which must not train any more: they share their state."""
    new = _GLOBAL[_kind(layer)](0, affine=False, track_running_stats=False)
    added = {name: vars(new)[name] for name in _GLOBAL_ATTRIBUTES}
    new.__dict__ = vars(layer)
    vars(new).update(added)
    new.set_origin(layer)
    layer.__class__ = _KEPT[_kind(layer)]  # until it is put back
    return new


def _to_plain(layer: GlobalBatchNorm) -> BatchNorm:
    """Return a layer of PyTorch with the contents of ``layer``, which must not be used any more.

    It is the layer that was converted, if there is one, so that references outside the module tree are valid again.
    """
    kind = _PLAIN[type(layer)]
    plain = layer.origin or kind(0, affine=False, track_running_stats=False)
    plain.__class__ = kind
    plain.__dict__ = _plain_attributes(vars(layer))
    return plain
