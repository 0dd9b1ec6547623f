"""Layered SGD (arXiv 1906.05936): hierarchical all-reduce, hidden behind loading, backward and the next forward."""

from lightning_dp.strategies.layered_sgd.strategy import LayeredSGDStrategy

__all__ = ["LayeredSGDStrategy"]
