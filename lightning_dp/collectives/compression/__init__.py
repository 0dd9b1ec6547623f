"""Compressed all-reduce between groups of ranks: 16 bits, 8 bits, or low-rank factors; with error feedback."""

from lightning_dp.collectives.compression.compressors import make_compressor
from lightning_dp.collectives.compression.options import (
    Compression,
    PowerSGD,
    check_compression,
    has_error_feedback,
)
from lightning_dp.collectives.compression.stages import CompressionState, compression_hook

__all__ = [
    "Compression",
    "CompressionState",
    "PowerSGD",
    "check_compression",
    "compression_hook",
    "has_error_feedback",
    "make_compressor",
]
