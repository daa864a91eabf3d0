"""Where the two servers of a pair live: one network namespace each, joined by a cable, or this machine."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """One server's machine. ``address``: where clients and the other server reach it."""

    address: str
    prefix: tuple[str, ...] = ()


@dataclass(frozen=True)
class World:
    """Attributes:
    cable: namespace and link of each end of what carries the servers' own connections, and nothing else;
        empty where there is no such thing.
    """

    prefill: Place
    decode: Place
    cable: tuple[tuple[str, str], ...] = ()

    def link(self, *, up: bool) -> None:
        """Pull or plug the cable; once plugged, it carries packets at once."""
        namespace, name = self.cable[0]
        ip("-n", namespace, "link", "set", name, "up" if up else "down")
        for namespace, name in self.cable if up else ():
            while "state UP" not in ip("-n", namespace, "-o", "link", "show", "dev", name):
                time.sleep(0.01)
            ip("-n", namespace, "neigh", "flush", "dev", name)


def ip(*arguments: str) -> str:
    """What the command says. Raises ``OSError`` when it fails."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def this_machine() -> World:
    return World(Place("127.0.0.1"), Place("127.0.0.1"))


def obstacle() -> str:
    """Why there can be no namespaces here, or ""."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need the command ip (package iproute2)"
    return ""


@contextmanager
def namespaces() -> Iterator[World]:
    """A namespace for each server. Each has a link to this one, for clients, and both share the cable.

    Raises:
        OSError: they cannot be made here.
    """
    tag = secrets.token_hex(2)
    net = f"10.{100 + int(tag[:2], 16) % 100}"
    names = {role: f"interlock-{tag}-{role}" for role in ("prefill", "decode")}
    with ExitStack() as stack:
        for name in names.values():
            ip("netns", "add", name)
            stack.callback(ip, "netns", "del", name)
            ip("-n", name, "link", "set", "lo", "up")
        for number, (role, name) in enumerate(names.items(), 1):
            outside, inside = f"il{tag}{role[0]}o", f"il{tag}{role[0]}i"
            ip("link", "add", outside, "type", "veth", "peer", "name", inside, "netns", name)
            ip("addr", "add", f"{net}.{number}.1/24", "dev", outside)
            ip("link", "set", outside, "up")
            ip("-n", name, "addr", "add", f"{net}.{number}.2/24", "dev", inside)
            ip("-n", name, "link", "set", inside, "up")
        first, second = names.values()
        ends = f"il{tag}cp", f"il{tag}cd"
        ip("link", "add", ends[0], "netns", first, "type", "veth", "peer", "name", ends[1], "netns", second)
        for name, end, host in ((first, ends[0], 1), (second, ends[1], 2)):
            ip("-n", name, "addr", "add", f"{net}.3.{host}/24", "dev", end)
            ip("-n", name, "link", "set", end, "up")
        ip("-n", second, "route", "add", f"{net}.1.2/32", "via", f"{net}.3.1", "dev", ends[1])
        places = [
            Place(f"{net}.{number}.2", ("ip", "netns", "exec", name))
            for number, name in enumerate(names.values(), 1)
        ]
        yield World(*places, cable=tuple(zip((first, second), ends, strict=True)))
