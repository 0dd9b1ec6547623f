"""Which compressors there are, and the checks of what a user asks for. No process group is needed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

NAMES = ("bf16", "fp16", "int8")


@dataclass(frozen=True)
class PowerSGD:
    """Options of PowerSGD (Vogels et al. 2019, arXiv 1905.13727), which approximates each gradient by a low rank.

    A gradient, viewed as an n x m matrix, is sent as two factors, n x rank and m x rank. Where that would save too
    little, and for vectors, the gradient is sent whole and exactly.

    Args:
        rank: of the approximation. A higher rank is more accurate and sends more bytes.
        start_step: number of reductions of a gradient that are exact before the first compressed one. The beginning of
            a training is sensitive to inaccurate gradients; PyTorch recommends a tenth of all steps.
        min_compression_rate: send a gradient whole if its factors have more than 1 / ``min_compression_rate`` of its
            elements.
        error_feedback: add what a step left out to the gradient of the next step. Without it, training need not
            converge.

    Raises:
        ValueError: a value is out of range.
    """

    rank: int = 4
    start_step: int = 0
    min_compression_rate: float = 2.0
    error_feedback: bool = True

    def __post_init__(self) -> None:
        for name, lowest in (("rank", 1), ("start_step", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < lowest:
                raise ValueError(f"PowerSGD({name}={value!r}) must be an integer of {lowest} or more")
        if not 1.0 <= self.min_compression_rate < float("inf"):
            raise ValueError(
                f"PowerSGD(min_compression_rate={self.min_compression_rate!r}) must be 1 or more, and finite: below 1 "
                "the factors would be larger than the gradient"
            )

    def rank_of(self, rows: int, columns: int) -> int | None:
        """Return the rank of the factors of a matrix, or None if it is sent whole: torch's ``_should_compress``."""
        rank = min(rows, columns, self.rank)
        num_elements = (rows + columns) * rank
        return rank if num_elements * self.min_compression_rate < rows * columns else None


Compression = Literal["bf16", "fp16", "int8"] | PowerSGD
"""What a user may ask for. None, where it is allowed, is the exact sum."""


def check_compression(compression: object) -> None:
    """Raise ValueError unless ``compression`` is None, one of the names, or an instance of `PowerSGD`."""
    if compression is None or isinstance(compression, PowerSGD):
        return
    if not isinstance(compression, str) or compression not in NAMES:
        known = ", ".join(map(repr, NAMES))
        raise ValueError(
            f"compression={compression!r} is not known; use None, {known} or PowerSGD(rank=4), of "
            "lightning_dp.strategies"
        )


def has_error_feedback(compression: Compression | None) -> bool:
    """Return whether this compressor keeps what a step leaves out for the next step."""
    return compression == "int8" or (isinstance(compression, PowerSGD) and compression.error_feedback)
