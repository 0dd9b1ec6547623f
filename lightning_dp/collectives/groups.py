"""Process groups: resolving a group argument, its size and backend, and a plain all-gather."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dp._private.torch_names import backend_name


def resolve_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return ``group``, or the default process group if it is None.

    Raises:
        ValueError: this rank is not a member of the group, or the default group has not been initialized.
    """
    if group is None:
        group = dist.group.WORLD
        if group is None:
            raise ValueError("there is no default group; call torch.distributed.init_process_group first")
    # `dist.new_group` returns a placeholder, not a ProcessGroup, on ranks that are not members.
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(f"group={group!r}: this rank is not a member; call the collective on member ranks only")
    return group


def group_size(group: dist.ProcessGroup | None) -> int:
    """Return the number of ranks in ``group``. None is the default group, or one rank if there is none."""
    if group is not None:
        return group.size()
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def needs_host_copy(tensor: torch.Tensor, group: dist.ProcessGroup) -> bool:
    """Return whether ``tensor`` must be copied to the CPU first: gloo sends point-to-point messages from there only."""
    return tensor.is_cuda and backend_name(group, tensor.device) == "gloo"


def all_gather(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather ``tensor`` from all ranks with the backend's own all-gather.

    Every rank of the group must call it, with the same shape and dtype.

    Returns:
        (ranks, *shape of ``tensor``), in rank order. No gradient flows through it.
    """
    gathered = tensor.new_empty(group.size(), *tensor.shape)
    dist.all_gather(list(gathered.unbind()), tensor.detach().contiguous(), group=group)
    return gathered


@contextmanager
def unbound_default_group(backend: str | None) -> Iterator[None]:
    """Allow gloo groups to be created while the default group is bound to a device, as Lightning binds it to a GPU.

    When the default group is bound, ``dist.new_group`` makes the ranks outside the new group take part in a split of
    the default group. Only NCCL communicators are created by splitting. For a gloo group, the ranks outside it would
    wait forever in NCCL's split, and a gloo default group raises an error. While the device is unbound, nothing is
    split.

    Args:
        backend: backend of the new groups. None is the backend of the default group. Only "gloo" has an effect.
    """
    default = dist.group.WORLD
    if default is None or (backend or dist.get_backend()) != "gloo":
        yield
        return
    device = default.bound_device_id
    default.bound_device_id = None
    try:
        yield
    finally:
        default.bound_device_id = device
