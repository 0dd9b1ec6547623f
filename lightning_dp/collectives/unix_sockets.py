"""Unix sockets between all ranks of a group whose ranks share a host."""

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

# The address of a socket is the folder plus the rank. It holds at most 104 bytes on macOS and 108 on Linux.
_FOLDER_BYTES = 96
_RANK = struct.Struct("<I")


def connect(group: dist.ProcessGroup, buffer_bytes: int) -> dict[int, socket.socket] | None:
    """Connect this rank to every other rank of the group by a Unix socket.

    Every rank of the group must call it. The ranks coordinate with the group's own all-gather. The sockets block. A
    send or receive that takes longer than the timeout of the group raises `BlockingIOError`.

    Args:
        group: the ranks.
        buffer_bytes: number of bytes that a rank can send before its peer receives.

    Returns:
        A connected socket per other group rank. None on all ranks if any rank cannot be reached, for example because
        the ranks do not share a host.
    """
    rank = group.rank()
    world_size = group.size()
    sockets: dict[int, socket.socket] = {}
    # `setup` closes the listener and removes the folder in every case. `connections` closes the sockets unless all of
    # them were connected.
    with ExitStack() as setup, ExitStack() as connections:
        folder = _share_folder(group, setup)
        # A rank that fails must not raise or return alone: the others would wait for it in the next all-gather. It
        # reports the failure there, and all ranks return together.
        try:
            if not folder:
                raise FileNotFoundError("rank 0 could not create a folder for the sockets")
            listener = setup.enter_context(_create_socket(buffer_bytes, group))
            listener.bind(f"{folder}/{rank}")
            listener.listen(world_size)
            reachable = True
        except (OSError, AttributeError):  # the folder is on another host, or the system has no Unix sockets
            reachable = False
        # After this all-gather every listener exists, so the connections below cannot come too early.
        if not _all(reachable, group):
            return None
        try:
            for peer in range(rank):
                sockets[peer] = connections.enter_context(_create_socket(buffer_bytes, group))
                sockets[peer].connect(f"{folder}/{peer}")
                sockets[peer].sendall(_RANK.pack(rank))
        except OSError:  # the folder is on a file system that several hosts share, but sockets are not
            reachable = False
        if not _all(reachable, group):
            return None
        # Every higher rank has connected, so accept() does not block.
        for _ in range(rank + 1, world_size):
            connection = _configure(connections.enter_context(listener.accept()[0]), buffer_bytes, group)
            (peer,) = _RANK.unpack(connection.recv(_RANK.size, socket.MSG_WAITALL))
            sockets[peer] = connection
        connections.pop_all()
    # Each rank starts with its right neighbor. If all started with rank 0, its receive would be the bottleneck.
    order = [peer % world_size for peer in range(rank + 1, rank + world_size)]
    return {peer: sockets[peer] for peer in order}


def _all(value: bool, group: dist.ProcessGroup) -> bool:
    """Return whether ``value`` is true on all ranks of the group."""
    return bool(all_gather(torch.tensor(value, device="cpu"), group).all())


def _share_folder(group: dist.ProcessGroup, setup: ExitStack) -> str:
    """Create a folder on rank 0 and return its path on all ranks. Return "" if that fails.

    Only the current user can enter the folder (mode 0700), so no other user can connect. It is removed when ``setup``
    is closed.
    """
    path = b""
    if group.rank() == 0:
        try:
            folder = tempfile.mkdtemp(prefix="lightning_dp-")
        except OSError:
            pass
        else:
            setup.callback(shutil.rmtree, folder, ignore_errors=True)
            path = os.fsencode(folder)
    if len(path) > _FOLDER_BYTES:
        path = b""
    paths = all_gather(torch.frombuffer(bytearray(path.ljust(_FOLDER_BYTES)), dtype=torch.uint8), group)
    return os.fsdecode(bytes(paths[0].tolist()).rstrip())


def _create_socket(buffer_bytes: int, group: dist.ProcessGroup) -> socket.socket:
    return _configure(socket.socket(socket.AF_UNIX), buffer_bytes, group)


def _configure(connection: socket.socket, buffer_bytes: int, group: dist.ProcessGroup) -> socket.socket:
    """Set the buffer sizes and the timeout of a socket, and return it.

    Raises:
        OSError: the system does not grant buffers of this size. A smaller buffer could deadlock `small_all_gather`.
    """
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        connection.setsockopt(socket.SOL_SOCKET, option, buffer_bytes)
        if connection.getsockopt(socket.SOL_SOCKET, option) < buffer_bytes:
            connection.close()
            raise OSError(f"the system limits a socket's buffer to less than {buffer_bytes} bytes")
    # The kernel enforces the timeout. With `settimeout` Python would call poll() before each message.
    connection.settimeout(None)
    seconds = group_timeout(group, torch.device("cpu")).total_seconds()
    timeval = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, timeval)
    return connection
