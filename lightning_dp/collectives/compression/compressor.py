"""The interface of a compressed all-reduce, and the simplest one: messages of 16 bits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor
from typing_extensions import override

from lightning_dp.collectives.compression.parameters import ParameterInfo, Piece
from lightning_dp.collectives.compression.residuals import Residuals
from lightning_dp.collectives.compression.wire import Wire, complete


class Compressor(ABC):
    """Sums pieces of gradient buckets over the ranks that carry them, with fewer bytes than the gradients have.

    Attributes:
        residuals: what was left out, by parameter; stays empty without error feedback.
    """

    def __init__(self) -> None:
        self.residuals = Residuals()

    @abstractmethod
    def start(self, tensor: Tensor, piece: Piece, wire: Wire) -> Iterator[None]:
        """Replace ``tensor``, (numel of the piece,), by about its sum over the ranks of ``wire``, in place.

        Every rank that carries the piece must call it, for the same pieces in the same order. The result is bitwise
        identical on all of them, and does not depend on how parameters are distributed over buckets. Sums are in
        float32, or float64 for float64 gradients.

        Returns:
            The sum that is under way: an iterator that yields at most once, when its last messages have been started.
            Meanwhile the next sum may be started. ``tensor`` holds the sum when the iterator has ended.
        """

    def all_reduce(self, tensor: Tensor, piece: Piece, wire: Wire) -> None:
        """Do what `start` begins, and return when ``tensor`` holds the sum."""
        complete(self.start(tensor, piece, wire))

    def keeps_residual(self, info: ParameterInfo) -> bool:
        """Return whether the compressor ever keeps a residual of a parameter; the same on all ranks."""
        return False

    def clear(self) -> None:
        """Forget residuals and all other state."""
        self.residuals.clear()

    def state_of(self, info: ParameterInfo) -> dict[str, Tensor | int]:
        """Return what the compressor keeps of a parameter besides the residual; the same on all carriers."""
        return {}

    def load_state_of(self, info: ParameterInfo, state: dict[str, Tensor | int]) -> None:  # noqa: B027
        """Continue with what `state_of` has returned."""


class SixteenBit(Compressor):
    """Messages of 16 bits: each group's sum is rounded once, and the sum of three or more groups once more.

    Torch's ``bf16_compress_hook`` and ``fp16_compress_hook`` also add in 16 bits. There is no error feedback: the
    rounding is about as small as the noise of the gradient.

    Args:
        dtype: ``torch.bfloat16`` or ``torch.float16``. A value beyond 65504 becomes infinite in float16.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    @override
    def start(self, tensor: Tensor, piece: Piece, wire: Wire) -> Iterator[None]:
        return wire.all_reduce(tensor, self._dtype, torch.promote_types(tensor.dtype, torch.float32))
