"""The switch between hosts with a delay: which frames it sends, where, and when."""

from __future__ import annotations

import socket

import pytest
from support.delayed_switch import BATCH, LARGEST, VIRTIO_HEADER, DelayedSwitch

NOBODY = b"\xff" * 6  # the address of a broadcast


class Network:
    """Hosts 0, 1, 2, each with one end of a pair of sockets, and a switch with the other ends and its own clock."""

    def __init__(self, delay_s: float) -> None:
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(3)]
        self.hosts, self.ports = [list(ends) for ends in zip(*pairs, strict=True)]
        for end in (*self.hosts, *self.ports):
            end.setblocking(False)
        self.now_s = 0.0
        self.switch = DelayedSwitch(self.ports, delay_s, clock=lambda: self.now_s)

    def send(self, source: int, destination: bytes, data: bytes) -> None:
        self.hosts[source].send(bytes(VIRTIO_HEADER) + destination + self.address(source) + data)
        self.switch.receive(self.ports[source])

    def arrived_at(self, now_s: float) -> list[list[bytes]]:
        """Return what each host has received when the clock stands at ``now_s``."""
        self.now_s = now_s
        self.switch.send_due()
        return [self._received(host) for host in self.hosts]

    def _received(self, host: socket.socket) -> list[bytes]:
        data = []
        while True:
            try:
                data.append(host.recv(LARGEST)[VIRTIO_HEADER + 12 :])
            except BlockingIOError:
                return data

    @staticmethod
    def address(host: int) -> bytes:
        return bytes([2, 0, 0, 0, 0, host])

    def close(self) -> None:
        for end in (*self.hosts, *self.ports):
            end.close()


@pytest.fixture
def network():
    network = Network(delay_s=5.0)
    yield network
    network.close()


def test_a_frame_leaves_when_its_delay_is_over_and_not_before(network):
    network.send(0, NOBODY, b"first")
    network.now_s = 2.0
    network.send(0, NOBODY, b"second")
    assert network.switch.seconds_to_next() == 3.0
    assert network.arrived_at(4.9) == [[], [], []]
    assert network.arrived_at(5.0) == [[], [b"first"], [b"first"]]
    assert network.arrived_at(8.0) == [[], [b"second"], [b"second"]]
    assert network.switch.seconds_to_next() is None


def test_frames_go_to_the_port_behind_which_their_address_was_seen(network):
    network.send(1, NOBODY, b"here")
    network.send(0, network.address(1), b"for 1")
    network.send(2, network.address(0), b"for 0")
    assert network.arrived_at(5.0) == [[b"here", b"for 0"], [b"for 1"], [b"here"]]


def test_one_port_cannot_keep_the_switch_from_frames_that_are_due(network):
    for number in range(BATCH + 1):
        network.hosts[0].send(bytes(VIRTIO_HEADER) + NOBODY + network.address(0) + bytes([number]))
    network.switch.receive(network.ports[0])
    assert len(network.arrived_at(5.0)[1]) == BATCH


def test_what_cannot_be_sent_is_counted_as_lost(network):
    network.hosts[1].close()
    network.send(0, NOBODY, b"data")
    network.now_s = 5.0
    network.switch.send_due()
    assert network.switch.num_lost == 1
