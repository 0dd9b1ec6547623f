"""PyTorch's sharded data parallelism under Lightning on CPU: FSDP2, and HSDP, which shards inside a host only."""

from __future__ import annotations

from functools import cache

import torch
from pytorch_lightning.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from typing_extensions import override


@cache  # a mesh makes process groups, whose threads would slow down all later runs of this process
def _mesh(num_nodes: int, world_size: int) -> DeviceMesh:
    if num_nodes == 1:
        return init_device_mesh("cpu", (world_size,))
    shape = (num_nodes, world_size // num_nodes)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))  # without names it is refused


class ShardedStrategy(DDPStrategy):
    """FSDP2 in place of DDP: every layer with parameters is a unit, and stays gathered until its backward.

    Gradients are reduce-scattered in backward, and parameters all-gathered in the next forward
    (``reshard_after_forward=False``, the fastest way). Lightning's own strategy for FSDP2 needs GPUs.

    Args:
        shards_inside_hosts: HSDP: shard over the ranks of a host, and all-reduce the shards' gradients between hosts.
    """

    def __init__(self, shards_inside_hosts: bool = False) -> None:
        super().__init__()
        self._shards_inside_hosts = shards_inside_hosts

    @override
    def configure_ddp(self) -> None:
        module = self.lightning_module
        assert module is not None
        mesh = _mesh(self.num_nodes if self._shards_inside_hosts else 1, self.world_size)
        (net,) = module.children()
        layers = [layer for layer in net.modules() if next(layer.parameters(recurse=False), None) is not None]
        for part in dict.fromkeys([*layers, net]):
            fully_shard(part, mesh=mesh, reshard_after_forward=False)


def flat_parameters(module: nn.Module) -> Tensor:
    """Return all parameters in one vector. With sharded parameters every rank must call it."""
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in (q.detach() for q in module.parameters())]
    return torch.cat([tensor.flatten() for tensor in whole])
