"""Images as LightningDataModules, loaded by the batch. Global batches are the same for any number of ranks."""

from lightning_dp.data.cifar10 import CIFAR10
from lightning_dp.data.imagenet import ImageNet
from lightning_dp.data.shards import ImageNetShards
from lightning_dp.data.toy import Digits, Synthetic, SyntheticImageNet, smoke_data

__all__ = ["CIFAR10", "Digits", "ImageNet", "ImageNetShards", "Synthetic", "SyntheticImageNet", "smoke_data"]
