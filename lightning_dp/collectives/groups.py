"""Process groups: how ranks are divided, how groups are made and freed, and plain collectives on them."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

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


def create_groups(
    partition: Sequence[Sequence[int]],
    rank: int,
    timeout: timedelta | None = None,
    backend: str | None = None,
) -> dist.ProcessGroup | None:
    """Create one process group per list of global ranks. Every rank of the job must call it, with the same lists.

    Args:
        partition: the ranks of each group. No rank is in two groups.
        rank: global rank of this process.
        timeout: of every collective. None is the default of the backend.
        backend: None is the backend of the default group.

    Returns:
        The group of this rank, or None if it is in none.
    """
    with unbound_default_group(backend):
        # torch.distributed requires that every rank creates every group, and in the same order.
        groups = [dist.new_group(list(ranks), timeout=timeout, backend=backend) for ranks in partition]
    return next((group for ranks, group in zip(partition, groups, strict=True) if rank in ranks), None)


def destroy_group(group: dist.ProcessGroup | None) -> None:
    """Destroy a process group. Does nothing if it is None, or was destroyed together with the default group."""
    if group is not None:
        with suppress(ValueError):
            dist.destroy_process_group(group)


def free_earlier_groups() -> None:
    """Free the threads and sockets of destroyed groups of an earlier fit.

    They stay until Python collects what refers to the groups: a Trainer, its strategy and its module refer to each
    other.
    """
    gc.collect()


_locks: WeakKeyDictionary[dist.ProcessGroup, threading.Lock] = WeakKeyDictionary()


@contextmanager
def exclusive_use(group: dist.ProcessGroup, call: str) -> Iterator[None]:
    """Refuse ``call`` while another thread of this process is inside a call on the same group.

    Messages between two ranks are matched by their order. Two threads would mix up theirs: gloo then aborts the
    process, or returns wrong data.

    Raises:
        RuntimeError: another thread uses the group.
    """
    lock = _locks.setdefault(group, threading.Lock())
    if not lock.acquire(blocking=False):
        raise RuntimeError(
            f"{call}: another thread is using this process group, and the messages of both would be mixed up; give "
            "each thread a group of its own, created by torch.distributed.new_group"
        )
    try:
        yield
    finally:
        lock.release()


def dense(tensor: Tensor) -> Tensor:
    """Return ``tensor`` as contiguous memory that holds its values. A copy, unless it is that already.

    Backends send memory as it is. They would drop the pending conjugation or negation of a view such as ``x.conj()``.
    """
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def needs_host_copy(tensor: torch.Tensor, group: dist.ProcessGroup) -> bool:
    """Return whether ``tensor`` must be copied to the CPU first: gloo sends point-to-point messages from there only."""
    return tensor.is_cuda and backend_name(group, tensor.device) == "gloo"


def sends_from_device(tensor: torch.Tensor, group: dist.ProcessGroup) -> bool:
    """Return whether the backend sends ``tensor`` from a GPU's memory, queued on a stream: NCCL, and all but gloo."""
    return tensor.is_cuda and not needs_host_copy(tensor, group)


def all_gather(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather ``tensor`` from all ranks with the backend's own all-gather.

    Every rank of the group must call it, with the same shape and dtype.

    Returns:
        (ranks, *shape of ``tensor``), in rank order. No gradient flows through it.
    """
    gathered = tensor.new_empty(group.size(), *tensor.shape)
    dist.all_gather(list(gathered.unbind()), dense(tensor), group=group)
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


# --- Forked processes, such as a loader's workers, must not free process groups: they lack the threads to wait for.
#
# The destructor of a gloo group joins the group's threads. A forked process has a copy of the group and none of its
# threads, so that the destructor never returns. Python runs it there if the group is garbage in a reference cycle when
# the process forks (the strategy of an earlier Trainer, say), and the child's garbage collector finds it.

_was_enabled: list[bool] = []  # of the garbage collector, for the fork in progress


def _before_fork() -> None:
    _was_enabled.append(gc.isenabled())
    gc.disable()  # a collection in the child before `_after_fork_in_child` would be too early


def _after_fork_in_parent() -> None:
    if _was_enabled.pop():
        gc.enable()


def _after_fork_in_child() -> None:
    gc.freeze()  # what the child has inherited is not collected there any more; it ends with the process
    _after_fork_in_parent()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)


# --- Division of the ranks of a job into groups. Integers only.


@dataclass(frozen=True)
class RankTopology:
    """Divide ``world_size`` ranks into groups of ``group_size`` consecutive ranks.

    The first rank of each group is its leader. In layered SGD (arXiv 1906.05936, figure 3) a group is a node, and its
    leader does the work of the node's communicator.

    Raises:
        ValueError: the groups would differ in size. The message lists the sizes that work.
    """

    world_size: int
    group_size: int

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ValueError(f"world_size={self.world_size} must be at least 1")
        if self.group_size < 1 or self.world_size % self.group_size:
            possible = [size for size in range(1, self.world_size + 1) if self.world_size % size == 0]
            raise ValueError(
                f"world_size={self.world_size} is not a multiple of group_size={self.group_size}; "
                f"use {', '.join(map(str, possible[:-1]))}{' or ' if possible[:-1] else ''}{possible[-1]}"
            )

    @property
    def num_groups(self) -> int:
        """Number of groups."""
        return self.world_size // self.group_size

    def group_of(self, rank: int) -> int:
        """Return the index of the group of ``rank``."""
        return rank // self.group_size

    def group_rank(self, rank: int) -> int:
        """Return the rank of ``rank`` within its group. The leader has group rank 0."""
        return rank % self.group_size

    def members(self, rank: int) -> list[int]:
        """Return the ranks of the group of ``rank``, in ascending order."""
        first = self.group_of(rank) * self.group_size
        return list(range(first, first + self.group_size))

    def peers(self, rank: int) -> list[int]:
        """Return the ranks with the group rank of ``rank``, one per group. For a leader these are all leaders."""
        return list(range(self.group_rank(rank), self.world_size, self.group_size))


# --- Type of the callback that reports when each stage of a training step runs. Benchmarks and tests pass one in.

OnStage = Callable[[str, float, float], None]
"""Called once per stage with its name, start and end. Times are in seconds of ``time.perf_counter``."""


# --- Reduce-scatter and all-gather of one tensor, under the names that the installed PyTorch prefers.
#
# PyTorch 2.13 has deprecated ``reduce_scatter_tensor`` and ``all_gather_into_tensor`` in favor of ``*_single``.

reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""Sum chunk k of the input, (ranks * n,), into the output, (n,), on group rank k. The output may be that chunk."""
all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Put the input of group rank k, (n,), into chunk k of the output, (ranks * n,). The input may be that chunk."""
