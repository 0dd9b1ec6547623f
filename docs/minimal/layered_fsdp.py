"""Layered FSDP on one page: parameters sharded inside a node, and the slow all-reduce between nodes hidden.

PyTorch's FSDP2 shards each layer over the ranks of a node, and reduce-scatters its gradient there, over fast links.
Each rank then all-reduces its shard with the ranks of the other nodes. HSDP waits for that within the step. Here, as in
layered SGD (Yu et al., arXiv 1906.05936, Algorithm 3), nobody waits before the layer is used again: a layer is updated
just before the next forward gathers its parameters. The weights are those of synchronous SGD at every use.

    torchrun --nproc-per-node=4 docs/minimal/layered_fsdp.py
"""

from collections.abc import Callable, Iterable
from functools import partial

import torch
import torch.distributed as dist
import torch.distributed.nn  # imported after the group is made, it would keep it, and gloo's threads, to the end
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

MakeOptimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer]


class LayeredFSDP:
    """Sharded layers with an optimizer each, whose steps wait for sums between groups, and are postponed.

    The forward must use every layer once. All ranks must run the same layers.
    """

    def __init__(self, layers: Iterable[nn.Module], mesh: DeviceMesh, make_optimizer: MakeOptimizer) -> None:
        self.between = mesh["between"].get_group()
        self.optimizers: dict[nn.Module, torch.optim.Optimizer] = {}
        self.pending: dict[nn.Module, list[dist.Work]] = {}  # all-reduces that are under way
        self.events: list[str] = []
        for number, layer in enumerate(layers):
            fully_shard(layer, mesh=mesh["inside"])  # from here on `layer.parameters()` are this rank's shards
            self.optimizers[layer] = make_optimizer(layer.parameters())
            for shard in layer.parameters():
                # FSDP2 calls it when it has averaged the gradient inside the group.
                shard.register_post_accumulate_grad_hook(partial(self.start_all_reduce, layer))
            # Before FSDP2's own hook, which gathers the parameters.
            layer.register_forward_pre_hook(partial(self.update_before_use, number), prepend=True)

    def start_all_reduce(self, layer: nn.Module, shard: Tensor) -> None:
        """Start to sum a gradient shard between groups (line 8), while backward goes on to the layer below."""
        gradient = shard.grad.to_local().div_(self.between.size())
        self.pending.setdefault(layer, []).append(dist.all_reduce(gradient, group=self.between, async_op=True))
        self.events.append("start all-reduce")

    def update(self, layer: nn.Module) -> None:
        """Wait for the gradient shards of a layer, and update it (line 10)."""
        if layer in self.pending:
            for all_reduce in self.pending.pop(layer):
                all_reduce.wait()
            self.optimizers[layer].step()
            self.optimizers[layer].zero_grad()
            self.events.append("update")

    def update_before_use(self, number: int, layer: nn.Module, _: object) -> None:
        """Update a layer just before its forward: the all-reduces of later layers still have time."""
        self.update(layer)
        self.events.append(f"forward {number}")


def train(
    model: nn.Sequential, make_optimizer: MakeOptimizer, batches: Iterable[tuple[Tensor, Tensor]], group_size: int
) -> list[str]:
    """Train ``model`` in place on this rank's batches, and return what happened in which order.

    Args:
        model: the same on all ranks; each of its layers with parameters is sharded.
        make_optimizer: makes any of PyTorch's elementwise optimizers from parameters.
        batches: as many on each rank.
        group_size: ranks in a group; divides the number of ranks.
    """
    shape = (dist.get_world_size() // group_size, group_size)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("between", "inside"))
    layers = [layer for layer in model if any(True for _ in layer.parameters())]
    fsdp = LayeredFSDP(layers, mesh, make_optimizer)
    for x, y in batches:  # while all-reduces run, the next mini-batch is drawn (line 8)
        fsdp.events.append("load")
        F.cross_entropy(model(x), y).backward()
        fsdp.events.append("backward")
    for layer in layers:
        fsdp.update(layer)
    return fsdp.events


def main() -> None:
    """Train, and compare with one process that has the batches of all ranks."""
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo")
    rank, world_size, steps = dist.get_rank(), dist.get_world_size(), 20
    torch.manual_seed(0)  # the same data on all ranks: x[t, r] is the mini-batch of rank r in step t
    x, y = torch.randn(steps, world_size, 3, 8), torch.randint(4, (steps, world_size, 3))

    def start() -> nn.Sequential:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))

    sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    expected = start()
    optimizer = sgd(expected.parameters())
    for t in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(expected(x[t].flatten(0, 1)), y[t].flatten()).backward()
        optimizer.step()

    model = start()
    events = train(model, sgd, zip(x[:, rank], y[:, rank], strict=True), world_size // 2)
    pairs = zip(model.parameters(), expected.parameters(), strict=True)
    difference = max((ours.full_tensor() - theirs).abs().max().item() for ours, theirs in pairs)
    if rank == 0:
        begin = [place for place, event in enumerate(events) if event == "load"]
        print(f"maximum difference to SGD on the concatenated batch {difference:.0e}")
        print("   one step:", ", ".join(events[begin[1] : begin[2]]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
