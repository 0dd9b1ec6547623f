"""AlexNet with one tower (Krizhevsky 2014, arXiv 1404.5997, section 5), and a quarter of it for 32x32 images.

Both are a convolutional ``trunk``, most of the computation, and a fully-connected ``head``, most of the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor, nn


class TrunkAndHead(nn.Module):
    """A network in two parts: ``trunk``, from images to features (N, F), and ``head``, from these to logits.

    Args:
        trunk: (N, C, H, W) to (N, F).
        head: (N, F) to (N, num_classes).
    """

    def __init__(self, trunk: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        """x: (N, C, H, W) to logits (N, num_classes)."""
        return self.head(self.trunk(x))


class AlexNet(TrunkAndHead):
    """64, 192, 384, 384 and 256 filters, then 4096, 4096 and ``num_classes`` units; for 224x224 images.

    61.8 M parameters with 1000 classes, 95 % of them in the head. The paper contradicts itself here. It gives these
    filters (footnote 1), and says that the net has "0.2% more parameters and 2.4% fewer connections" than that of 2012,
    whose two towers have 60,965,224 parameters. With the kernels and map sizes below, footnote 1's filters have 1.4 %
    more parameters and 15.8 % more connections. With 256 filters in the fourth layer there are 0.22 % more parameters
    (61,100,840) and 1.4 % fewer connections, so the sentence probably describes that net, which is also the version in
    wide use: ``filters=(64, 192, 384, 256, 256)``. The paper leaves kernels, strides and paddings open; they are those
    of that version, and maps are 224, 55, 27, 13 and 6 pixels wide.

    Departures from the paper: no local response normalization, which takes time and was found to gain nothing (Simonyan
    and Zisserman, arXiv 1409.1556, section 4.1); and weights that start with variance 1 / fan-in, without the biases of
    1 of the net of 2012. The logistic units belong to the loss: see `SplitClassifier`.

    Args:
        num_classes: outputs of the last layer, at least 2.
        in_channels: channels of the images.
        dropout: share of the head's inputs and of its first hidden units set to zero in training, 0 to 1.
        filters: of the five convolutions.

    Raises:
        ValueError: ``num_classes`` is below 2, or there are not five convolutions.
    """

    def __init__(
        self,
        num_classes: int = 1000,
        in_channels: int = 3,
        dropout: float = 0.5,
        filters: Sequence[int] = (64, 192, 384, 384, 256),
    ) -> None:
        if len(filters) != 5:
            raise ValueError(f"filters={tuple(filters)} must be five numbers, one for each convolution")
        first, second, third, fourth, fifth = filters
        trunk = nn.Sequential(
            *_convolution(in_channels, first, 11, stride=4, padding=2),
            nn.MaxPool2d(3, 2),
            *_convolution(first, second, 5),
            nn.MaxPool2d(3, 2),
            *_convolution(second, third, 3),
            *_convolution(third, fourth, 3),
            *_convolution(fourth, fifth, 3),
            nn.MaxPool2d(3, 2),
            nn.Flatten(),
        )
        super().__init__(trunk, _head(fifth * 6 * 6, 4096, num_classes, dropout))
        _init(self)


def cifar_alexnet(num_classes: int = 10, in_channels: int = 3, dropout: float = 0.5) -> TrunkAndHead:
    """AlexNet for 32x32 images: a quarter of its filters and of its hidden units.

    2.3 M parameters with 10 classes, 91 % of them in the head; about 2500 images a second, forward and backward, on one
    CPU core. To suit the small image, the first layer is 5x5 with stride 2 (32 to 16 pixels), the first two pools are
    padded (16 to 8 to 4), and the third is left out, so that 64 x 4 x 4 features remain. Else as `AlexNet`.

    Args:
        num_classes: outputs of the last layer, at least 2.
        in_channels: channels of the images.
        dropout: as for `AlexNet`.

    Raises:
        ValueError: ``num_classes`` is below 2.
    """
    trunk = nn.Sequential(
        *_convolution(in_channels, 16, 5, stride=2),
        nn.MaxPool2d(3, 2, padding=1),
        *_convolution(16, 48, 5),
        nn.MaxPool2d(3, 2, padding=1),
        *_convolution(48, 96, 3),
        *_convolution(96, 96, 3),
        *_convolution(96, 64, 3),
        nn.Flatten(),
    )
    model = TrunkAndHead(trunk, _head(64 * 4 * 4, 1024, num_classes, dropout))
    _init(model)
    return model


def _convolution(
    in_channels: int, out_channels: int, kernel_size: int, stride: int = 1, padding: int | None = None
) -> tuple[nn.Module, nn.Module]:
    padding = kernel_size // 2 if padding is None else padding
    return nn.Conv2d(in_channels, out_channels, kernel_size, stride, padding), nn.ReLU()


def _head(num_features: int, num_hidden: int, num_classes: int, dropout: float) -> nn.Sequential:
    if num_classes < 2:
        raise ValueError(f"num_classes={num_classes} leaves nothing to tell apart; use 2 or more")
    return nn.Sequential(
        nn.Dropout(dropout),
        nn.Linear(num_features, num_hidden),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(num_hidden, num_hidden),
        nn.ReLU(),
        nn.Linear(num_hidden, num_classes),
    )


def _init(model: TrunkAndHead) -> None:
    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            # Variance 1 / fan-in. The 2 / fan-in of He et al. leaves out that max pools enlarge the signal.
            nn.init.kaiming_normal_(module.weight, nonlinearity="linear")
            nn.init.zeros_(module.bias)  # type: ignore[arg-type]
    # The classes start about equally likely: else the logistic units, nearly all of which should be off, begin by
    # unlearning one half. Softmax does not see it.
    *_, last = model.head.modules()
    assert isinstance(last, nn.Linear)
    nn.init.constant_(last.bias, -math.log(last.out_features - 1))
