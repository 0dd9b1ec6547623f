"""Memonger on one page: keep the outputs of convolutions for backward, and compute everything cheap again.

Liu et al., "Training Deep Nets with larger batch size on multi-GPUs" (2018), section 4.2: "It drops result of low cost
operations"; after Chen et al., "Training Deep Nets with Sublinear Memory Cost" (arXiv 1604.06174). Between forward and
backward autograd keeps what each layer has read. Batch norm, activations and pooling cause most of that memory and take
little time. Here autograd keeps a recipe in the place of their outputs. Backward follows it once, and gets the same
bits. `torch.utils.checkpoint` moves the running statistics of batch norm twice, and the next layer keeps its output.

    torchrun --nproc-per-node=4 docs/minimal/memonger.py
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # imported after the group is made, it would keep it, and gloo's threads, to the end
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call


class Recipe:
    """How to compute an output that was dropped: the layers, and their input, which may be a recipe itself."""

    def __init__(self, layers: nn.Sequential, x: Tensor) -> None:
        self.layers = nn.Sequential(*layers)  # the same layers, without Cheap's forward
        self.kept = pack(x)
        self.x = self.y = None

    def output(self) -> Tensor:
        """Compute the output again, unless it is there already, with the graph that the layers' own backward needs."""
        if self.y is None:
            # Batch norm must not move its running statistics a second time: it gets copies of them.
            copies = {name: buffer.clone() for name, buffer in self.layers.named_buffers()}
            with torch.enable_grad():
                self.x = unpack(self.kept).detach().requires_grad_()
                self.y = functional_call(self.layers, copies, self.x)
        return self.y


def pack(tensor: Tensor) -> Any:
    """Return what is kept of a tensor that autograd asks for: its recipe and the view of it, if it has one."""
    # PyTorch keeps the Python object of a storage, and so this attribute, as long as the storage itself.
    recipe = getattr(tensor.untyped_storage(), "recipe", None)
    return tensor if recipe is None else (recipe, tensor.size(), tensor.stride(), tensor.storage_offset())


def unpack(kept: Any) -> Tensor:
    """Return the tensor that `pack` got."""
    if isinstance(kept, Tensor):
        return kept
    recipe, *view = kept
    return recipe.output().detach().as_strided(*view)


class DropOutput(torch.autograd.Function):
    """Run layers, and keep a recipe of their output, and nothing else."""

    @staticmethod
    def forward(ctx, layers: nn.Sequential, x: Tensor, *parameters: Tensor) -> Tensor:
        """Compute the output, which later layers read and autograd forgets."""
        ctx.recipe = Recipe(layers, x)
        y = nn.Sequential.forward(layers, x)
        assert y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr(), "a layer works in place"
        y.untyped_storage().recipe = ctx.recipe
        return y

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the output again, if the backward of the layer that reads it has not yet, and go through it."""
        recipe = ctx.recipe
        y = recipe.output()
        gradients = torch.autograd.grad(y, [recipe.x, *recipe.layers.parameters()], dy)
        recipe.x = recipe.y = None  # free it: no one else asks
        return None, *gradients


class Cheap(nn.Sequential):
    """Cheap layers in a row, whose output is dropped. No random numbers, nothing in place, all parameters trained."""

    def forward(self, x: Tensor) -> Tensor:
        """Compute what ``nn.Sequential`` computes."""
        return DropOutput.apply(self, x, *self.parameters()) if torch.is_grad_enabled() else super().forward(x)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Train ``model`` in place on this rank's batches, of any size, with the ranks' mean gradient.

    All ranks must have the same model and as many batches. Each drops and recomputes its own activations.
    """
    for x, y in batches:
        with saved_tensors_hooks(pack, unpack):
            loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        optimizer.step()


def kept_bytes(model: nn.Module, x: Tensor, y: Tensor) -> int:
    """Return the bytes of the activations that autograd and recipes keep between a forward and its backward."""
    sizes = {}

    def pack_and_count(tensor: Tensor) -> Any:
        kept = packed = pack(tensor)
        while not isinstance(kept, Tensor):
            kept = kept[0].kept  # what the recipe itself keeps
        sizes[kept.untyped_storage().data_ptr()] = kept.nbytes
        return packed

    with saved_tensors_hooks(pack_and_count, unpack):
        _loss = F.cross_entropy(model(x), y)  # its graph holds all of them, so that no address is used twice
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    return sum(size for address, size in sizes.items() if address not in weights)


def main() -> None:
    """Train with and without, and compare."""
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo")
    rank, world_size, steps = dist.get_rank(), dist.get_world_size(), 5
    torch.manual_seed(0)  # the same data on all ranks: x[t, r] is the mini-batch of rank r in step t
    x, y = torch.randn(steps, world_size, 4, 3, 16, 16), torch.randint(10, (steps, world_size, 4))
    results = []
    for cheap in (nn.Sequential, Cheap):
        torch.manual_seed(1)
        model = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            cheap(nn.BatchNorm2d(8), nn.ReLU()),
            nn.Conv2d(8, 8, 3, padding=1),
            cheap(nn.BatchNorm2d(8), nn.ReLU(), nn.AvgPool2d(4)),
            *(nn.Flatten(), nn.Linear(128, 10)),
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        train(model, optimizer, zip(x[:, rank], y[:, rank], strict=True))
        results.append((model.state_dict(), kept_bytes(model, x[0, rank], y[0, rank])))
    (expected, all_bytes), (actual, fewer_bytes) = results
    difference = max((actual[name] - expected[name]).abs().max().item() for name in expected)
    if rank == 0:
        print(f"maximum difference to training that keeps everything, running statistics included: {difference}")
        print(f"kept between forward and backward: {fewer_bytes} bytes instead of {all_bytes}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
