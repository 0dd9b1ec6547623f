"""Krizhevsky's hybrid parallelism on one page: a data-parallel trunk and a model-parallel fully-connected head.

Krizhevsky, "One weird trick for parallelizing convolutional neural networks" (arXiv 1404.5997), section 4. Convolutions
have most of the computation and few weights, so each of K ranks computes them for its own samples. Fully-connected
layers have most of the weights and small activations, so each rank holds 1/K of their rows, and computes these outputs
for the samples of all ranks. Then activations travel instead of the head's gradients, and no rank needs the whole head.

    torchrun --nproc-per-node=4 docs/minimal/krizhevsky_hybrid.py
"""

from collections.abc import Iterable, Sequence
from copy import deepcopy
from math import prod

import torch
import torch.distributed as dist
import torch.distributed.nn  # imported after the group is made, it would keep it, and gloo's threads, to the end
import torch.nn.functional as F
from torch import Tensor, nn


def exchange(parts: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Send ``parts[k]`` to each rank k, and return what rank k has sent here, of shape ``shapes[k]``."""
    outgoing = torch.cat([part.flatten() for part in parts])
    sizes = [prod(shape) for shape in shapes]
    incoming = outgoing.new_empty(sum(sizes))
    dist.all_to_all_single(incoming, outgoing, sizes, [part.numel() for part in parts])
    exchange.sent_bytes += outgoing.nbytes - parts[dist.get_rank()].nbytes
    return [part.view(shape) for part, shape in zip(incoming.split(sizes), shapes, strict=True)]


def sizes_of(size: int) -> list[int]:
    """Return the ``size`` of each rank."""
    sizes = [torch.empty((), dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor(size))
    return [size.item() for size in sizes]


class Gather(torch.autograd.Function):
    """Concatenate the ranks' tensors along dim 0 (samples) or 1 (outputs of a layer)."""

    @staticmethod
    def forward(ctx, x: Tensor, dim: int) -> Tensor:
        """Section 4, forward, step 3: every rank sends its activations to each other rank."""
        ctx.dim, ctx.shape, ctx.sizes = dim, x.shape, sizes_of(x.shape[dim])
        shapes = [(*x.shape[:dim], size, *x.shape[dim + 1 :]) for size in ctx.sizes]
        return torch.cat(exchange([x] * len(shapes), shapes), dim)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None]:
        """Section 4, backward, step 2: each rank sends the gradients back to where the activations came from."""
        # Every rank has used x, for its own rows or its own samples, so the gradient of x is a sum over all ranks.
        received = exchange(dy.split(ctx.sizes, ctx.dim), [ctx.shape] * len(ctx.sizes))
        return torch.stack(received).sum(0), None


class ShardedHead(nn.Module):
    """The rows of this rank of a head of ``nn.Linear`` and elementwise activations. Every call is a collective."""

    def __init__(self, head: nn.Sequential) -> None:
        super().__init__()
        self.layers = nn.ModuleList(head)
        for index, layer in enumerate(head):
            if isinstance(layer, nn.Linear):  # where K does not divide the number of rows, ranks differ by one row
                weight, bias = (p.tensor_split(dist.get_world_size())[dist.get_rank()] for p in layer.parameters())
                self.layers[index] = nn.Linear(layer.in_features, len(bias))
                self.layers[index].load_state_dict({"weight": weight, "bias": bias})

    def forward(self, features: Tensor) -> Tensor:
        """Map the features (n, F) of this rank's samples to their logits (n, C)."""
        samples = sizes_of(len(features))
        x = Gather.apply(features, 0)  # (N, F): the samples of all ranks
        for layer in self.layers:
            x = layer(x)  # (N, outputs / K)
            if isinstance(layer, nn.Linear):
                x = Gather.apply(x, 1)  # (N, outputs), which the next layer reads
        return x.split(samples)[dist.get_rank()]


def passes(scheme: str, num_samples: int) -> list[slice]:
    """Return which of its samples this rank sends through the head in each pass: section 4, step 3, (a) to (c)."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if scheme == "a":  # one pass, with all samples of all ranks
        return [slice(num_samples)]
    if scheme == "b":  # in pass k all samples of rank k
        return [slice(num_samples if k == rank else 0) for k in range(world_size)]
    # Scheme c: in each pass 1/K of the samples of every rank.
    return [slice(num_samples * k // world_size, num_samples * (k + 1) // world_size) for k in range(world_size)]


def train(trunk: nn.Module, head: nn.Sequential, batches: Iterable, scheme: str, **sgd: float) -> int:
    """Train ``trunk`` and ``head`` in place on this rank's batches (x, y); return the bytes that it sent for the head.

    The loss is the mean over the samples of all ranks, whose batches may differ in size.
    """
    exchange.sent_bytes = 0  # from here on, to other ranks
    sharded = ShardedHead(head)
    optimizer = torch.optim.SGD([*trunk.parameters(), *sharded.parameters()], **sgd)
    for x, y in batches:
        optimizer.zero_grad()
        num_samples = sum(sizes_of(len(x)))  # of all ranks
        features = trunk(x)
        leaf = features.detach().requires_grad_()
        for own in passes(scheme, len(x)):
            loss = F.cross_entropy(sharded(leaf[own]), y[own], reduction="sum") / num_samples
            loss.backward()  # one pass is in memory at a time; the features of the next one could travel meanwhile
        features.backward(leaf.grad)
        for parameter in trunk.parameters():
            dist.all_reduce(parameter.grad)  # section 4.1; the gradients of the head's rows are complete
        optimizer.step()
    sent_bytes = exchange.sent_bytes
    with torch.no_grad():
        for whole, rows in zip(head.parameters(), sharded.parameters(), strict=True):
            whole.copy_(Gather.apply(rows, 0))
    return sent_bytes


def main() -> None:
    """Train with each scheme, and compare with one process that has the batches of all ranks."""
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo")
    rank, world_size, steps = dist.get_rank(), dist.get_world_size(), 10
    torch.manual_seed(0)  # the same model and data on all ranks: x[t, r] is the mini-batch of rank r in step t
    x, y = torch.randn(steps, world_size, 4, 1, 6, 6), torch.randint(10, (steps, world_size, 4))
    trunk = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten())
    start = nn.Sequential(trunk, nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)))
    expected = deepcopy(start)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9)
    for t in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(expected(x[t].flatten(0, 1)), y[t].flatten()).backward()
        optimizer.step()

    for scheme in "abc":
        model = deepcopy(start)
        sent_bytes = train(*model, zip(x[:, rank], y[:, rank], strict=True), scheme, lr=0.1, momentum=0.9) // steps
        pairs = zip(model.parameters(), expected.parameters(), strict=True)
        difference = max((ours - theirs).abs().max().item() for ours, theirs in pairs)
        if rank == 0:
            samples = world_size * 4 // len(passes(scheme, 4))
            print(f"scheme {scheme}: maximum difference to SGD on the concatenated batch {difference:.0e}")
            print(f"   {samples} samples in the head at a time; for it rank 0 sends {sent_bytes} bytes a step")
    gradient_bytes = sum(parameter.nbytes for parameter in start[1].parameters())
    if rank == 0:
        print(f"a ring all-reduce of the head's gradient: {2 * (world_size - 1) * gradient_bytes // world_size} bytes")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
