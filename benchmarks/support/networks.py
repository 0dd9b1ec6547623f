"""Networks that the product has none of, for benchmarks: MobileNetV2 and a small vision transformer."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class InvertedResidual(nn.Module):
    """A block of MobileNetV2 (arXiv 1801.04381, table 1): expand, filter each channel, project."""

    def __init__(self, in_channels: int, out_channels: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = in_channels * expansion
        self.adds = stride == 1 and in_channels == out_channels
        self.layers = nn.Sequential(
            *(convolution(in_channels, hidden, 1) if expansion > 1 else []),
            *convolution(hidden, hidden, 3, stride, groups=hidden),
            nn.Conv2d(hidden, out_channels, 1, bias=False),
            nn.BatchNorm2d(out_channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, in_channels, H, W) to (N, out_channels, H / stride, W / stride)."""
        return x + self.layers(x) if self.adds else self.layers(x)


def convolution(in_channels: int, out_channels: int, size: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    """Return a convolution, batch norm and ReLU6 in place."""
    conv = nn.Conv2d(in_channels, out_channels, size, stride, padding=size // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(out_channels), nn.ReLU6(inplace=True)]


class MobileNetV2(nn.Sequential):
    """MobileNetV2 of width 1 (arXiv 1801.04381, table 2): 3.5 M parameters with 1000 classes."""

    def __init__(self, num_classes: int = 1000) -> None:
        layers = convolution(3, 32, 3, stride=2)
        channels = 32
        table = (
            (1, 16, 1, 1),
            (6, 24, 2, 2),
            (6, 32, 3, 2),
            (6, 64, 4, 2),
            (6, 96, 3, 1),
            (6, 160, 3, 2),
            (6, 320, 1, 1),
        )
        for expansion, out_channels, num_blocks, stride in table:
            for block in range(num_blocks):
                layers.append(InvertedResidual(channels, out_channels, stride if block == 0 else 1, expansion))
                channels = out_channels
        layers += [*convolution(channels, 1280, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2)]
        super().__init__(*layers, nn.Linear(1280, num_classes))


class VisionTransformer(nn.Module):
    """A vision transformer (arXiv 2010.11929) of width 192 with 6 layers: 3.0 M parameters with 1000 classes.

    Args:
        image_size: a multiple of 16.
        num_classes: number of logits.
    """

    def __init__(self, image_size: int, num_classes: int = 1000) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 192, 16, stride=16)
        self.positions = nn.Parameter(torch.zeros(1, (image_size // 16) ** 2, 192))
        layer = nn.TransformerEncoderLayer(192, 3, 768, activation="gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(192), nn.Linear(192, num_classes))

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.layers(x).mean(1))
