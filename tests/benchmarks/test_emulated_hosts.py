"""Hosts on one machine: rates, what they lack, and what they leave behind."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.emulated_hosts import NIC, Hosts, bytes_per_s, network_name, rate_name, why_no_hosts

# A host that can be reached refuses the connection; one that cannot be reached does not answer.
REFUSED = """
import errno, socket, sys
connection = socket.socket()
connection.settimeout(30)
raise SystemExit(connection.connect_ex((sys.argv[1], 9)) != errno.ECONNREFUSED)
"""

# Sends half a megabyte to and fro: host 1 answers. Prints the shortest of five round trips (s) and if all came back.
ECHO = """
import socket, sys, time, zlib
host, address = sys.argv[1:]
if host == "1":
    connection, _ = socket.create_server((address, 9)).accept()
    while data := connection.recv(65536):
        connection.sendall(data)
    raise SystemExit
deadline = time.monotonic() + 30
while (connection := socket.socket()).connect_ex((address, 9)) and time.monotonic() < deadline:
    connection.close()
def echo(data):
    start = time.monotonic()
    connection.sendall(data)
    answer = b""
    while len(answer) < len(data):
        answer += connection.recv(65536)
    return time.monotonic() - start, answer
shortest = min(echo(b"x")[0] for _ in range(5))
sent = bytes(range(256)) * 256
answers = b"".join(echo(sent)[1] for _ in range(8))
print(shortest, zlib.crc32(answers) == zlib.crc32(sent * 8))
"""


def test_rates_are_read_as_tc_writes_them():
    assert bytes_per_s("200mbit") == 25e6
    assert bytes_per_s("1.5gbit") == 187.5e6
    assert bytes_per_s("none") == float("inf")
    assert rate_name("200mbit") == "200 Mbit/s"
    assert rate_name("none") == "unlimited rate"


def test_a_network_has_a_name_for_people_to_read():
    assert network_name("1gbit") == "1 Gbit/s"
    assert network_name("1gbit", "200mbit", 0.5) == "1 Gbit/s, last host 200 Mbit/s, delay 0.5 ms"


@pytest.mark.parametrize("rate", ["200", "fast", "200mb", "mbit"])
def test_a_rate_that_tc_would_not_take_is_refused(rate):
    with pytest.raises(ValueError, match="for example 200mbit"):
        bytes_per_s(rate)


def test_a_machine_without_the_tools_says_what_it_lacks(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda tool: None)
    assert "ip and tc not found; install iproute2" in str(why_no_hosts())
    with pytest.raises(RuntimeError, match="cannot make hosts"), Hosts(1, "none"):
        pass


def test_hosts_reach_each_other_and_leave_nothing_behind(tmp_path):
    if lacking := why_no_hosts():
        pytest.skip(f"network namespaces: {lacking}")
    with Hosts(2, "100mbit") as hosts:
        own = [hosts.namespace(host) for host in range(2)]
        hosts.run([[sys.executable, "-c", REFUSED, Hosts.address(1)], ["true"]], timeout_s=60.0, logs=tmp_path)
        assert set(own) <= set(_namespaces())
    assert not set(own) & set(_namespaces())


def test_a_command_that_fails_on_a_host_is_reported_with_the_logs(tmp_path):
    if lacking := why_no_hosts():
        pytest.skip(f"network namespaces: {lacking}")
    command = [sys.executable, "-c", "print('the reason'); raise SystemExit(3)"]
    with Hosts(2, "none") as hosts, pytest.raises(RuntimeError, match=r"exit codes.*3"):
        hosts.run([["sleep", "60"], command], timeout_s=30.0, logs=tmp_path)
    assert "the reason" in (tmp_path / "host1.log").read_text()


def test_the_last_host_is_the_slow_one():
    if lacking := why_no_hosts():
        pytest.skip(f"network namespaces: {lacking}")
    with Hosts(2, "100mbit", slow_host="10mbit") as hosts:
        limits = [_limits(["ip", "netns", "exec", hosts.namespace(host)], NIC) for host in range(2)]
    assert "rate 100Mbit" in limits[0]
    assert "rate 10Mbit" in limits[1]


def test_a_delay_holds_whatever_goes_from_one_host_to_another(tmp_path, capfd):
    if lacking := why_no_hosts():
        pytest.skip(f"network namespaces: {lacking}")
    commands = [[sys.executable, "-c", ECHO, str(host), Hosts.address(1)] for host in range(2)]
    with Hosts(2, "1gbit", delay_ms=20.0) as hosts:
        hosts.run(commands, timeout_s=60.0, logs=tmp_path)
    printed = capfd.readouterr().out.splitlines()
    shortest_s, is_intact = printed[0].split()
    assert float(shortest_s) >= 2 * 0.020
    assert is_intact == "True"
    assert printed[1].startswith("switch with a delay of 20 ms")
    assert printed[1].endswith(" 0 frames lost")


def test_a_switch_that_cannot_start_is_reported_and_leaves_nothing_behind(monkeypatch):
    if lacking := why_no_hosts():
        pytest.skip(f"network namespaces: {lacking}")
    monkeypatch.setattr("support.emulated_hosts.SWITCH", "no such file")
    hosts = Hosts(1, "none", delay_ms=1.0)
    with pytest.raises(RuntimeError, match="did not start"), hosts:
        pass
    assert hosts.namespace(0) not in _namespaces()


def _limits(prefix: list[str], interface: str) -> str:
    command = [*prefix, "tc", "qdisc", "show", "dev", interface]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _namespaces() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in listed.splitlines()]
