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
from lightning_dp.strategies import KrizhevskyHybridStrategy, LayeredFSDPStrategy, LayeredSGDStrategy

__all__ = [
    "AdaptiveGlobalBatchNorm",
    "ImagesPerSecond",
    "KrizhevskyHybridStrategy",
    "LayeredFSDPStrategy",
    "LayeredSGDStrategy",
    "Memonger",
    "Plateau",
    "RanksAgree",
    "StepTimer",
    "TimeToAccuracy",
]

__version__ = "0.1.0"

register_strategy("layered_fsdp", LayeredFSDPStrategy)
for _name, _strategy in (("layered_sgd", LayeredSGDStrategy), ("krizhevsky_hybrid", KrizhevskyHybridStrategy)):
    register_strategy(_name, _strategy)
    # As Lightning names the variants of DDP. Forked processes work in notebooks, where nothing else does.
    register_strategy(f"{_name}_spawn", _strategy, start_method="spawn")
    register_strategy(f"{_name}_fork", _strategy, start_method="fork")
    register_strategy(f"{_name}_notebook", _strategy, start_method="fork")
