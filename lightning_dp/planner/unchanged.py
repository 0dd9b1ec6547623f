"""Puts back what a trial run of a model has changed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torchmetrics import Metric

from lightning_dp.recompute import activations


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Put buffers, what metrics have counted, and random number generators back afterwards."""
    before = [(module, _plain_attributes(module)) for module in model.modules() if isinstance(module, Metric)]
    with activations.unchanged(model):
        try:
            yield
        finally:
            for metric, attributes in before:
                vars(metric).update(attributes)


def _plain_attributes(metric: Metric) -> dict[str, Any]:
    """Return copies of a metric's states, which are no buffers, and of its counters."""
    copies: dict[str, Any] = {}
    for name, value in vars(metric).items():
        if isinstance(value, Tensor):
            copies[name] = value.detach().clone()
        elif isinstance(value, list):
            copies[name] = list(value)
        elif value is None or isinstance(value, (bool, int, float)):
            copies[name] = value
    return copies
