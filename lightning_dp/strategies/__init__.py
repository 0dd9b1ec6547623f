"""Strategies: how gradients and updates travel between ranks."""

from lightning_dp.collectives.compression.options import PowerSGD
from lightning_dp.strategies.consolidate import consolidate_checkpoint
from lightning_dp.strategies.krizhevsky_hybrid import KrizhevskyHybridStrategy
from lightning_dp.strategies.layered_fsdp import LayeredFSDPStrategy
from lightning_dp.strategies.layered_sgd import LayeredSGDStrategy

__all__ = [
    "KrizhevskyHybridStrategy",
    "LayeredFSDPStrategy",
    "LayeredSGDStrategy",
    "PowerSGD",
    "consolidate_checkpoint",
]
