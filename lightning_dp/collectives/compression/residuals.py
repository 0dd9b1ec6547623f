"""Error feedback: what compression left out of each gradient, to be added to the next one.

Seide et al. 2014 (1-bit SGD); Karimireddy et al. 2019 (arXiv 1901.09847) show why SGD needs it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_dp.collectives.compression.parameters import ParameterInfo, Part


class Residuals:
    """The residual of each parameter, or of the part of it that this rank carries.

    A residual has the scale of the gradient that is averaged over all ranks. The sum of all ranks' residuals is what
    has not reached the parameters yet.
    """

    def __init__(self) -> None:
        self._held: dict[ParameterInfo, tuple[int, Tensor]] = {}  # where it begins in the parameter, and the elements

    def get(self, part: Part) -> Tensor | None:
        """Return the residual of ``part``, (numel,), or None if there is none yet."""
        if part.info not in self._held:
            return None
        begin, held = self._held[part.info]
        assert begin <= part.begin, "the residual lies on another rank"
        assert part.end <= begin + len(held), "the residual lies on another rank"
        return held[part.begin - begin : part.end - begin]

    def keep(self, part: Part, residual: Tensor) -> None:
        """Replace the residual of the parameter by that of ``part``, (numel,), which is kept without a copy."""
        self._held[part.info] = (part.begin, residual)

    def drop(self, info: ParameterInfo) -> None:
        """Forget the residual of a parameter."""
        self._held.pop(info, None)

    def clear(self) -> None:
        """Forget all residuals."""
        self._held.clear()

    def expanded(self, info: ParameterInfo) -> Tensor:
        """Return the residual of the whole parameter, (numel,): zero where this rank holds nothing. A copy."""
        whole = torch.zeros(info.numel, dtype=info.dtype)
        if info in self._held:
            begin, held = self._held[info]
            whole[begin : begin + len(held)] = held
        return whole
