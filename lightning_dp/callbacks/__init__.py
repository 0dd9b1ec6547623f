"""Lightning callbacks."""

from lightning_dp.callbacks.adaptive_global_batch_norm import AdaptiveGlobalBatchNorm
from lightning_dp.callbacks.convergence import ConvergenceCriterion, Plateau
from lightning_dp.callbacks.memonger import Memonger
from lightning_dp.callbacks.ranks_agree import RanksAgree
from lightning_dp.callbacks.timers import ImagesPerSecond, StepTimer, TimeToAccuracy

__all__ = [
    "AdaptiveGlobalBatchNorm",
    "ConvergenceCriterion",
    "ImagesPerSecond",
    "Memonger",
    "Plateau",
    "RanksAgree",
    "StepTimer",
    "TimeToAccuracy",
]
