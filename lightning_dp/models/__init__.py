"""Networks, and the LightningModules that train any of them as a classifier."""

from lightning_dp.models.alexnet import AlexNet, TrunkAndHead, cifar_alexnet
from lightning_dp.models.classifier import Classifier, SplitClassifier
from lightning_dp.models.resnet import CifarResNet, ResNet50, resnet20

__all__ = [
    "AlexNet",
    "CifarResNet",
    "Classifier",
    "ResNet50",
    "SplitClassifier",
    "TrunkAndHead",
    "cifar_alexnet",
    "resnet20",
]
