"""Several hosts on one machine: network namespaces on one bridge, each NIC limited to a rate in both directions.

    with Hosts(num_hosts=2, rate="200mbit") as hosts:
        hosts.torchrun(2, ["script.py", "--option"])

    python benchmarks/support/emulated_hosts.py --hosts 2 --per-host 2 --rate 1gbit -- script.py --option
    python benchmarks/support/emulated_hosts.py --hosts 2 --rate 1gbit --slow-host 100mbit --delay-ms 5 -- script.py

The last host may have a slower link than the others. With a delay, a process in the place of the bridge holds each
frame (`delayed_switch.py`), and takes a part of a core for it; what it took is printed at the end.

Needs Linux, root, and iproute2 (`ip`, `tc`). The commands on the hosts get ``GLOO_SOCKET_IFNAME`` and
``OMP_NUM_THREADS=1``. Everything that was made is removed at the end. The hosts share a file system, so Unix sockets
(global batch norm uses them between ranks of one host) bypass the limits.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType, TracebackType

RATE_UNITS_BITS_PER_S = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
UNLIMITED = "none"
NIC = "nic0"  # on every host
SWITCH = Path(__file__).with_name("delayed_switch.py")


def bytes_per_s(rate: str) -> float:
    """Return the bytes a second of a rate as `tc` writes it: ``"200mbit"`` is 25e6; infinity for ``"none"``.

    Raises:
        ValueError: it is not a number with kbit, mbit or gbit.
    """
    if rate == UNLIMITED:
        return float("inf")
    number = rate[:-4]
    unit = rate[-4:]
    if unit not in RATE_UNITS_BITS_PER_S or not number.replace(".", "", 1).isdigit():
        raise ValueError(f"rate={rate!r} is not a number with kbit, mbit or gbit, or none; for example 200mbit")
    return float(number) * RATE_UNITS_BITS_PER_S[unit] / 8


def rate_name(rate: str) -> str:
    """Return the rate for people to read: ``"200mbit"`` is "200 Mbit/s"."""
    return "unlimited rate" if rate == UNLIMITED else f"{rate[:-4]} {rate[-4].upper()}{rate[-3:]}/s"


def host_rates(num_hosts: int, rate: str, slow_host: str | None) -> list[str]:
    """Return the rate of each host's link; the last host is the slow one."""
    return [rate] * (num_hosts - 1) + [rate if slow_host is None else slow_host]


def network_name(rate: str, slow_host: str | None = None, delay_ms: float = 0.0) -> str:
    """Return the arguments of `Hosts` for people to read: "1 Gbit/s, last host 100 Mbit/s, delay 5 ms"."""
    slow = [] if slow_host is None else [f"last host {rate_name(slow_host)}"]
    delay = [f"delay {delay_ms:g} ms"] if delay_ms else []
    return ", ".join([rate_name(rate), *slow, *delay])


def why_no_hosts() -> str | None:
    """Return what this machine lacks for `Hosts`, in words; None if nothing."""
    if lacking := _missing():
        return lacking
    # Root in a container may have the tools and not the permission, or the kernel no token bucket filter.
    try:
        with Hosts(1, "1gbit"):
            return None
    except RuntimeError as error:
        return str(error)


def _missing() -> str | None:
    if not sys.platform.startswith("linux"):
        return f"network namespaces need Linux, and this is {sys.platform}"
    tools = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if tools:
        return f"{' and '.join(tools)} not found; install iproute2"
    if os.geteuid() != 0:
        return "only root can make network namespaces"
    return None


class Hosts:
    """``num_hosts`` network namespaces, made on entry and removed on exit. Host k has the address 10.88.0.(k+1).

    Args:
        num_hosts: 1 to 250.
        rate: of each host, in each direction, as `tc` writes it ("200mbit"); "none" leaves it unlimited.
        slow_host: rate of the last host in place of ``rate``; None: it is as the others.
        delay_ms: from one host to another, one way, before the time that the frame takes at the rate.

    Raises:
        RuntimeError: on entry, where the machine cannot do it, saying what it lacks.
    """

    def __init__(self, num_hosts: int, rate: str, slow_host: str | None = None, delay_ms: float = 0.0) -> None:
        self.num_hosts = num_hosts
        self.rates = host_rates(num_hosts, rate, slow_host)
        self._delay_ms = delay_ms
        self._switch: subprocess.Popen[str] | None = None
        # Names must not collide with those of another instance, in this process or in another one.
        self._tag = f"h{os.getpid() % 10**6:x}{time.monotonic_ns() % 4096:x}"
        self._processes: list[subprocess.Popen[bytes]] = []

    @staticmethod
    def address(host: int) -> str:
        """Return the address of a host on the bridge."""
        return f"10.88.0.{host + 1}"

    def __enter__(self) -> Hosts:
        if lacking := _missing():
            raise RuntimeError(f"cannot make hosts on this machine: {lacking}")
        # A `kill` of this process must not leave namespaces behind: turned into an exception, it leads to `__exit__`.
        self._handler = signal.signal(signal.SIGTERM, _exit)
        try:
            if not self._delay_ms:
                _ip("link", "add", f"{self._tag}b", "type", "bridge")
                _ip("link", "set", f"{self._tag}b", "up")
            for host in range(self.num_hosts):
                self._add(host)
            if self._delay_ms:
                self._start_switch()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _add(self, host: int) -> None:
        name = self.namespace(host)
        port = self._port(host)
        _ip("netns", "add", name)
        _ip("link", "add", port, "type", "veth", "peer", "name", NIC, "netns", name)
        _ip("link", "set", port, *([] if self._delay_ms else ["master", f"{self._tag}b"]), "up")
        _ip("-n", name, "addr", "add", f"{self.address(host)}/24", "dev", NIC)
        _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", name, "link", "set", NIC, "up")
        rate = self.rates[host]
        if rate != UNLIMITED:
            # The content of the bucket leaves at once, beyond the rate. It is kept to 4 ms of the rate, but one
            # offloaded packet (64 KiB) must fit in, else that packet is dropped each time that it is sent.
            burst = max(64 * 1024, int(bytes_per_s(rate) * 0.004))
            limit = ["root", "tbf", "rate", rate, "burst", str(burst), "latency", "100ms"]
            _call("ip", "netns", "exec", name, "tc", "qdisc", "replace", "dev", NIC, *limit)  # out of the host
            _call("tc", "qdisc", "replace", "dev", port, *limit)  # into the host

    def _start_switch(self) -> None:
        command = [sys.executable, str(SWITCH), "--delay-ms", str(self._delay_ms)]
        self._switch = subprocess.Popen(
            [*command, *map(self._port, range(self.num_hosts))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._switch.stdout is not None
        if self._switch.stdout.readline() != "ready\n":
            raise RuntimeError("the switch that delays frames did not start; its error stands above")

    def _port(self, host: int) -> str:
        """Return the name of the outer end of a host's link."""
        return f"{self._tag}p{host}"

    def namespace(self, host: int) -> str:
        """Return the name of the network namespace of a host."""
        return f"{self._tag}n{host}"

    def run(self, commands: Sequence[Sequence[str]], *, timeout_s: float = 600.0, logs: Path | None = None) -> None:
        """Run command k on host k, all at once, and wait. Host 0's output is shown, the others' goes to ``logs``.

        Raises:
            RuntimeError: a command failed (the others are stopped then) or took longer than ``timeout_s``.
        """
        logs = logs or Path(tempfile.mkdtemp(prefix="hosts"))
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": NIC, "OMP_NUM_THREADS": "1"}
        deadline = time.monotonic() + timeout_s
        try:
            for host, command in enumerate(commands):
                self._start(host, command, environment, logs / f"host{host}.log")
            while None in (status := [process.poll() for process in self._processes]) and not any(status):
                if self._switch is not None and self._switch.poll() is not None:
                    raise RuntimeError("the switch that delays frames has ended; its error stands above")
                if time.monotonic() > deadline:
                    raise RuntimeError(f"not finished after {timeout_s} s; the hosts' output is in {logs}")
                time.sleep(0.05)
            if any(status):
                raise RuntimeError(f"exit codes of the hosts: {status}; the output of hosts 1, 2, ... is in {logs}")
        finally:
            self._stop()

    def _start(self, host: int, command: Sequence[str], environment: dict[str, str], log: Path) -> None:
        inside = ["ip", "netns", "exec", self.namespace(host), *command]
        with log.open("wb") as file:
            output = None if host == 0 else file
            self._processes.append(subprocess.Popen(inside, env=environment, stdout=output, stderr=output))

    def torchrun(
        self, per_host: int, script: Sequence[str], *, timeout_s: float = 600.0, logs: Path | None = None
    ) -> None:
        """Run a script and its arguments under torchrun, ``per_host`` ranks on each host; otherwise as `run`."""
        command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={self.num_hosts}"]
        command += [f"--nproc_per_node={per_host}", f"--master_addr={self.address(0)}"]
        command += ["--master_port=29500"]  # the namespaces are new, so every port is free
        commands = [[*command, f"--node_rank={host}", *script] for host in range(self.num_hosts)]
        self.run(commands, timeout_s=timeout_s, logs=logs)

    def _stop(self) -> None:
        """End everything that runs on the hosts, also what the commands started in sessions of its own, as torchrun."""
        for process in self._processes:
            process.kill()
            process.wait()
        for host in range(self.num_hosts if self._processes else 0):
            while pids := subprocess.run(
                ["ip", "netns", "pids", self.namespace(host)], capture_output=True, text=True, check=False
            ).stdout.split():
                for pid in map(int, pids):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
        self._processes.clear()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()
        if self._switch is not None:
            took, _ = self._switch.communicate()  # it ends with its standard input
            if took:  # nothing if it has failed
                print(f"switch with a delay of {self._delay_ms:g} ms: {took.strip()}", flush=True)
            self._switch = None
        for host in range(self.num_hosts):
            # The NIC of a deleted namespace disappears only a while later, so it is deleted first.
            subprocess.run(["ip", "link", "del", self._port(host)], capture_output=True, check=False)
            subprocess.run(["ip", "netns", "del", self.namespace(host)], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", f"{self._tag}b"], capture_output=True, check=False)
        signal.signal(signal.SIGTERM, self._handler)


def _ip(*arguments: str) -> None:
    _call("ip", *arguments)


def _call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def main() -> None:
    """Run a script on hosts: the command line above."""
    parser = argparse.ArgumentParser(description="torchrun on several hosts, all on this machine")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--per-host", type=int, default=2, help="processes on each host")
    parser.add_argument("--rate", default="1gbit", help="of each host in each direction, or none")
    parser.add_argument("--slow-host", help="rate of the last host")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="between hosts, one way")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds")
    parser.add_argument("script", nargs="+", help="the script and its arguments, after --")
    arguments = parser.parse_args()
    with Hosts(arguments.hosts, arguments.rate, arguments.slow_host, arguments.delay_ms) as hosts:
        hosts.torchrun(arguments.per_host, arguments.script, timeout_s=arguments.timeout)


if __name__ == "__main__":
    main()
