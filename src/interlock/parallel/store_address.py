"""Where the key-value store is through which ranks find each other. Imports no torch."""

from __future__ import annotations

import msgspec


class StoreAddress(msgspec.Struct, frozen=True, kw_only=True):
    """The store of one launch.

    Attributes:
        address: host:port.
        hosted_elsewhere: a launcher runs the store; otherwise rank 0 does.
        prefix: keys of this launch begin with it, since a launcher's store outlives a restart.
    """

    address: str
    hosted_elsewhere: bool = False
    prefix: str = "interlock"

    @property
    def host(self) -> str:
        return split_address(self.address)[0]

    @property
    def port(self) -> int:
        return split_address(self.address)[1]


def split_address(address: str) -> tuple[str, int]:
    """``"host:port"`` or ``"[v6]:port"`` -> host without brackets, port."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)
