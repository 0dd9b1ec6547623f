"""Conversion of a LightningModule to global batch norm for the time of one fit."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable

import torch.distributed as dist
from torch import nn

from lightning_dp._private.torch_names import ignore_in_ddp, stop_ignoring_in_ddp
from lightning_dp.layers import (
    GlobalBatchNorm,
    NoEffectWarning,
    apply_global_batch_norm,
    global_batch_norm_layers,
    revert_global_batch_norm,
    unconverted_layer_names,
)

log = logging.getLogger(__name__)


class BatchNormConversion:
    """Converts the batch norm layers of a model, keeps their buffers from DDP, and takes both back.

    Args:
        owner: name of the callback, for error messages.
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._converted_names: list[str] = []
        self._ignored_names: list[str] = []
        self._own_layers: list[tuple[GlobalBatchNorm, dist.ProcessGroup | None, bool]] = []

    def apply(self, model: nn.Module) -> list[GlobalBatchNorm]:
        """Convert the layers of ``model`` in place and return them. Call it before DDP wraps the model.

        Raises:
            ValueError: there is no batch norm layer, or one cannot be converted. The model has not been changed then.
        """
        # The user may have built global layers. They are not converted back, but get their group and switch back.
        own_layers = [(layer, layer.group, layer.is_global) for layer in global_batch_norm_layers(model)]
        names = unconverted_layer_names(model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NoEffectWarning)
            apply_global_batch_norm(model)
        self._converted_names = names
        self._own_layers = own_layers
        layers = global_batch_norm_layers(model)
        if not layers:
            raise ValueError(
                f"{type(model).__name__} has no BatchNorm1d, 2d or 3d for {self._owner} to work on; build the layers "
                "in __init__ (setup and configure_model come too late), or remove the callback"
            )
        # DDP would replace the running statistics of all ranks by those of rank 0 in each forward. A layer that is
        # registered at two places has two names, and DDP may use either.
        ours = {id(buffer) for layer in layers for buffer in layer.buffers()}
        buffers = model.named_buffers(remove_duplicate=False)
        self._ignored_names = [name for name, buffer in buffers if id(buffer) in ours]
        ignore_in_ddp(model, self._ignored_names)
        return layers

    def require_complete(self, model: nn.Module) -> None:
        """Raise ValueError if ``model`` has batch norm layers that appeared after `apply`.

        They would keep local statistics, and DDP has been built by now and would broadcast their buffers.
        """
        names = unconverted_layer_names(model)
        if names:
            raise ValueError(
                f"{self._owner} found batch norm layers that were created after its setup and would keep local "
                f"statistics: {', '.join(map(repr, names))}; build them in __init__ of {type(model).__name__} (setup "
                "and configure_model come too late)"
            )

    def revert(self, model: nn.Module, copies: Iterable[nn.Module]) -> None:
        """Undo `apply` in ``model`` and in copies of it. Does nothing if it was undone before."""
        stop_ignoring_in_ddp(model, self._ignored_names)
        self._ignored_names = []
        for converted in (model, *copies):
            for layer in global_batch_norm_layers(converted):
                layer.group = None
                layer.had_single_value = False
            try:
                revert_global_batch_norm(converted, self._converted_names)
            except ValueError as error:
                log.warning(f"{self._owner}: {error}. The model keeps its global batch norm layers.")
        for layer, group, is_global in self._own_layers:
            layer.group = group
            layer.is_global = is_global
        self._converted_names = []
        self._own_layers = []
