"""Unix sockets between all ranks of a group that share a host."""

from __future__ import annotations

import os
import shutil
import socket
import struct
import tempfile
from contextlib import ExitStack

import torch
import torch.distributed as dist

from lightning_dp._private.torch_names import group_timeout
from lightning_dp.collectives.groups import all_gather

_PATH_BYTES = 96  # a socket's address has at most 104 on macOS, 108 on Linux, with its name in the folder
_RANK = struct.Struct("<I")


def connect(group: dist.ProcessGroup, buffer_bytes: int) -> dict[int, socket.socket] | None:
    """Return a connected socket to each other rank, or None, on all ranks, where not all of them share a host.

    All ranks of the group must call it. What they say to each other passes through the group's own all-gather. Sends
    and receives block; those that take longer than the group's timeout raise `BlockingIOError`.

    Args:
        group: the ranks.
        buffer_bytes: how much a rank can send that its peer has not yet received.
    """
    rank, world_size = group.rank(), group.size()
    sockets: dict[int, socket.socket] = {}
    with ExitStack() as always, ExitStack() as opened:
        folder = _share_folder(group, always)
        try:
            if not folder:
                raise FileNotFoundError("rank 0 could not make a folder for the sockets")
            listener = always.enter_context(_socket(buffer_bytes, group))
            listener.bind(f"{folder}/{rank}")
            listener.listen(world_size)
            reachable = True
        except (OSError, AttributeError):  # another host's folder, or a system without Unix sockets
            reachable = False
        if not _all(reachable, group):
            return None
        try:
            for peer in range(rank):
                sockets[peer] = opened.enter_context(_socket(buffer_bytes, group))
                sockets[peer].connect(f"{folder}/{peer}")
                sockets[peer].sendall(_RANK.pack(rank))
        except OSError:  # two hosts share the folder, but no socket
            reachable = False
        if not _all(reachable, group):
            return None
        for _ in range(rank + 1, world_size):  # all wait at the door by now
            end = _set_up(opened.enter_context(listener.accept()[0]), buffer_bytes, group)
            (peer,) = _RANK.unpack(end.recv(_RANK.size, socket.MSG_WAITALL))
            sockets[peer] = end
        opened.pop_all()  # they stay open; where something has failed all are closed
    # Each rank begins with its right neighbour, so that they do not all write to the same one at once.
    return {peer % world_size: sockets[peer % world_size] for peer in range(rank + 1, rank + world_size)}


def _all(value: bool, group: dist.ProcessGroup) -> bool:
    return bool(all_gather(torch.tensor(value, device="cpu"), group).all())


def _share_folder(group: dist.ProcessGroup, always: ExitStack) -> str:
    """A new folder that only this user may enter, or "": rank 0 makes it, and removes it when ``always`` closes."""
    name = b""
    if group.rank() == 0:
        try:
            folder = tempfile.mkdtemp(prefix="lightning_dp-")
        except OSError:
            pass
        else:
            always.callback(shutil.rmtree, folder, ignore_errors=True)
            name = os.fsencode(folder)
    if len(name) > _PATH_BYTES:
        name = b""
    names = all_gather(torch.frombuffer(bytearray(name.ljust(_PATH_BYTES)), dtype=torch.uint8), group)
    return os.fsdecode(bytes(names[0].tolist()).rstrip())


def _socket(buffer_bytes: int, group: dist.ProcessGroup) -> socket.socket:
    return _set_up(socket.socket(socket.AF_UNIX), buffer_bytes, group)


def _set_up(end: socket.socket, buffer_bytes: int, group: dist.ProcessGroup) -> socket.socket:
    """Set buffers and timeout; OSError where the system grants no such buffer."""
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        end.setsockopt(socket.SOL_SOCKET, option, buffer_bytes)
        if end.getsockopt(socket.SOL_SOCKET, option) < buffer_bytes:
            end.close()
            raise OSError(f"the system limits a socket's buffer to less than {buffer_bytes} bytes")
    # The kernel keeps the time: with `settimeout` Python would poll before each message.
    end.settimeout(None)
    seconds = group_timeout(group, torch.device("cpu")).total_seconds()
    timeval = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        end.setsockopt(socket.SOL_SOCKET, option, timeval)
    return end
