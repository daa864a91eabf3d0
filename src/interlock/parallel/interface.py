"""The network interface through which this machine reaches another one."""

from __future__ import annotations

import ctypes
import socket
import sys


class _Address(ctypes.Structure):
    """``struct ifaddrs`` up to the field that is read, and ``struct sockaddr`` behind it as bytes."""


_Address._fields_ = [
    ("next", ctypes.POINTER(_Address)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.POINTER(ctypes.c_ubyte)),
]

_IPV4_OFFSET, _IPV6_OFFSET = 4, 8


def interface_towards(host: str, port: int) -> str | None:
    """Name of the interface from which packets to ``host`` leave ("lo" for this machine); None if unknown.

    Sends nothing: connecting a datagram socket only chooses the route.
    """
    for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.connect(address)
            except OSError:
                continue
            own = probe.getsockname()[0].partition("%")[0]
        return interface_addresses().get(own)
    return None


def interface_addresses() -> dict[str, str]:
    """Numeric address -> interface name, for all interfaces of this machine."""
    libc = ctypes.CDLL(None, use_errno=True)
    head = ctypes.POINTER(_Address)()
    if libc.getifaddrs(ctypes.byref(head)) != 0:
        return {}
    found: dict[str, str] = {}
    try:
        entry = head
        while entry:
            numeric = _numeric(entry.contents.address)
            if numeric is not None:
                found.setdefault(numeric, entry.contents.name.decode())
            entry = entry.contents.next
    finally:
        libc.freeifaddrs(head)
    return found


def _numeric(address: ctypes._Pointer[ctypes.c_ubyte]) -> str | None:
    if not address:
        return None
    family = int.from_bytes(bytes(address[:2]), sys.byteorder)
    if family == socket.AF_INET:
        return socket.inet_ntop(family, bytes(address[_IPV4_OFFSET : _IPV4_OFFSET + 4]))
    if family == socket.AF_INET6:
        return socket.inet_ntop(family, bytes(address[_IPV6_OFFSET : _IPV6_OFFSET + 16]))
    return None
