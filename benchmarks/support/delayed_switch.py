"""A switch between emulated hosts that holds each frame for a while: what netem does, for kernels without it.

    python benchmarks/support/delayed_switch.py --delay-ms 5 PORT PORT ...

`emulated_hosts.py` starts it in the place of the bridge. A port is the outer end of a host's veth pair, which an
AF_PACKET socket reads and writes, so the rate limits of both directions stay with the kernel. The sockets pass on what
the kernel would pass on: frames of up to 64 KiB that no NIC has cut (TCP segmentation offload), without checksums, with
a virtio header that says so. The MTU stays at 1500 bytes, and at 1 Gbit/s the switch handles some thousands of
frames a second.

The delay counts from the moment when the switch has read a frame. It writes "ready" when it listens, ends when its
standard input does, and then writes the CPU time that it took, and how many frames it lost.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

VIRTIO_HEADER = 10  # bytes before the frame
DESTINATION = slice(VIRTIO_HEADER, VIRTIO_HEADER + 6)
SOURCE = slice(VIRTIO_HEADER + 6, VIRTIO_HEADER + 12)
# Bytes; more than any frame has. From 2**17 on, each receive would map memory, and unmap it.
LARGEST = 2**16 + 2**10
# Frames read from one port before those that are due are sent again.
BATCH = 16
# The names of linux/if_packet.h and asm-generic/socket.h, which Python does not have.
SOL_PACKET = 263
PACKET_STATISTICS = 6
PACKET_VNET_HDR = 15
PACKET_IGNORE_OUTGOING = 23
SO_SNDBUFFORCE = 32
SO_RCVBUFFORCE = 33
ETH_P_ALL = 3
# More than the rate limit's queue ever holds: frames must be dropped there, or nowhere.
BUFFER_BYTES = 2**28


class DelayedSwitch:
    """Forwards frames between ports, each one ``delay_s`` after it was read. It learns which address is behind a port.

    Args:
        ports: sockets that keep the boundaries of frames, and do not block.
        delay_s: of every frame (s).
        clock: returns the time (s).
    """

    def __init__(
        self, ports: Sequence[socket.socket], delay_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._ports = ports
        self._delay_s = delay_s
        self._clock = clock
        self._port_of: dict[bytes, socket.socket] = {}
        # One queue is enough: all frames wait equally long, so they leave in the order in which they came.
        self._in_flight: deque[tuple[float, list[socket.socket], bytes]] = deque()
        self.num_lost = 0

    def seconds_to_next(self) -> float | None:
        """Return how long nothing is due (s); None if nothing is in flight."""
        return max(0.0, self._in_flight[0][0] - self._clock()) if self._in_flight else None

    def receive(self, port: socket.socket) -> None:
        """Take in the frames that wait at ``port``, at most `BATCH`."""
        for _ in range(BATCH):
            try:
                frame = port.recv(LARGEST)
            except BlockingIOError:
                return
            self._port_of[frame[SOURCE]] = port
            known = self._port_of.get(frame[DESTINATION])
            # Also a broadcast, which is nobody's source.
            out = [other for other in self._ports if other is not port] if known is None else [known]
            self._in_flight.append((self._clock() + self._delay_s, out, frame))

    def send_due(self) -> None:
        """Send the frames whose time has come."""
        while self._in_flight and self._in_flight[0][0] <= self._clock():
            _, out, frame = self._in_flight.popleft()
            for port in out:
                try:
                    port.send(frame)
                except OSError:  # the rate limit's queue is full, or the host is gone
                    self.num_lost += 1

    def run(self, until: socket.socket | int) -> None:
        """Forward frames until ``until`` can be read."""
        while True:
            # Not poll or epoll, whose timeouts are whole milliseconds.
            readable, _, _ = select.select([until, *self._ports], [], [], self.seconds_to_next())
            if until in readable:
                return
            for port in self._ports:
                if port in readable:
                    self.receive(port)
            self.send_due()


def open_port(interface: str) -> socket.socket:
    """Return a socket for the frames of a network interface. Needs root."""
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)  # 0: no frames before it is bound
    port.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    port.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    port.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, BUFFER_BYTES)
    port.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, BUFFER_BYTES)
    port.setblocking(False)
    port.bind((interface, ETH_P_ALL))
    return port


def _num_dropped(port: socket.socket) -> int:
    """Return how many frames found the socket's buffer full."""
    return int.from_bytes(port.getsockopt(SOL_PACKET, PACKET_STATISTICS, 8)[4:8], sys.byteorder)


def _be_prompt() -> None:
    """Run as soon as there is something to do, where the system allows it."""
    with contextlib.suppress(OSError):
        # The kernel may otherwise wake this process 50 us late, to wake several at once.
        Path("/proc/self/timerslack_ns").write_text("1")
        # A wire does not wait until a busy rank leaves the core.
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))


def main() -> None:
    """Run a switch: the command line above."""
    parser = argparse.ArgumentParser(description="a switch that delays frames")
    parser.add_argument("--delay-ms", type=float, required=True)
    parser.add_argument("ports", nargs="+", help="network interfaces")
    arguments = parser.parse_args()
    _be_prompt()
    ports = [open_port(interface) for interface in arguments.ports]
    switch = DelayedSwitch(ports, arguments.delay_ms / 1e3)
    print("ready", flush=True)
    started_s = time.monotonic()
    switch.run(sys.stdin.fileno())
    lost = switch.num_lost + sum(map(_num_dropped, ports))
    print(f"{time.process_time():.2f} s of CPU time in {time.monotonic() - started_s:.1f} s, {lost} frames lost")


if __name__ == "__main__":
    main()
