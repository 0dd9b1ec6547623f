"""Residual networks (He et al. 2015, arXiv 1512.03385): ResNet-20 for images of 32x32 pixels, ResNet-50 for 224x224."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Shortcut(nn.Module):
    """The identity or, if the shape changes, option A of the paper: subsample the pixels and pad channels with zeros.

    It has no parameters, so a residual network has exactly as many as its plain counterpart.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.new_channels = out_channels - in_channels
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, in_channels, H, W) to (N, out_channels, H / stride, W / stride)."""
        if self.stride == 1 and self.new_channels == 0:
            return x
        x = x[:, :, :: self.stride, :: self.stride]
        before = self.new_channels // 2
        return F.pad(x, (0, 0, 0, 0, before, self.new_channels - before))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with batch norm, and a shortcut around them (figure 2 of the paper)."""

    def __init__(self, in_channels: int, out_channels: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.shortcut = Shortcut(in_channels, out_channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, in_channels, H, W) to (N, out_channels, H / stride, W / stride)."""
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return F.relu(out + self.shortcut(x))


class CifarResNet(nn.Module):
    """A convolution, three stages of n blocks with 16, 32 and 64 channels, global average pooling, a linear layer.

    It has 6n+2 layers with weights. Weights are initialized as in He et al., arXiv 1502.01852: normal with variance
    2 / fan-in. The linear layer is the submodule ``head``.

    Args:
        depth: number of layers, 6n+2: 20, 32, 44, 56, 110, ...
        num_classes: number of outputs.

    Raises:
        ValueError: ``depth`` is not 6n+2 with n >= 1.
    """

    def __init__(self, depth: int, num_classes: int = 10) -> None:
        super().__init__()
        blocks, rest = divmod(depth - 2, 6)
        if rest or blocks < 1:
            near = 6 * max(1, round((depth - 2) / 6)) + 2
            raise ValueError(f"depth={depth} is not 6n+2 with n >= 1; use 20, 32, 44, 56, 110 or the nearest, {near}")
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.stage1 = _stage(16, 16, blocks, stride=1)
        self.stage2 = _stage(16, 32, blocks, stride=2)
        self.stage3 = _stage(32, 64, blocks, stride=2)
        self.head = nn.Linear(64, num_classes)
        self.apply(_init)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (N, 3, H, W) to logits (N, num_classes). The network is made for H = W = 32."""
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.stage3(self.stage2(self.stage1(x)))
        return self.head(torch.mean(x, dim=(2, 3)))


def resnet20(num_classes: int = 10) -> CifarResNet:
    """ResNet-20: n = 3, 0.27 M parameters (269,722 with 10 classes)."""
    return CifarResNet(20, num_classes)


def _stage(in_channels: int, out_channels: int, blocks: int, stride: int) -> nn.Sequential:
    first = BasicBlock(in_channels, out_channels, stride)
    return nn.Sequential(first, *(BasicBlock(out_channels, out_channels) for _ in range(blocks - 1)))


def _init(module: nn.Module) -> None:
    if isinstance(module, (nn.Conv2d, nn.Linear)):
        nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)


# --- ResNet-50 for images of 224x224 pixels (He et al. 2015, arXiv 1512.03385, table 1), in its "v1.5" form.

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
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, Bottleneck) and zero_init:
                nn.init.zeros_(module.bn3.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (N, 3, H, W) to logits (N, num_classes). H and W are 224, or other multiples of 32."""
        return self.head(torch.mean(self.stages(self.stem(x)), dim=(2, 3)))
