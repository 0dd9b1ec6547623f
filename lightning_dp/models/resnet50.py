"""ResNet-50 for images of 224x224 pixels (He et al. 2015, arXiv 1512.03385, table 1), in its "v1.5" form."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_EXPANSION = 4
_STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))  # channels of the 3x3 convolutions, and number of blocks


class Bottleneck(nn.Module):
    """Convolutions of 1x1, 3x3 and 1x1 with batch norm, and a shortcut around them (figure 5 of the paper, right).

    A stride is that of the 3x3 convolution (v1.5), not of the first one, which would leave out three of four pixels.
    """

    def __init__(self, in_channels: int, channels: int, stride: int = 1) -> None:
        super().__init__()
        out_channels = _EXPANSION * channels
        self.conv1 = nn.Conv2d(in_channels, channels, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv3 = nn.Conv2d(channels, out_channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out_channels)
        self.shortcut = nn.Sequential()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride, bias=False), nn.BatchNorm2d(out_channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, in_channels, H, W) to (N, 4 * channels, H / stride, W / stride)."""
        out = F.relu(self.bn1(self.conv1(x)))
        out = F.relu(self.bn2(self.conv2(out)))
        return F.relu(self.bn3(self.conv3(out)) + self.shortcut(x))


class ResNet50(nn.Module):
    """ResNet-50: 25,557,032 parameters with 1000 classes. The linear layer is the submodule ``head``.

    Args:
        num_classes: number of outputs.
        zero_init: start the last batch norm of each block with weight 0, so that each block starts as the identity
            (Goyal et al. 2017, arXiv 1706.02677, section 5.1).
    """

    def __init__(self, num_classes: int = 1000, zero_init: bool = False) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, padding=3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)
        )
        stages = []
        in_channels = 64
        for place, (channels, num_blocks) in enumerate(_STAGES):
            first = Bottleneck(in_channels, channels, stride=1 if place == 0 else 2)
            in_channels = _EXPANSION * channels
            stages.append(nn.Sequential(first, *(Bottleneck(in_channels, channels) for _ in range(num_blocks - 1))))
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(in_channels, num_classes)
        self._initialize(zero_init)

    def _initialize(self, zero_init: bool) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, Bottleneck) and zero_init:
                nn.init.zeros_(module.bn3.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (N, 3, H, W) to logits (N, num_classes). H and W are 224, or other multiples of 32."""
        return self.head(torch.mean(self.stages(self.stem(x)), dim=(2, 3)))
