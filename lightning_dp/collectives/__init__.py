"""Collectives of our own, on torch.distributed alone."""

from lightning_dp.collectives.comm_hooks import RingState, ring_all_reduce_hook
from lightning_dp.collectives.ring import ring_all_gather, ring_all_reduce, ring_reduce_scatter
from lightning_dp.collectives.rotation import chunk_bounds, chunk_schedule
from lightning_dp.collectives.star import star_all_reduce
from lightning_dp.collectives.transfer import PeerError

__all__ = [
    "PeerError",
    "RingState",
    "chunk_bounds",
    "chunk_schedule",
    "ring_all_gather",
    "ring_all_reduce",
    "ring_all_reduce_hook",
    "ring_reduce_scatter",
    "star_all_reduce",
]
