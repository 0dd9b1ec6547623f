"""Conversion of a model to global batch norm layers in place, and back."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import nn

from lightning_dp._private.torch_names import BatchNorm, OptimizedModule, has_compiled_forward
from lightning_dp.layers.global_batch_norm import (
    GlobalBatchNorm,
    GlobalBatchNorm1d,
    GlobalBatchNorm2d,
    GlobalBatchNorm3d,
)

_GLOBAL: dict[type[nn.Module], type[nn.Module]] = {
    nn.BatchNorm1d: GlobalBatchNorm1d,
    nn.BatchNorm2d: GlobalBatchNorm2d,
    nn.BatchNorm3d: GlobalBatchNorm3d,
}
_PLAIN = {new: old for old, new in _GLOBAL.items()}


# What a global layer has beside the attributes of PyTorch's layer.
_ADDED = {name: value for name, value in vars(GlobalBatchNorm1d(1)).items() if name not in vars(nn.BatchNorm1d(1))}


class NoEffectWarning(UserWarning):
    """A call or a callback has found nothing to work on: no batch norm layer, or nothing to recompute."""


def apply_global_batch_norm(model: nn.Module, group: dist.ProcessGroup | None = None) -> int:
    """Make each BatchNorm1d/2d/3d in ``model`` its global counterpart, with global statistics.

    The layers stay the same objects and only change their class. So optimizers, hooks, the state_dict and references
    from anywhere, such as a plain list, stay valid. Only a bound method that was kept, ``layer.forward``, is the old
    one. Layers that are already global only get ``group``. `revert_global_batch_norm` is the reverse.

    Args:
        model: contains the layers, or is one.
        group: the ranks that share statistics. None is the default group.

    Returns:
        Number of layers that were converted. If the model has no batch norm layer, 0 and a `NoEffectWarning`.

    Raises:
        ValueError: a batch norm layer has another forward, such as SyncBatchNorm, or is compiled or scripted on its
            own. The model has not been changed then.
    """
    for name, module in model.named_modules():
        _check_convertible(name, module)
    to_convert = [module for module in model.modules() if type(module) in _GLOBAL]
    for module in to_convert:
        module.__class__ = _GLOBAL[type(module)]
        vars(module).update(_ADDED)
    layers = global_batch_norm_layers(model)
    for layer in layers:
        layer.group = group
    if not layers:
        warnings.warn(
            f"{type(model).__name__} has no BatchNorm1d, 2d or 3d: nothing was converted", NoEffectWarning, stacklevel=2
        )
    return len(to_convert)


def revert_global_batch_norm(model: nn.Module, names: Collection[str] | None = None) -> int:
    """Make each GlobalBatchNorm1d/2d/3d in ``model`` PyTorch's layer again. No rank needs to wait for others.

    The exact reverse of `apply_global_batch_norm`. A reverted model can be scripted, traced, fused and quantized, as
    before the conversion.

    Args:
        model: contains the layers, or is one.
        names: names of the layers to revert, as in ``model.named_modules()``. None: all.

    Returns:
        Number of layers that were reverted. It is 0 if the model has no global batch norm layer.

    Raises:
        ValueError: a layer to revert has another forward, or is compiled on its own. The model has not been changed
            then.
    """
    to_revert: set[nn.Module] = set()
    for name, module in model.named_modules():
        if isinstance(module, GlobalBatchNorm) and (names is None or name in names):
            _require_replaceable(name, module, _PLAIN, "revert")
            to_revert.add(module)
    for layer in to_revert:
        layer.__class__ = _PLAIN[type(layer)]
        for name in _ADDED:
            del vars(layer)[name]
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


def _check_convertible(name: str, module: nn.Module) -> None:
    """Raise ValueError for a batch norm layer whose behavior a conversion would lose, or that it cannot reach."""
    if isinstance(module, torch.jit.ScriptModule):
        if module.original_name.startswith(("BatchNorm", "SyncBatchNorm")):
            _refuse("convert", name, module.original_name, "it is scripted; script the model after training")
        return
    if isinstance(module, OptimizedModule):
        for child in module.children():
            if isinstance(child, BatchNorm):
                _refuse("convert", name, type(child).__name__, _COMPILED)
    if isinstance(module, BatchNorm) and not isinstance(module, GlobalBatchNorm):
        _require_replaceable(name, module, _GLOBAL, "convert")


_COMPILED = "it is compiled on its own, and the compiled code may keep its statistics; compile the whole model"
_OWN_FORWARD = (
    "its own forward would be lost; replace it by a plain BatchNorm layer or by GlobalBatchNorm1d/2d/3d. (A lazy layer "
    "becomes a plain one in its first forward)"
)


def _require_replaceable(name: str, module: nn.Module, kinds: Collection[type[nn.Module]], action: str) -> None:
    """Raise ValueError if another class of ``module`` would lose its behavior, or not take effect."""
    if type(module) not in kinds or "forward" in vars(module):
        _refuse(action, name, type(module).__name__, _OWN_FORWARD)
    if has_compiled_forward(module):
        _refuse(action, name, type(module).__name__, _COMPILED)


def _refuse(action: str, name: str, kind: str, why: str) -> NoReturn:
    raise ValueError(f"cannot {action} layer {name!r}, a {kind}: {why}")


@contextmanager
def local_statistics(model: nn.Module) -> Iterator[None]:
    """Let the batch norm layers of ``model``, SyncBatchNorm too, use this rank's batch alone within the context."""
    with ExitStack() as undo:
        for part in model.modules():
            if isinstance(part, nn.SyncBatchNorm):
                part.forward = partial(nn.BatchNorm2d.forward, part)  # type: ignore[method-assign]
                undo.callback(delattr, part, "forward")
            elif isinstance(part, GlobalBatchNorm) and part.is_global:
                part.is_global = False
                undo.callback(setattr, part, "is_global", True)
        yield
