"""What the collectives ask about a process group: its size, timeout and backend, and a plain all-gather."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dp._private.torch_names import backend_name


def resolve_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """``group``, or the default group for None.

    Raises:
        ValueError: this rank is not in it, or there is no default group.
    """
    if group is None:
        group = dist.group.WORLD
        if group is None:
            raise ValueError("there is no default group; call torch.distributed.init_process_group first")
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(f"group={group!r} holds no such rank as this one; call on the ranks of the group only")
    return group


def group_size(group: dist.ProcessGroup | None) -> int:
    """Number of ranks in ``group``; None is the default group, or a single rank where there is none."""
    if group is not None:
        return group.size()
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def needs_host_copy(tensor: torch.Tensor, group: dist.ProcessGroup) -> bool:
    """Whether messages cannot carry ``tensor`` where it is: gloo's point-to-point ones carry CPU memory only."""
    return tensor.is_cuda and backend_name(group, tensor.device) == "gloo"


def all_gather(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All ranks' ``tensor`` by the group's own all-gather: (ranks, *shape)."""
    gathered = tensor.new_empty(group.size(), *tensor.shape)
    dist.all_gather(list(gathered.unbind()), tensor.detach().contiguous(), group=group)
    return gathered


@contextmanager
def unbound_default_group(backend: str | None) -> Iterator[None]:
    """Let groups of gloo be made where the default group is bound to a device, as Lightning binds it to a GPU.

    PyTorch then has the ranks that are not in a new group take part in a split of the default one, which only groups of
    NCCL are made by: on NCCL they would wait for the members for ever, on gloo it fails. Not bound, nothing is split.
    """
    default = dist.group.WORLD
    if default is None or (backend or dist.get_backend()) != "gloo":
        yield
        return
    bound, default.bound_device_id = default.bound_device_id, None
    try:
        yield
    finally:
        default.bound_device_id = bound
