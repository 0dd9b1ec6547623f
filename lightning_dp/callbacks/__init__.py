"""Lightning callbacks."""

from lightning_dp.callbacks.adaptive_global_batch_norm import AdaptiveGlobalBatchNorm
from lightning_dp.callbacks.convergence import ConvergenceCriterion, Plateau
from lightning_dp.callbacks.images_per_second import ImagesPerSecond
from lightning_dp.callbacks.memonger import Memonger
from lightning_dp.callbacks.ranks_agree import RanksAgree
from lightning_dp.callbacks.step_timer import StepTimer
from lightning_dp.callbacks.time_to_accuracy import TimeToAccuracy

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
