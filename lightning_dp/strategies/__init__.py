"""Strategies: how gradients and updates travel between ranks."""

from lightning_dp.strategies.layered_sgd import LayeredSGDStrategy

__all__ = ["LayeredSGDStrategy"]
