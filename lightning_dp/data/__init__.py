"""Image data as LightningDataModules, loaded by the batch. Global batches are the same for any number of ranks."""

from lightning_dp.data.cifar10 import CIFAR10
from lightning_dp.data.digits import Digits
from lightning_dp.data.synthetic import Synthetic

__all__ = ["CIFAR10", "Digits", "Synthetic"]
