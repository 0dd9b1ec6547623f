"""Layered FSDP: FSDP2 inside a node, and the all-reduce between nodes hidden, as in layered SGD."""

from lightning_dp.strategies.layered_fsdp.strategy import LayeredFSDPStrategy

__all__ = ["LayeredFSDPStrategy"]
