"""Networks, and the LightningModule that trains any of them as a classifier."""

from lightning_dp.models.classifier import Classifier
from lightning_dp.models.resnet import CifarResNet, resnet20

__all__ = ["CifarResNet", "Classifier", "resnet20"]
