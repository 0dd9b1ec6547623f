"""What PyTorch offers for AlexNet, in plain loops: FSDP2, and tensor parallelism of the head with DDP of the trunk."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_dp.models import TrunkAndHead
from support.alexnet import logistic_loss, make_optimizer

LossFunction = Callable[[Tensor, Tensor], Tensor]


class OptimizerOfShards:
    """The optimizer of the other sides, on this rank's shards: torch's fused kernel refuses DTensors."""

    def __init__(self, module: nn.Module) -> None:
        self._parameters = list(module.parameters())
        self._shards = [_shard(parameter.detach()) for parameter in self._parameters]
        self._optimizer = make_optimizer(self._shards)

    def step(self) -> None:
        """Update the parameters and forget their gradients."""
        for shard, parameter in zip(self._shards, self._parameters, strict=True):
            assert parameter.grad is not None
            shard.grad = _shard(parameter.grad)
            parameter.grad = None
        self._optimizer.step()
        self._optimizer.zero_grad()


def _shard(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def fsdp2(net: TrunkAndHead) -> LossFunction:
    """Shard the parameters over the ranks and gather them for use.

    They stay gathered until backward (``reshard_after_forward=False``), the fastest way: memory is not compared here.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    linear_layers = [layer for layer in net.head.children() if isinstance(layer, nn.Linear)]
    for part in (net.trunk, *linear_layers, net):
        fully_shard(part, mesh=mesh, reshard_after_forward=False)
    return lambda x, target: logistic_loss(net(x), target)


def tensor_parallel_ddp(net: TrunkAndHead) -> LossFunction:
    """Shard the head's weights by columns, rows and columns again, over the ranks of the trunk's data parallelism.

    Every rank has its own samples, so the features of all ranks are gathered first, as in scheme (a).
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
        features: Tensor = trunk(x)
        # The loss below is divided for the head, whose gradients are summed over ranks. Those of the trunk are averaged
        # by DDP, so they must not be divided a second time.
        features.register_hook(lambda gradient: gradient * world_size)  # type: ignore[no-untyped-call, unused-ignore]
        return logistic_loss(net.head(features), target) / world_size

    return loss


TENSOR_PARALLEL = "tensor parallelism + DDP"
PEERS = {TENSOR_PARALLEL: tensor_parallel_ddp, "FSDP2": fsdp2}


def train_peer(
    name: str, net: TrunkAndHead, batch: tuple[Tensor, Tensor], num_steps: int, after_step: Callable[[], None]
) -> None:
    """Train ``net`` for ``num_steps`` steps by one of `PEERS` on this rank's batch; every rank calls it."""
    loss = PEERS[name](net)
    optimizer = OptimizerOfShards(net)
    for _ in range(num_steps):
        torch.autograd.backward(loss(*batch))
        optimizer.step()
        after_step()
