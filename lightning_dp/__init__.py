"""Data-parallel training of convolutional networks with PyTorch Lightning.

Importing the package registers the strategies under their names: ``Trainer(strategy="layered_sgd")``.
"""

from lightning_dp._lightning import register_strategy
from lightning_dp.callbacks import (
    AdaptiveGlobalBatchNorm,
    ImagesPerSecond,
    Memonger,
    Plateau,
    RanksAgree,
    StepTimer,
    TimeToAccuracy,
)
from lightning_dp.strategies import KrizhevskyHybridStrategy, LayeredSGDStrategy

__all__ = [
    "AdaptiveGlobalBatchNorm",
    "ImagesPerSecond",
    "KrizhevskyHybridStrategy",
    "LayeredSGDStrategy",
    "Memonger",
    "Plateau",
    "RanksAgree",
    "StepTimer",
    "TimeToAccuracy",
]

__version__ = "0.1.0"

register_strategy("layered_sgd", LayeredSGDStrategy)
register_strategy("krizhevsky_hybrid", KrizhevskyHybridStrategy)
