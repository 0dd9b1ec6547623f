"""The compressor of each choice."""

from __future__ import annotations

import torch

from lightning_dp.collectives.compression.compressor import Compressor, SixteenBit
from lightning_dp.collectives.compression.int8 import Int8
from lightning_dp.collectives.compression.options import Compression, PowerSGD
from lightning_dp.collectives.compression.power_sgd import PowerSGDCompressor


def make_compressor(compression: Compression) -> Compressor:
    """Return a new compressor for a choice that `check_compression` accepts, other than None."""
    if isinstance(compression, PowerSGD):
        return PowerSGDCompressor(compression)
    if compression == "int8":
        return Int8()
    return SixteenBit(torch.bfloat16 if compression == "bf16" else torch.float16)
