from __future__ import annotations

import socket

import pytest

from lightning_dp.strategies.layered_sgd.options import gloo_interface


def test_the_users_interface_is_named(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    assert gloo_interface() == "ib0 (from GLOO_SOCKET_IFNAME)"


@pytest.fixture
def no_choice(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(socket, "gethostname", lambda: "node7")


def test_the_interface_of_the_hosts_name_is_named(monkeypatch, no_choice):
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.0.1")
    assert gloo_interface() == "lo (127.0.0.1, the address of the host's name, node7)"


def test_an_address_that_no_interface_has_is_said(monkeypatch, no_choice):
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "192.0.2.1")
    assert gloo_interface() == ("an interface without that address (192.0.2.1, the address of the host's name, node7)")


def test_a_host_without_an_address_is_named(monkeypatch, no_choice):
    def fail(name: str) -> str:
        raise socket.gaierror

    monkeypatch.setattr(socket, "gethostbyname", fail)
    assert gloo_interface() == "the loopback interface, because the host's name, node7, has no address"
