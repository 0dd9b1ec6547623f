"""Networks, and the LightningModules that train any of them as a classifier."""

from lightning_dp.models.alexnet import AlexNet, TrunkAndHead, cifar_alexnet
from lightning_dp.models.classifier import Classifier
from lightning_dp.models.resnet import CifarResNet, resnet20
from lightning_dp.models.resnet50 import ResNet50
from lightning_dp.models.split_classifier import SplitClassifier

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
