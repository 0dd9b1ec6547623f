"""Hosts on one machine: rates, what they lack, and what they leave behind."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.emulated_hosts import Hosts, bytes_per_s, rate_name, why_no_hosts

# A host that can be reached refuses the connection; one that cannot be reached does not answer.
REFUSED = """
import errno, socket, sys
connection = socket.socket()
connection.settimeout(30)
raise SystemExit(connection.connect_ex((sys.argv[1], 9)) != errno.ECONNREFUSED)
"""


def test_rates_are_read_as_tc_writes_them():
    assert bytes_per_s("200mbit") == 25e6
    assert bytes_per_s("1.5gbit") == 187.5e6
    assert bytes_per_s("none") == float("inf")
    assert rate_name("200mbit") == "200 Mbit/s"
    assert rate_name("none") == "unlimited rate"


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


def _namespaces() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in listed.splitlines()]
