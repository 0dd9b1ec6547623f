"""What PyTorch offers for the same network, in plain loops: FSDP2, and tensor parallelism of the head under DDP."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from support.alexnet import cost, optimizer_of
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_dp.models import AlexNet

Loss = Callable[[Tensor, Tensor], Tensor]


class OnShards:
    """The same optimizer as the other sides': torch's fused kernel does not know DTensors, only their parts here."""

    def __init__(self, module: nn.Module) -> None:
        self._parameters = list(module.parameters())
        self._parts = [_part(p.detach()) for p in self._parameters]
        self._optimizer = optimizer_of(self._parts)

    def step(self) -> None:
        for part, parameter in zip(self._parts, self._parameters, strict=True):
            assert parameter.grad is not None
            part.grad = _part(parameter.grad)
            parameter.grad = None
        self._optimizer.step()
        self._optimizer.zero_grad()


def _part(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def fsdp2(net: AlexNet) -> Loss:
    """Parameters divided over ranks and gathered for use. They stay until backward: memory is not what is compared."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (net.trunk, *(layer for layer in net.head if isinstance(layer, nn.Linear))):
        fully_shard(part, mesh=mesh, reshard_after_forward=False)
    fully_shard(net, mesh=mesh, reshard_after_forward=False)
    return lambda x, target: cost(net(x), target)


def tensor_parallel(net: AlexNet) -> Loss:
    """The head's weights divided by columns, rows and columns again, over the ranks of the trunk's data parallelism.

    Every rank has examples of its own, so features are gathered first, as in scheme (a).
    """
    world_size = dist.get_world_size()
    trunk = nn.parallel.DistributedDataParallel(net.trunk, gradient_as_bucket_view=True, init_sync=False)
    first, second, third = (name for name, layer in net.head.named_children() if isinstance(layer, nn.Linear))
    plan = {
        first: ColwiseParallel(input_layouts=Shard(0)),
        second: RowwiseParallel(output_layouts=Shard(0)),
        third: ColwiseParallel(input_layouts=Shard(0), output_layouts=Shard(0)),
    }
    parallelize_module(net.head, init_device_mesh("cpu", (world_size,)), plan)

    def loss(x: Tensor, target: Tensor) -> Tensor:
        features = trunk(x)
        # The head's gradients are summed over ranks, the trunk's are averaged.
        features.register_hook(lambda gradient: gradient * world_size)
        return cost(net.head(features), target) / world_size

    return loss


PEERS = {"FSDP2": fsdp2, "tensor parallel": tensor_parallel}


def train(name: str, net: AlexNet, batch: tuple[Tensor, Tensor], steps: int, after_step: Callable[[], None]) -> None:
    """``steps`` steps of one of `PEERS` on this rank's batch."""
    loss = PEERS[name](net)
    optimizer = OnShards(net)
    for _ in range(steps):
        loss(*batch).backward()
        optimizer.step()
        after_step()
