"""Collective operations built on torch.distributed alone."""

from lightning_dp.collectives.comm_hooks import RingState, ring_all_reduce_hook
from lightning_dp.collectives.compression.options import PowerSGD
from lightning_dp.collectives.compression.stages import CompressionState, compression_hook
from lightning_dp.collectives.point_to_point import PeerError
from lightning_dp.collectives.ring import (
    chunk_bounds,
    chunk_schedule,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
    star_all_reduce,
)

__all__ = [
    "CompressionState",
    "PeerError",
    "PowerSGD",
    "RingState",
    "chunk_bounds",
    "chunk_schedule",
    "compression_hook",
    "ring_all_gather",
    "ring_all_reduce",
    "ring_all_reduce_hook",
    "ring_reduce_scatter",
    "star_all_reduce",
]
