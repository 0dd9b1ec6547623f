"""Bytes that stand for a gradient in a compressed all-reduce, from the shapes of its parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from lightning_dp.collectives.compression.int8 import SCALE_BYTES
from lightning_dp.collectives.compression.options import Compression, PowerSGD
from lightning_dp.collectives.compression.parameters import BLOCK, num_blocks

FLOAT_BYTES = 4


def message_bytes(shapes: Iterable[Sequence[int]], compression: Compression | None) -> int:
    """Return the bytes of one copy of these parameters' gradients, as they travel. Gradients are float32.

    An all-reduce of N carriers sends 2 (N-1)/N of them from each; of more than two, half on the way to the sum and half
    on the way back, compressed both ways. Exact for parameters that are contiguous and not cut into shards.

    Args:
        shapes: of the parameters.
        compression: as `LayeredSGDStrategy` takes it. None: 4 bytes for each element.
    """
    return sum(_parameter_bytes(shape, compression) for shape in shapes)


def _parameter_bytes(shape: Sequence[int], compression: Compression | None) -> int:
    numel = math.prod(shape)
    if compression is None:
        return FLOAT_BYTES * numel
    if compression == "int8":
        return num_blocks(numel) * (BLOCK + SCALE_BYTES)
    if not isinstance(compression, PowerSGD):
        return 2 * numel
    if len(shape) < 2 or numel == 0:
        return FLOAT_BYTES * numel
    rows = shape[0]
    columns = numel // rows
    rank = compression.rank_of(rows, columns)
    return FLOAT_BYTES * (numel if rank is None else (rows + columns) * rank)
