"""Groups of ranks whose gradients are summed with compression, played exactly by one device."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_dp.collectives.compression.compressors import Compressor, Int8, make_compressor
from lightning_dp.collectives.compression.layout import ParameterTable, whole_shard
from lightning_dp.collectives.compression.options import PowerSGD
from support.local_wire import local_wires, run_ranks

EXACT = "exact"
CHOICES: dict[str, Callable[[], Compressor] | None] = {
    EXACT: None,
    "bf16": lambda: make_compressor("bf16"),
    "fp16": lambda: make_compressor("fp16"),
    "int8": lambda: make_compressor("int8"),
    "int8 without error feedback": lambda: Int8(error_feedback=False),
    "PowerSGD rank 4": lambda: make_compressor(PowerSGD(4)),
    "PowerSGD rank 4 without error feedback": lambda: make_compressor(PowerSGD(4, error_feedback=False)),
}


class CompressedGroups:
    """Computes the gradient of a batch as ``num_groups`` groups with a slice each would, one device per group.

    Args:
        model: a classifier. Each group normalizes its slice with batch norm statistics of its own; running statistics
            are averaged over the groups.
        num_groups: how many.
        choice: one of `CHOICES`.
    """

    def __init__(self, model: nn.Module, num_groups: int, choice: str) -> None:
        self._model = model
        self._parameters = list(model.parameters())
        self._statistics = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
        table = ParameterTable(model.named_parameters())
        self._piece = whole_shard([table(parameter) for parameter in self._parameters])
        make = CHOICES[choice]
        self._compressors = [] if make is None else [make() for _ in range(num_groups)]
        self._wires = local_wires(num_groups)

    def backward(self, x: Tensor, y: Tensor) -> float:
        """Fill the parameters' gradients for a batch; return its mean loss."""
        num_groups = len(self._wires)
        start = [buffer.clone() for buffer in self._statistics]
        averages = [torch.zeros_like(buffer) for buffer in self._statistics]
        flats = []
        total = 0.0
        for images, target in zip(x.chunk(num_groups), y.chunk(num_groups), strict=True):
            _copy(start, self._statistics)
            loss = F.cross_entropy(self._model(images), target) / num_groups
            gradients = torch.autograd.grad(loss, self._parameters)
            pairs = zip(self._piece.parts, gradients, strict=True)
            flats.append(torch.cat([part.info.as_flat(gradient) for part, gradient in pairs]))
            total += loss.item()
            for average, buffer in zip(averages, self._statistics, strict=True):
                average += buffer / num_groups
        _copy(averages, self._statistics)
        for part, parameter, flat in zip(
            self._piece.parts, self._parameters, self._piece.split(self._sum(flats)), strict=True
        ):
            parameter.grad = part.info.as_parameter(flat)
        return total

    def _sum(self, flats: list[Tensor]) -> Tensor:
        if not self._compressors:
            return torch.stack(flats).sum(0)
        run_ranks(
            self._wires, lambda wire: self._compressors[wire.rank].all_reduce(flats[wire.rank], self._piece, wire)
        )
        return flats[0]


def _copy(sources: list[Tensor], places: list[Tensor]) -> None:
    with torch.no_grad():
        for place, source in zip(places, sources, strict=True):
            place.copy_(source)
