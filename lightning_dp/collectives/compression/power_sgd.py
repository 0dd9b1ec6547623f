"""PowerSGD: gradients approximated by low-rank factors (Vogels et al. 2019, arXiv 1905.13727).

The arithmetic follows PyTorch's ``powerSGD_hook``, with two differences. The residual of a group is what its own
gradient loses in the projection, as in the paper's Algorithm 2; PyTorch's also holds by how much the gradient differs
from the others' mean. And state belongs to a parameter, not to a bucket.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from lightning_dp.collectives.compression.compressor import Compressor
from lightning_dp.collectives.compression.options import PowerSGD
from lightning_dp.collectives.compression.parameters import ParameterInfo, Part, Piece
from lightning_dp.collectives.compression.wire import Wire, complete


class _Matrix(NamedTuple):
    """One gradient in a step of PowerSGD."""

    part: Part
    here: Tensor  # its elements in the bucket, (numel,)
    values: Tensor  # gradient plus residual, (n, m)
    right: Tensor  # Q of the step before, with orthonormal columns, (m, rank)


class PowerSGDCompressor(Compressor):
    """PowerSGD with warm start. A piece must consist of whole parameters.

    Args:
        options: the user's.
    """

    def __init__(self, options: PowerSGD) -> None:
        super().__init__()
        self._options = options
        self._right: dict[ParameterInfo, Tensor] = {}  # Q of the last step
        self._num_exact: dict[ParameterInfo, int] = {}  # sums of a parameter before `start_step`

    @override
    def start(self, tensor: Tensor, piece: Piece, wire: Wire) -> Iterator[None]:
        assert all(part.is_whole for part in piece.parts), "a matrix cannot be approximated in parts"
        whole: list[Tensor] = []
        matrices: list[_Matrix] = []
        for part, here in zip(piece.parts, piece.split(tensor), strict=True):
            if self._is_compressed(part.info):
                matrices.append(self._begin(part, here))
            else:
                whole.append(here)
        dtype = torch.promote_types(tensor.dtype, torch.float32)
        # Gradients that are sent whole travel with the first factors: a message fewer.
        lefts, summing = _start_sum([*whole, *(matrix.values @ matrix.right for matrix in matrices)], dtype, wire)
        if matrices:
            complete(summing)  # the second factors follow from the sums of the first
        else:
            yield from summing
        for here, total in zip(whole, lefts[: len(whole)], strict=True):
            here.copy_(total)
        if not matrices:
            return
        lefts = [orthonormal(left) for left in lefts[len(whole) :]]
        own_rights = [matrix.values.T @ left for matrix, left in zip(matrices, lefts, strict=True)]
        rights, summing = _start_sum(own_rights, dtype, wire)
        yield from summing
        for matrix, left, own_right, right in zip(matrices, lefts, own_rights, rights, strict=True):
            self._finish(matrix, left, own_right, right)

    def _is_compressed(self, info: ParameterInfo) -> bool:
        """Return whether the next sum of this gradient is compressed, and count it if it is not yet."""
        if self.rank_of(info) is None:
            return False
        num_exact = self._num_exact.get(info, 0)
        if num_exact < self._options.start_step:
            self._num_exact[info] = num_exact + 1
            return False
        return True

    def rank_of(self, info: ParameterInfo) -> int | None:
        """Return the rank of the factors, or None if the gradient is sent whole."""
        shape = info.matrix_shape
        return None if shape is None else self._options.rank_of(*shape)

    def _begin(self, part: Part, here: Tensor) -> _Matrix:
        info = part.info
        shape = info.matrix_shape
        rank = self.rank_of(info)
        assert shape is not None
        assert rank is not None
        residual = self.residuals.get(part)
        values = here.to(info.dtype) if residual is None else residual + here
        right = self._right.get(info)
        if right is None:
            # The same on all ranks, and the same whichever bucket comes first.
            generator = torch.Generator().manual_seed(info.index)
            right = torch.randn(shape[1], rank, dtype=info.dtype, generator=generator)
        return _Matrix(part, here, values.view(shape), orthonormal(right))

    def _finish(self, matrix: _Matrix, left: Tensor, own_right: Tensor, right: Tensor) -> None:
        """Write the approximation of the sum, ``left @ right.T``, and keep what it lacks of this rank's values."""
        info = matrix.part.info
        # Before `here` is written: without a residual, `values` is the same memory.
        left_out = torch.addmm(matrix.values, left, own_right.T, alpha=-1) if self._options.error_feedback else None
        matrix.here.copy_((left @ right.T).view(-1))
        if not right.sum().isfinite():
            # Infinite or NaN gradients, on all carriers alike: do not carry them into the next step.
            self.residuals.drop(info)
            self._right.pop(info, None)
            return
        self._right[info] = right
        if left_out is not None:
            self.residuals.keep(matrix.part, left_out.view(-1))

    @override
    def clear(self) -> None:
        super().clear()
        self._right.clear()
        self._num_exact.clear()

    @override
    def keeps_residual(self, info: ParameterInfo) -> bool:
        return self._options.error_feedback and self.rank_of(info) is not None

    @override
    def state_of(self, info: ParameterInfo) -> dict[str, Tensor | int]:
        state: dict[str, Tensor | int] = {}
        if info in self._right:
            state["right"] = self._right[info]
        if info in self._num_exact:
            state["num_exact"] = self._num_exact[info]
        return state

    @override
    def load_state_of(self, info: ParameterInfo, state: dict[str, Tensor | int]) -> None:
        right = state.get("right")
        shape = info.matrix_shape
        # Another rank than before: the factors begin anew.
        if isinstance(right, Tensor) and shape is not None and right.shape == (shape[1], self.rank_of(info)):
            self._right[info] = right.to(info.dtype)
        if "num_exact" in state:
            self._num_exact[info] = int(state["num_exact"])


def orthonormal(matrix: Tensor) -> Tensor:
    """Return an orthonormal basis of the columns of ``matrix``, (n, r) with n >= r; any basis where columns vanish."""
    return torch.linalg.qr(matrix)[0]


def _start_sum(tensors: list[Tensor], dtype: torch.dtype, wire: Wire) -> tuple[list[Tensor], Iterator[None]]:
    """Return the sums of several tensors over the ranks, and the one all-reduce of ``dtype`` that fills them."""
    flat = torch.cat([tensor.to(dtype).reshape(-1) for tensor in tensors])
    parts = flat.split([tensor.numel() for tensor in tensors])
    sums = [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
    return sums, wire.all_reduce(flat, dtype, dtype)
