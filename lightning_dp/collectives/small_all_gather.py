"""All-gather of a few kilobytes on the CPU, without the latency of gloo's threads.

gloo hands each collective to a worker thread, and another thread receives the messages. When the cores are busy, these
threads mostly wait for a core. Ranks of one host can exchange messages over Unix sockets in the calling thread, which
is several times faster. All other cases use the group's own all-gather.
"""

from __future__ import annotations

import os
import shutil
import socket
import struct
import tempfile
import time
import zlib
from contextlib import ExitStack, suppress
from functools import lru_cache
from itertools import count
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dp._private.torch_names import backend_name, group_timeout
from lightning_dp.collectives import groups
from lightning_dp.collectives.groups import all_gather, dense, exclusive_use, resolve_group
from lightning_dp.collectives.point_to_point import naming_backend_errors, peer_error

MAX_BYTES = 32 * 1024
# Every rank sends before it receives, and a rank can be one call ahead of another. A socket's buffer must therefore
# hold two messages and the kernel's overhead. Otherwise two ranks could block in send, each waiting for the other to
# receive.
_BUFFER_BYTES = 4 * MAX_BYTES
# Number of non-blocking attempts to receive before the thread sleeps. Waking up takes longer than a typical message.
_MAX_POLLS = 50
# Index of the call, and dtype and shape of the tensor. With 64 bytes the tensor behind it is aligned for any dtype.
_HEADER = struct.Struct("<Q56s")


def small_all_gather(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Gather ``tensor`` from all ranks, fastest for at most `MAX_BYTES` on the CPU.

    Every rank of the group must call it, with the same shape and dtype, and from one thread at a time. If all ranks of
    the group share a host, CPU tensors of at most `MAX_BYTES` are sent over Unix sockets, which the first call
    connects. The ranks of one host first compare dtype and shape over the sockets, for tensors of any size, so all take
    the same path; larger tensors then go through the group's own all-gather. If the group spans hosts, nothing is
    compared.

    Under ``torch.compile`` the group's own all-gather is used, without a graph break: the compiler knows that it must
    not reorder collectives, but knows nothing about sockets. Compile on all ranks or on none.

    Args:
        tensor: of the same shape and dtype on all ranks.
        group: None is the default group.

    Returns:
        (ranks, *shape of ``tensor``), in rank order. No gradient flows through it.

    Raises:
        PeerError: a rank has died, has been silent for longer than the timeout of the group, or makes a different call.
        RuntimeError: the same without sockets, where it is not known which of the group's ranks, or another thread is
            using the group.
    """
    group = resolve_group(group)
    if tensor.device.type != "cpu":
        return gather_on_device(tensor, group)
    if torch.compiler.is_compiling():
        _disable_sockets(group)
        return all_gather(tensor, group)
    return _gather_on_cpu(tensor, group)


def gather_on_device(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather ``tensor``, as `small_all_gather` does, in one operation of the backend that writes one tensor.

    Given a list of outputs, as `groups.all_gather` gives it, NCCL gathers into a buffer of its own, and copies each
    rank's part out of it.
    """
    # Gloo has this form in some versions of torch only. The compiler knows the other form, and cannot trace the
    # question for the backend.
    if torch.compiler.is_compiling() or backend_name(group, tensor.device) == "gloo":
        return all_gather(tensor, group)
    gathered = tensor.new_empty(group.size(), *tensor.shape)
    groups.all_gather_single(gathered.view(-1), dense(tensor).view(-1), group=group)
    return gathered


@torch.compiler.assume_constant_result
def _disable_sockets(group: dist.ProcessGroup) -> None:
    """Use the group's all-gather in eager code too, from the moment a compiler traces a call.

    A rank may later fall back to eager code, for example at a recompilation limit. On sockets it would wait for ranks
    that still run compiled code.
    """
    _socket_gathers.setdefault(group, None)


def waited_s() -> float:
    """Return the seconds that this process has spent in `small_all_gather`, waiting for its peers included.

    Tensors on the CPU only, and not in compiled code. The difference of two calls is the time in between.
    """
    return _waited_s


_waited_s = 0.0


def _gather_on_cpu(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    global _waited_s
    begin_s = time.perf_counter()
    try:
        if group not in _socket_gathers:
            sockets = connect(group)
            _socket_gathers[group] = None if sockets is None else SocketAllGather(sockets)
        socket_gather = _socket_gathers[group]
        if socket_gather is None:
            with naming_backend_errors(lambda: f"an all-gather of ranks {_global_ranks(group)}"):
                return all_gather(tensor, group)
        with exclusive_use(group, "small_all_gather"):
            return socket_gather.all_gather(tensor, group)
    finally:
        _waited_s += time.perf_counter() - begin_s


def _global_ranks(group: dist.ProcessGroup) -> str:
    try:
        return ", ".join(map(str, dist.get_process_group_ranks(group)))
    except (KeyError, ValueError):  # it was not made by `dist.new_group`
        return f"0 to {group.size() - 1} of a group"


class SocketAllGather:
    """All-gather over one connected socket per other rank of a group.

    It must not hold a reference to the group: it lives as long as the group does, and closes the sockets then.

    Args:
        sockets: a socket per other group rank, in the order in which this rank sends.
    """

    def __init__(self, sockets: dict[int, socket.socket]) -> None:
        self._sockets = sockets
        self._calls = count()

    def all_gather(self, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Gather ``tensor``, as `small_all_gather` does. ``group`` is the group that the sockets connect."""
        world_size = group.size()
        rank = group.rank()
        header = _HEADER.pack(next(self._calls), _describe(tensor.dtype, tensor.shape))
        # For a large tensor only the header is sent. Otherwise, if one rank's tensor is too large by mistake, it would
        # wait in the group's all-gather, and its peers at their sockets.
        is_small = tensor.nbytes <= MAX_BYTES
        message_bytes = len(header) + tensor.nbytes * is_small
        # One buffer holds all messages. The result is a view of it that leaves out the headers.
        buffer = bytearray(world_size * message_bytes)
        messages = [memoryview(buffer)[start : start + message_bytes] for start in range(0, len(buffer), message_bytes)]
        messages[rank][: len(header)] = header
        gathered = tensor.new_empty(world_size, *tensor.shape)
        if is_small and tensor.nbytes:
            rows = torch.frombuffer(buffer, dtype=torch.uint8).view(world_size, message_bytes)[:, len(header) :]
            gathered = rows.view(tensor.dtype).view(world_size, *tensor.shape)
            gathered[rank] = tensor.detach()
        self._exchange(messages, header, group)
        return gathered.contiguous() if is_small else all_gather(tensor, group)

    def _exchange(self, messages: list[memoryview], header: bytes, group: dist.ProcessGroup) -> None:
        """Send ``messages[rank]`` to every peer, and fill the other messages with those of the peers."""
        rank = group.rank()
        # All sends come before all receives: no rank waits for another rank to send first.
        for peer, connection in self._sockets.items():
            try:
                connection.sendall(messages[rank])
            except OSError as error:
                raise peer_error(group, "send to", peer, error) from error
        for peer, connection in self._sockets.items():
            try:
                _receive(connection, messages[peer], header)
            except OSError as error:
                raise peer_error(group, "receive from", peer, error) from error

    def __del__(self) -> None:
        for connection in self._sockets.values():
            connection.close()


# None: the group uses its own all-gather. The keys are weak, so that destroying a group closes its sockets.
_socket_gathers: WeakKeyDictionary[dist.ProcessGroup, SocketAllGather | None] = WeakKeyDictionary()


@lru_cache(maxsize=1024)
def _describe(dtype: torch.dtype, shape: torch.Size) -> bytes:
    """Return dtype and shape in at most 56 bytes, with a checksum in place of what is too long."""
    text = f"{str(dtype).removeprefix('torch.')} {list(shape)}".encode()
    return text if len(text) <= 56 else text[:40] + b"... %08x" % zlib.crc32(text)


def _receive(connection: socket.socket, message: memoryview, header: bytes) -> None:
    """Fill ``message`` from the socket. The received message must begin with ``header``.

    Raises:
        OSError: the connection is closed, the timeout has expired, or the peer makes a different call.
    """
    num_polls = 0
    received = 0
    while received < len(message):
        num_polls += 1
        try:
            flags = socket.MSG_DONTWAIT if num_polls < _MAX_POLLS else 0
            num_bytes = connection.recv_into(message[received:], 0, flags)
        except BlockingIOError as error:
            if num_polls >= _MAX_POLLS:  # this receive was blocking, so the socket's timeout has expired
                raise TimeoutError("the group's timeout has expired") from error
            # Give the core to the peer, which may be waiting for one in order to send.
            os.sched_yield()
            continue
        if not num_bytes:
            raise ConnectionResetError("the connection is closed")
        received += num_bytes
        # Checked as soon as the header is there: a peer that sends fewer bytes would otherwise leave this rank waiting.
        if received >= len(header) and message[: len(header)] != header:
            raise ConnectionAbortedError(
                f"the peer sent {_describe_header(message[: len(header)])}, where this rank sent "
                f"{_describe_header(header)}; all ranks must make the same calls"
            )


def _describe_header(header: bytes | memoryview) -> str:
    call, description = _HEADER.unpack(header)
    return f"{description.rstrip(bytes(1)).decode()} in call {call}"


# --- Unix sockets between all ranks of a group whose ranks share a host.

# The address of a socket is the folder plus the rank. It holds at most 104 bytes on macOS and 108 on Linux.
_FOLDER_BYTES = 96
_RANK = struct.Struct("<I")


def connect(group: dist.ProcessGroup) -> dict[int, socket.socket] | None:
    """Connect this rank to every other rank of the group by a Unix socket.

    Every rank of the group must call it. The ranks coordinate with the group's own all-gather. The sockets block. A
    send or receive that takes longer than the timeout of the group raises `BlockingIOError`.

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
            listener = setup.enter_context(_configure(socket.socket(socket.AF_UNIX), group))
            listener.bind(f"{folder}/{rank}")
            listener.listen(world_size)
            reachable = True
        except OSError:  # the folder is on another host
            reachable = False
        # After this all-gather every listener exists, so the connections below cannot come too early.
        if not _all(reachable, group):
            return None
        try:
            for peer in range(rank):
                sockets[peer] = connections.enter_context(_configure(socket.socket(socket.AF_UNIX), group))
                sockets[peer].connect(f"{folder}/{peer}")
                sockets[peer].sendall(_RANK.pack(rank))
        except OSError:  # the folder is on a file system that several hosts share, but sockets are not
            reachable = False
        if not _all(reachable, group):
            return None
        # Every higher rank has connected, so accept() does not block.
        for _ in range(rank + 1, world_size):
            connection = _configure(connections.enter_context(listener.accept()[0]), group)
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
        with suppress(OSError):
            folder = tempfile.mkdtemp(prefix="lightning_dp-")
            setup.callback(shutil.rmtree, folder, ignore_errors=True)
            path = os.fsencode(folder)
    if len(path) > _FOLDER_BYTES:
        path = b""
    paths = all_gather(torch.frombuffer(bytearray(path.ljust(_FOLDER_BYTES)), dtype=torch.uint8), group)
    return os.fsdecode(bytes(paths[0].tolist()).rstrip())


def _configure(connection: socket.socket, group: dist.ProcessGroup) -> socket.socket:
    """Set the buffer sizes and the timeout of a socket, and return it.

    Raises:
        OSError: the system does not grant buffers of this size. A smaller buffer could deadlock `small_all_gather`.
    """
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        connection.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
        if connection.getsockopt(socket.SOL_SOCKET, option) < _BUFFER_BYTES:
            connection.close()
            raise OSError(f"the system limits a socket's buffer to less than {_BUFFER_BYTES} bytes")
    # The kernel enforces the timeout. With `settimeout` Python would call poll() before each message.
    connection.settimeout(None)
    seconds = group_timeout(group, torch.device("cpu")).total_seconds()
    timeval = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, timeval)
    return connection
