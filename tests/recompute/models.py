"""Small networks, one for each thing that recomputation could get wrong."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Two convolutions with batch norm, and a shortcut; activations and addition in place if asked for."""

    def __init__(self, channels: int, in_place: bool = False) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)), inplace=self.in_place)
        out = self.bn2(self.conv2(out))
        if self.in_place:
            out += x
        else:
            out = out + x
        return F.relu(out, inplace=self.in_place)


def residual(in_place: bool = False, num_blocks: int = 6) -> nn.Sequential:
    stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(in_place), nn.MaxPool2d(2))
    blocks = nn.Sequential(*(Block(8, in_place) for _ in range(num_blocks)))
    return nn.Sequential(stem, blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))


def dropout() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Dropout2d(0.3), nn.Conv2d(8, 8, 3), nn.GELU(), nn.Flatten()),
        *(nn.Linear(8 * 8 * 8, 16), nn.Dropout(0.5), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 5)),
    )


class Shared(nn.Module):
    """One block, batch norm included, is used three times, and a weight twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.block = Block(8)
        self.norm = nn.BatchNorm2d(8, momentum=None)
        self.head = nn.Linear(8, 8)
        self.tied = nn.Linear(8, 8)
        self.tied.weight = self.head.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(self.norm(self.block(self.stem(x))))
        x = self.norm(self.block(x)).mean((2, 3))
        return self.tied(torch.tanh(self.head(x)))


def frozen() -> nn.Sequential:
    """The stem and a block are frozen, and the block's batch norm is in evaluation."""
    model = residual()
    for part in (model[0], model[1][2]):
        part.requires_grad_(False)
    model[1][2].eval()
    return model


class Awkward(nn.Module):
    """Changes of tensors in place, views of them, a counter in a buffer, and a function of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.linear = nn.Linear(8, 5)
        self.register_buffer("total", torch.zeros(8, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        before = torch.sigmoid(x)  # saves its result; its input changes below
        x.add_(1)
        shifted = torch.sigmoid(x + self.total)
        with torch.no_grad():
            self.total += x.mean((0, 2, 3)).view(8, 1, 1)  # after it was used
        x = torch.cat([before[:, :4], Square.apply(shifted[:, 4:])], 1)
        x = x.permute(0, 2, 3, 1).contiguous().exp_().permute(0, 3, 1, 2)
        halves = x.chunk(2, 1)
        x = torch.cat([halves[1] * 2, F.silu(halves[0])], 1)
        return self.linear(x.flatten(2).softmax(-1).amax(-1))


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        y = x * x
        ctx.save_for_backward(x.sigmoid(), y)
        return y

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        return dy * ctx.saved_tensors[0] + ctx.saved_tensors[1]


class Model(nn.Module):
    """Two linear layers and a batch norm; a function of the test is its forward."""

    def __init__(self, function: Callable[[Model, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.norm, self.last = nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 16)
        nn.init.normal_(self.norm.weight)
        nn.init.normal_(self.norm.bias)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "residual": residual,
    "in place": lambda: residual(in_place=True),
    "dropout": dropout,
    "shared": Shared,
    "frozen": frozen,
    "awkward": Awkward,
}


def build(name: str) -> nn.Module:
    torch.manual_seed(3)
    return MODELS[name]()


@cache
def batch(step: int = 0, size: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(size, 3, 12, 12, generator=generator), torch.randint(5, (size,), generator=generator)


def loss_of(model: nn.Module, step: int = 0) -> Tensor:
    x, y = batch(step)
    return F.cross_entropy(model(x), y)


batch(0)  # of the first step: made here, so that no test counts its bytes
