"""Where the gradient of each parameter lies in a bucket, and in the piece of the bucket that one rank carries.

Compressors keep their state by parameter, because DDP rebuilds its buckets, and put nothing into it that depends on a
bucket. So the same gradients give the same bits whatever the buckets are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from lightning_dp._private.torch_names import without_torch_function
from lightning_dp.collectives.ring import chunk_bounds

BLOCK = 256
"""Elements that share a scale in 8-bit compression. A piece never ends within a block."""


def num_blocks(numel: int) -> int:
    """Return the number of blocks of ``numel`` elements; the last one may be smaller than the others."""
    return -(-numel // BLOCK)


@dataclass(frozen=True, eq=False)
class ParameterInfo:
    """What compressors need to know of a parameter. There is one object per parameter, which serves as its key.

    Attributes:
        name: in the module.
        index: place among all parameters; the same on all ranks.
        shape: of the parameter.
        stride: of its gradient in a bucket: that of a dense parameter, else the contiguous one.
        first_block: number of blocks of all parameters before it.
        dtype: of the arithmetic: float64 for float64, else float32.
    """

    name: str
    index: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    first_block: int
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Number of elements."""
        return torch.Size(self.shape).numel()

    @property
    def matrix_shape(self) -> tuple[int, int] | None:
        """Rows and columns of the gradient as a matrix, without a copy of its memory; None for vectors.

        The first dimension of the parameter, which are output features, against all others. A different order of
        columns (``channels_last``), or the transposed matrix, has the same low-rank approximations.
        """
        if len(self.shape) < 2 or self.numel == 0:
            return None
        num_outputs = self.shape[0]
        rest = self.numel // num_outputs
        if self.stride[0] == rest:
            return num_outputs, rest
        if self.stride[0] == 1:
            return rest, num_outputs
        return None

    def as_parameter(self, flat: Tensor) -> Tensor:
        """Return ``flat``, (numel,) as it lies in a bucket, as a view with the parameter's shape."""
        return flat.as_strided(self.shape, self.stride)

    def as_flat(self, tensor: Tensor) -> Tensor:
        """Return a copy of ``tensor``, which has the parameter's shape, as it would lie in a bucket: (numel,)."""
        flat = torch.empty(self.numel, dtype=self.dtype)
        self.as_parameter(flat).copy_(tensor)
        return flat


class ParameterTable:
    """The `ParameterInfo` of each parameter.

    Args:
        named: names and parameters, in an order that is the same on all ranks. Parameters that are not among them get
            a number for a name when they first occur.
    """

    def __init__(self, named: Iterable[tuple[str, Tensor]] = ()) -> None:
        self._infos: dict[Tensor, ParameterInfo] = {}
        self._num_blocks = 0
        for name, parameter in named:
            self._add(name, parameter)

    def __call__(self, parameter: Tensor) -> ParameterInfo:
        """Return what is known of ``parameter``."""
        if parameter not in self._infos:
            self._add(str(len(self._infos)), parameter)
        return self._infos[parameter]

    def all(self) -> list[ParameterInfo]:
        """Return all parameters, in their order."""
        return list(self._infos.values())

    def _add(self, name: str, parameter: Tensor) -> None:
        with without_torch_function():  # layered SGD watches its parameters, and this is no use of one
            # DDP shows its hooks complex gradients as pairs of real numbers.
            real = torch.view_as_real(parameter.detach()) if parameter.is_complex() else parameter
            info = ParameterInfo(
                name,
                len(self._infos),
                tuple(real.shape),
                _bucket_stride(real),
                self._num_blocks,
                torch.float64 if real.dtype == torch.float64 else torch.float32,
            )
        self._infos[parameter] = info
        self._num_blocks += num_blocks(info.numel)


def _bucket_stride(parameter: Tensor) -> tuple[int, ...]:
    """Return the stride of the gradient's view of a bucket, as DDP makes it."""
    expected = 1
    for stride, size in sorted(zip(parameter.stride(), parameter.shape, strict=True)):
        if size != 1 and stride != expected:
            return torch.empty(parameter.shape, device="meta").stride()  # not dense
        expected *= size
    return tuple(parameter.stride())


@dataclass(frozen=True)
class ParamSlice:
    """Elements ``begin`` to ``end`` of one parameter's gradient, in a piece of a bucket."""

    info: ParameterInfo
    begin: int
    end: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.end - self.begin


@dataclass(frozen=True)
class BucketShard:
    """What one rank carries of a bucket: consecutive parts."""

    parts: tuple[ParamSlice, ...]

    def split(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return the part of ``tensor``, (numel of the piece,), that belongs to each of ``parts``."""
        return tensor.split([part.numel for part in self.parts])


def whole_shard(infos: Sequence[ParameterInfo]) -> BucketShard:
    """Return the piece that holds a whole bucket with the gradients of these parameters."""
    return BucketShard(tuple(ParamSlice(info, 0, info.numel) for info in infos))


def cut(infos: Sequence[ParameterInfo], num_pieces: int) -> list[BucketShard]:
    """Cut a bucket into pieces of about equal size, at the ends of blocks. A piece may be empty."""
    first_blocks = [0, *accumulate(num_blocks(info.numel) for info in infos)]
    pieces = []
    for begin, end in chunk_bounds(first_blocks[-1], num_pieces):
        parts = []
        for info, (first, last) in zip(infos, pairwise(first_blocks), strict=True):
            lower = max(begin, first) - first
            upper = min(end, last) - first
            if lower < upper:
                parts.append(ParamSlice(info, lower * BLOCK, min(upper * BLOCK, info.numel)))
        pieces.append(BucketShard(tuple(parts)))
    return pieces
