"""All-gather of a few kilobytes on the CPU, without the detour through gloo's threads.

gloo hands every collective to a thread of its own, and another one takes what arrives: on busy cores most of the time
goes into waiting for a core. Between ranks of one host the calling thread can write to and read from Unix sockets
itself, which is several times faster (docs/adaptive_global_batch_norm.md, *Measured*). The rest goes to the group.
"""

from __future__ import annotations

import os
import socket
import struct
from itertools import count
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dp.collectives.groups import all_gather, resolve_group
from lightning_dp.collectives.point_to_point import peer_error
from lightning_dp.collectives.unix_sockets import connect

MAX_BYTES = 32 * 1024
# All ranks write before they read, and one can be a call ahead of another: two messages must fit into a socket's
# buffer, with what the kernel needs beside them, or two ranks would wait for each other.
_BUFFER_BYTES = 4 * MAX_BYTES
# How often to look for a message before going to sleep until it comes: waking up takes longer than the message.
_LOOKS = 50
_HEADER = struct.Struct("<QQ")  # number of the call, bytes of the tensor; what follows is aligned for every dtype


def small_all_gather(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return all ranks' ``tensor`` in rank order: (ranks, *shape of ``tensor``). No gradient flows through it.

    On the CPU, and where all ranks of the group share a host, up to `MAX_BYTES` go over sockets that the group's first
    call makes; all ranks come to the same choice. Under ``torch.compile`` it is the group's own all-gather, without a
    graph break: the compiler knows that collectives must keep their order. Compile on all ranks or on none.

    Args:
        tensor: of the same shape and dtype on all ranks.
        group: None: the default group.

    Raises:
        PeerError: a rank is gone, silent for longer than the group's timeout, or makes another call than this one.
    """
    group = resolve_group(group)
    if tensor.device.type != "cpu" or not 0 < tensor.nbytes <= MAX_BYTES:
        return all_gather(tensor, group)
    if torch.compiler.is_compiling():
        _leave_to_the_group(group)
        return all_gather(tensor, group)
    return _over_sockets(tensor, group)


@torch.compiler.assume_constant_result
def _leave_to_the_group(group: dist.ProcessGroup) -> None:
    """Run while a compiler traces: a rank that later falls back to eager code must meet the others' compiled code."""
    _socket_gathers.setdefault(group, None)


def _over_sockets(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    if group not in _socket_gathers:
        sockets = connect(group, _BUFFER_BYTES)
        _socket_gathers[group] = None if sockets is None else SocketAllGather(sockets)
    socket_gather = _socket_gathers[group]
    return all_gather(tensor, group) if socket_gather is None else socket_gather.all_gather(tensor, group)


class SocketAllGather:
    """A socket to each other rank of a group; closed with the group, which it must not hold."""

    def __init__(self, sockets: dict[int, socket.socket]) -> None:
        self._sockets, self._calls = sockets, count()

    def all_gather(self, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        """As `small_all_gather`; ``group`` is the socket_gather's."""
        world_size, own = group.size(), group.rank()
        header = _HEADER.pack(next(self._calls), tensor.nbytes)
        length = len(header) + tensor.nbytes
        buffer = bytearray(world_size * length)
        parts = [memoryview(buffer)[rank * length : (rank + 1) * length] for rank in range(world_size)]
        rows = torch.frombuffer(buffer, dtype=torch.uint8).view(world_size, length)[:, len(header) :]
        gathered = rows.view(tensor.dtype).view(world_size, *tensor.shape)
        parts[own][: len(header)] = header
        gathered[own] = tensor.detach()
        for peer, end in self._sockets.items():
            try:
                end.sendall(parts[own])
            except OSError as error:
                raise peer_error(group, "send to", peer, error) from error
        for peer, end in self._sockets.items():
            try:
                _receive(end, parts[peer], header)
            except OSError as error:
                raise peer_error(group, "receive from", peer, error) from error
        return gathered.contiguous()

    def __del__(self) -> None:
        for end in self._sockets.values():
            end.close()


_socket_gathers: WeakKeyDictionary[dist.ProcessGroup, SocketAllGather | None] = WeakKeyDictionary()


def _receive(end: socket.socket, part: memoryview, header: bytes) -> None:
    """Fill ``part`` with the peer's message, which must begin with ``header``."""
    looks = done = 0
    while done < len(part):
        looks += 1
        try:
            num_bytes = end.recv_into(part[done:], 0, socket.MSG_DONTWAIT if looks < _LOOKS else 0)
        except BlockingIOError as error:
            if looks >= _LOOKS:  # it was the socket's own timeout
                raise TimeoutError("the group's timeout is over") from error
            os.sched_yield()
            continue
        if not num_bytes:
            raise ConnectionResetError("the connection is closed")
        done += num_bytes
        if done >= len(header) and part[: len(header)] != header:
            (call, size), (own_call, own_size) = _HEADER.unpack(part[: len(header)]), _HEADER.unpack(header)
            raise ConnectionAbortedError(
                f"it sent {size} bytes in call {call}, where this rank sent {own_size} bytes in call {own_call}; all "
                "ranks must make the same calls"
            )
