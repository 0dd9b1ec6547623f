"""Images as LightningDataModules, loaded by the batch. Global batches are the same for any number of ranks."""

from lightning_dp.data.cifar10 import CIFAR10
from lightning_dp.data.digits import Digits
from lightning_dp.data.imagenet import ImageNet
from lightning_dp.data.imagenet_shards import ImageNetShards
from lightning_dp.data.smoke import smoke_data
from lightning_dp.data.synthetic import Synthetic
from lightning_dp.data.synthetic_imagenet import SyntheticImageNet

__all__ = ["CIFAR10", "Digits", "ImageNet", "ImageNetShards", "Synthetic", "SyntheticImageNet", "smoke_data"]
