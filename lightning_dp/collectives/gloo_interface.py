"""The network interface over which gloo sends, for the log."""

from __future__ import annotations

import os
import socket
import struct

VARIABLE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


def gloo_interface() -> str:
    """Describe the interface that gloo uses on this host: that of ``GLOO_SOCKET_IFNAME``, else of the host's name."""
    chosen = os.environ.get(VARIABLE)
    if chosen:
        return f"{chosen} (from {VARIABLE})"
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        return f"the loopback interface, because the host's name, {name}, has no address"
    interface = _interface_of(address) or "an interface without that address"
    return f"{interface} ({address}, the address of the host's name, {name})"


def _interface_of(address: str) -> str | None:
    """Return the name of the interface with this IPv4 address, or None if there is none or the system cannot tell."""
    try:
        import fcntl  # not on Windows
    except ImportError:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:  # the interface has no IPv4 address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None
