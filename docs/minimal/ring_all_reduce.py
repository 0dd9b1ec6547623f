"""Ring all-reduce on one page: sum a tensor over N ranks, each of which sends 2 (N - 1) / N of it, for any N.

A. Gibiansky, "Bringing HPC Techniques to Deep Learning" (Baidu Research, 2017). Ranks form a ring. Each cuts its tensor
into N chunks, sends to its right neighbor only, and receives from its left neighbor only. First the sums travel
(scatter-reduce): after N - 1 steps each rank holds one complete chunk. Then the complete chunks travel (all-gather).

    torchrun --nproc-per-node=4 docs/minimal/ring_all_reduce.py
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
import torch.distributed.nn  # imported after the group is made, it would keep it, and gloo's threads, to the end
import torch.nn.functional as F
from torch import Tensor, nn


def exchange(outgoing: Tensor, incoming: Tensor) -> int:
    """Send to the right neighbor and receive from the left one at the same time. Return the bytes sent."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sent = dist.isend(outgoing, (rank + 1) % world_size)
    dist.recv(incoming, (rank - 1) % world_size)
    sent.wait()
    return outgoing.nbytes


def ring_all_reduce(flat: Tensor) -> int:
    """Replace ``flat`` by its sum over all ranks, bitwise identical on each. Return the bytes that this rank has sent.

    Args:
        flat: (numel,) contiguous, with the same numel and dtype on all ranks. N need not divide numel.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    chunks = flat.tensor_split(world_size)  # views, whose sizes differ by one at most
    inbox = torch.empty_like(chunks[0])  # no chunk is larger
    sent_bytes = 0

    # "The Scatter-Reduce": the nth rank "starts by sending chunk n and receiving chunk n - 1, and then proceeds
    # backwards from there, each iteration sending the chunk it received in the previous iteration."
    for step in range(world_size - 1):
        theirs = chunks[(rank - step - 1) % world_size]
        received = inbox[: theirs.numel()]
        sent_bytes += exchange(chunks[(rank - step) % world_size], received)
        theirs += received

    # "The Allgather": the same, except that ranks "simply overwrite the chunks", and that the nth rank "starts by
    # sending the n+1th chunk": the scatter-reduce has just completed that one there.
    for step in range(world_size - 1):
        theirs = chunks[(rank - step) % world_size]
        sent_bytes += exchange(chunks[(rank - step + 1) % world_size], theirs)
    return sent_bytes


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[tuple[Tensor, Tensor]]) -> int:
    """Train ``model`` in place on this rank's batches, with the ranks' mean gradient; return the bytes sent.

    All ranks must have the same model and as many batches. Ranks count equally, whatever the size of their batches.
    """
    sent_bytes = 0
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        flat /= dist.get_world_size()  # before the sum, so that a sum of float16 numbers does not overflow
        sent_bytes += ring_all_reduce(flat)
        means = flat.split([gradient.numel() for gradient in gradients])
        for gradient, mean in zip(gradients, means, strict=True):
            gradient.copy_(mean.view_as(gradient))
        optimizer.step()
    return sent_bytes


def main() -> None:
    """Train, and compare with one process that has the batches of all ranks."""
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo")
    rank, world_size, steps = dist.get_rank(), dist.get_world_size(), 20
    torch.manual_seed(0)  # the same data on all ranks: x[t, r] is the mini-batch of rank r in step t
    x, y = torch.randn(steps, world_size, 3, 8), torch.randint(5, (steps, world_size, 3))

    def start() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 5))
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    expected, optimizer = start()
    for t in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(expected(x[t].flatten(0, 1)), y[t].flatten()).backward()
        optimizer.step()

    model, optimizer = start()
    sent_bytes = train(model, optimizer, zip(x[:, rank], y[:, rank], strict=True)) // steps
    if rank == 0:
        pairs = list(zip(model.parameters(), expected.parameters(), strict=True))
        difference = max((ours - theirs).abs().max().item() for ours, theirs in pairs)
        gradient_bytes = sum(parameter.nbytes for parameter in model.parameters())
        print(f"maximum difference to SGD on the concatenated batch {difference:.0e}")
        print(f"gradient of {gradient_bytes} bytes: rank 0 sends {sent_bytes} bytes a step, in a ring of any size at")
        print(f"most twice the gradient; as the single reducer it would send {(world_size - 1) * gradient_bytes}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
