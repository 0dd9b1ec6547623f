"""Unix sockets between all ranks of a group that share a host."""

from __future__ import annotations

import shutil
import socket
import struct
import tempfile
from contextlib import ExitStack, suppress

import torch
import torch.distributed as dist
from torch import Tensor

_PATH_BYTES = 128  # the address of a Unix socket has at most 108
_RANK = struct.Struct("<I")


def connect(group: dist.ProcessGroup) -> dict[int, socket.socket] | None:
    """Return a connected socket to each other rank, or None, on all ranks, where not all of them share a host.

    All ranks of the group must call it. What they say to each other passes through the group's own all-gather. Sends
    and receives that take longer than the group's timeout raise `BlockingIOError`.
    """
    rank, world_size = group.rank(), group.size()
    folder = _folder(group)
    sockets: dict[int, socket.socket] = {}
    with ExitStack() as opened:
        if rank == 0:
            opened.callback(shutil.rmtree, folder, ignore_errors=True)
        try:
            listener = opened.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(f"{folder}/{rank}")
            listener.listen(world_size)
            reachable = bool(folder)
        except (OSError, AttributeError):  # another host's folder, or no Unix sockets on this system
            reachable = False
        if not all_gather(torch.tensor(reachable), group).all():
            return None
        try:
            for peer in range(rank):
                sockets[peer] = opened.enter_context(socket.socket(socket.AF_UNIX))
                sockets[peer].connect(f"{folder}/{peer}")
                sockets[peer].sendall(_RANK.pack(rank))
        except OSError:  # two hosts share the folder, but no socket
            reachable = False
        if not all_gather(torch.tensor(reachable), group).all():
            return None
        for _ in range(rank + 1, world_size):  # all wait at the door by now
            end = opened.enter_context(listener.accept()[0])
            (peer,) = _RANK.unpack(end.recv(_RANK.size, socket.MSG_WAITALL))
            sockets[peer] = end
        _limit(list(sockets.values()), group)
        listener.close()
        shutil.rmtree(folder, ignore_errors=True)
        opened.pop_all()
    # Each rank begins with its right neighbour, so that they do not all write to the same one at once.
    return {peer % world_size: sockets[peer % world_size] for peer in range(rank + 1, rank + world_size)}


def all_gather(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All ranks' ``tensor`` by the group's own all-gather: (ranks, *shape)."""
    gathered = tensor.new_empty(group.size(), *tensor.shape)
    dist.all_gather(list(gathered.unbind()), tensor.detach().contiguous(), group=group)
    return gathered


def _folder(group: dist.ProcessGroup) -> str:
    """A new folder of rank 0 that only its user may enter; "" where it could make none."""
    folder = ""
    if group.rank() == 0:
        with suppress(OSError):
            folder = tempfile.mkdtemp(prefix="lightning_dp-")
    name = folder.encode().ljust(_PATH_BYTES)[:_PATH_BYTES]
    names = all_gather(torch.frombuffer(bytearray(name), dtype=torch.uint8), group)
    return bytes(names[0].tolist()).decode(errors="replace").rstrip()


def _limit(sockets: list[socket.socket], group: dist.ProcessGroup) -> None:
    """Give the sockets the group's timeout, in the kernel: ``settimeout`` would ask it before each message."""
    seconds = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    timeval = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    for end in sockets:
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            end.setsockopt(socket.SOL_SOCKET, option, timeval)
