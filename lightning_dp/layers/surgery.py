"""Conversion of a model to global batch norm layers in place, and averaging of their running statistics."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
from torch import nn

from lightning_dp._private.torch_names import BatchNorm, child_entries
from lightning_dp.collectives.groups import group_size
from lightning_dp.layers.global_batch_norm import (
    GlobalBatchNorm,
    GlobalBatchNorm1d,
    GlobalBatchNorm2d,
    GlobalBatchNorm3d,
)

_GLOBAL: dict[type[nn.Module], type[GlobalBatchNorm]] = {
    nn.BatchNorm1d: GlobalBatchNorm1d,
    nn.BatchNorm2d: GlobalBatchNorm2d,
    nn.BatchNorm3d: GlobalBatchNorm3d,
}


class NoEffectWarning(UserWarning):
    """The model has no batch norm layer to convert."""


def apply_global_batch_norm(model: nn.Module, group: dist.ProcessGroup | None = None) -> int:
    """Replace each BatchNorm1d/2d/3d in ``model`` by its global counterpart, in place, with global statistics.

    The new layer has the same parameter and buffer tensors, so that optimizers stay valid and the state_dict does not
    change. It also has the same training mode and hooks. A layer that is registered at several places is replaced by
    one layer at all of them. Layers that are already global only get ``group``. References outside the module tree,
    for example in a plain list, keep the old layer.

    Args:
        model: contains the layers. It cannot be a batch norm layer itself.
        group: the ranks that share statistics. None is the default group.

    Returns:
        Number of layers replaced. If the model has no batch norm layer, 0 and a `NoEffectWarning`.

    Raises:
        ValueError: ``model`` is a batch norm layer, or contains one with another forward, such as SyncBatchNorm. The
            model has not been changed then.
    """
    for name, module in model.named_modules():
        _check_convertible(name, module)
    converted: dict[nn.Module, GlobalBatchNorm] = {}
    for parent in list(model.modules()):
        for name, child in child_entries(parent):
            if child is not None and type(child) in _GLOBAL:
                if child not in converted:
                    converted[child] = _to_global(child)
                setattr(parent, name, converted[child])
    layers = global_batch_norm_layers(model)
    for layer in layers:
        layer.group = group
    if not layers:
        warnings.warn(
            f"{type(model).__name__} has no BatchNorm1d, 2d or 3d: nothing was converted", NoEffectWarning, stacklevel=2
        )
    return len(converted)


def global_batch_norm_layers(model: nn.Module) -> list[GlobalBatchNorm]:
    """Return the global batch norm layers in ``model``, each once, in the order of ``model.modules()``."""
    return [module for module in model.modules() if isinstance(module, GlobalBatchNorm)]


@torch.no_grad()
def average_running_statistics(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Replace the running means and variances of the global layers by their means over the ranks, in place.

    Every rank of ``group`` must call it. It is one all-reduce.

    The mean of the variances is what local statistics normalize with. It leaves out the variance between the means of
    the ranks. That is sampling noise if the ranks draw from one distribution (shuffled data, batches of equal size) and
    have more than a few images each. With one image per rank it is not, because the pixels of an image are correlated.
    Running statistics are linear in the statistics of the batches, so averaging more often does not change the result.
    """
    layers = [layer for layer in global_batch_norm_layers(model) if layer.running_mean is not None]
    buffers = [buffer for layer in layers for buffer in (layer.running_mean, layer.running_var) if buffer is not None]
    size = group_size(group)
    if size == 1 or not buffers:
        return
    packed = torch.cat([buffer.double() for buffer in buffers])
    dist.all_reduce(packed, group=group)
    for buffer, mean in zip(buffers, (packed / size).split([b.numel() for b in buffers]), strict=True):
        buffer.copy_(mean)


def _check_convertible(name: str, module: nn.Module) -> None:
    """Raise ValueError for a batch norm layer whose behavior a conversion would lose."""
    if not isinstance(module, BatchNorm) or isinstance(module, GlobalBatchNorm):
        return
    kind = type(module).__name__
    if isinstance(module, nn.SyncBatchNorm):
        remedy = "it shares statistics already and cannot be switched; build the model with plain BatchNorm layers"
    elif isinstance(module, nn.modules.lazy.LazyModuleMixin):
        remedy = "its number of channels is not known yet; run one batch through the model first"
    elif type(module) not in _GLOBAL or "forward" in vars(module):
        remedy = "its own forward would be lost; replace it by a plain BatchNorm layer or by GlobalBatchNorm1d/2d/3d"
    elif name == "":
        remedy = "it has no parent module; put it into an nn.Sequential, or build a GlobalBatchNorm1d/2d/3d"
    else:
        return
    raise ValueError(f"cannot convert layer {name!r}, a {kind}: {remedy}")


def _to_global(layer: nn.Module) -> GlobalBatchNorm:
    """Return a global layer with the contents of ``layer``, which must not be used any more: they share their state."""
    new = _GLOBAL[type(layer)](0, affine=False, track_running_stats=False)
    vars(new).update(vars(layer))
    return new
