"""What a method sends of a bucket's gradients, and how often the sums wait for each other."""

from __future__ import annotations

import math

from lightning_dp.collectives.compression.options import Compression, PowerSGD
from lightning_dp.collectives.compression.sizes import FLOAT_BYTES, message_bytes
from lightning_dp.planner.methods import Method
from lightning_dp.planner.workload import Block

POWER_SGD = PowerSGD()  # of rank 4
_CHOICES: dict[str, Compression] = {"bf16": "bf16", "int8": "int8", "power_sgd": POWER_SGD}


def sent_bytes(block: Block, compression: float | str) -> float:
    """Return the bytes of one copy of a block's gradients, as they travel. An all-reduce sends them in two directions.

    Without `Block.shapes` the gradients count as those of one square matrix: PowerSGD's factors are the smallest for
    it, and int8 has no block of scales that is not full.
    """
    if not isinstance(compression, str):
        return block.num_bytes * compression
    choice = _CHOICES[compression]
    if block.shapes:
        return float(message_bytes(block.shapes, choice))
    side = max(1, math.isqrt(int(block.num_bytes / FLOAT_BYTES)))
    ratio = message_bytes([(side, side)], choice) / (FLOAT_BYTES * side * side)
    return block.num_bytes * min(1.0, ratio)


def num_rounds(method: Method) -> int:
    """Return how many all-reduces of a bucket wait for each other.

    PowerSGD's second factor depends on the sum of the first one. What is not compressed travels with the first factors
    in layered SGD, and in an all-reduce of its own in PyTorch's hook.
    """
    if method.compression != "power_sgd":
        return 1
    return 2 if method.family == "layered_sgd" else 3
