"""Copies of the trained model that other callbacks hold, such as moving averages of its weights."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from lightning_dp._lightning import Callback, LightningModule
from lightning_dp.collectives.small_all_gather import small_all_gather
from lightning_dp.layers import average_running_statistics

log = logging.getLogger(__name__)


def average_over_ranks(callbacks: Iterable[Callback], model: LightningModule) -> None:
    """Average the running statistics of ``model``, and of the copies that callbacks hold, over all ranks in place.

    Every rank must call it. If the ranks hold different numbers of copies, the copies are left out with a warning.
    """
    copies = model_copies(callbacks, model)
    num_copies = small_all_gather(torch.tensor(len(copies), device=model.device)).tolist()
    if len(set(num_copies)) > 1:
        copies = []
        if model.global_rank == 0:
            log.warning(
                f"the callbacks of the ranks hold {num_copies} copies of the model; the running statistics of these "
                "copies stay those of their rank. Keep the copy on all ranks"
            )
    average_running_statistics(model, copies=copies)


def model_copies(callbacks: Iterable[Callback], model: nn.Module) -> list[nn.Module]:
    """Return the copies of ``model`` that the callbacks hold as attributes, in the order of the callbacks.

    Finds those of Lightning's WeightAveraging and StochasticWeightAveraging, and of other callbacks that keep a copy of
    the whole LightningModule in an attribute, by itself or in an AveragedModel.
    """
    copies: list[nn.Module] = []
    for callback in callbacks:
        for value in getattr(callback, "__dict__", {}).values():
            candidate: Any = value.module if isinstance(value, AveragedModel) else value
            is_copy = type(candidate) is type(model) and candidate is not model
            if is_copy and not any(candidate is other for other in copies) and _has_layers_of(candidate, model):
                copies.append(candidate)
    return copies


def _has_layers_of(candidate: nn.Module, model: nn.Module) -> bool:
    """Return whether both have buffers of the same names and shapes. A user may have changed the copy's layers."""
    buffers = {name: buffer.shape for name, buffer in candidate.named_buffers()}
    return buffers == {name: buffer.shape for name, buffer in model.named_buffers()}
