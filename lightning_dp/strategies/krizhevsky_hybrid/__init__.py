"""Hybrid parallelism (arXiv 1404.5997): a data-parallel convolutional trunk and a model-parallel head."""

from lightning_dp.strategies.krizhevsky_hybrid.strategy import KrizhevskyHybridStrategy

__all__ = ["KrizhevskyHybridStrategy"]
