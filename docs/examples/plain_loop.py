"""Layered SGD and the hybrid in a plain training loop, without a Trainer, compared with one process.

torchrun --nproc-per-node=4 docs/examples/plain_loop.py
"""

from collections.abc import Callable, Iterable
from copy import deepcopy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_dp.strategies.plain_loop import LayeredSGDLoop, sharded_head

Batches = Iterable[tuple[Tensor, Tensor]]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of this example."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def layered_sgd(model: nn.Module, batches: Batches) -> None:
    """Train ``model`` in place, in groups of two ranks."""
    optimizer = sgd(model)
    with LayeredSGDLoop(model, group_size=2) as loop:
        for x, y in batches:
            loss = F.cross_entropy(loop(x), y)
            optimizer.zero_grad()
            loop.backward(loss)
            loop.step(optimizer)


def hybrid(model: nn.Module, batches: Batches) -> None:
    """Train ``model`` in place, each rank with its rows of ``model.head``."""
    with sharded_head(model, "head", scheme="c") as head:
        ddp = DistributedDataParallel(model)
        optimizer = sgd(model)
        for x, y in batches:
            loss = F.cross_entropy(ddp(x), y)
            optimizer.zero_grad()
            head.backward(loss)
            head.clip_grad_norm(1.0)
            head.step(optimizer)


def one_process(model: nn.Module, batches: Batches, max_norm: float = float("inf")) -> None:
    """Train ``model`` in place on the batches of all ranks."""
    optimizer = sgd(model)
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()


class Network(nn.Module):
    """A trunk and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
        self.head = nn.Sequential(nn.Linear(16, 10), nn.ReLU(), nn.Linear(10, 6))

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        return self.head(self.trunk(x))


def difference(train: Callable[[nn.Module, Batches], None], max_norm: float) -> float:
    """Return the largest difference of a parameter between ``train`` and one process with all batches."""
    rank, world_size, steps = dist.get_rank(), dist.get_world_size(), 10
    torch.manual_seed(0)  # the same model and data on all ranks; rank r takes x[t, r] in step t
    model = Network()
    expected = deepcopy(model)
    x, y = 3 * torch.randn(steps, world_size, 4, 8), torch.randint(6, (steps, world_size, 4))
    train(model, zip(x[:, rank], y[:, rank], strict=True))
    one_process(expected, zip(x.flatten(1, 2), y.flatten(1, 2), strict=True), max_norm)
    pairs = zip(model.parameters(), expected.parameters(), strict=True)
    return max((ours - theirs).abs().max().item() for ours, theirs in pairs)


def main() -> None:
    """Train with both, and compare."""
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo")
    for train, max_norm in ((layered_sgd, float("inf")), (hybrid, 1.0)):
        largest = difference(train, max_norm)
        if dist.get_rank() == 0:
            print(f"{train.__name__}: maximum difference to one process {largest:.0e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
