"""All transfer backends by name. Third parties register a ``TransferBackend`` under
``interlock.transfer_backends``."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from interlock.kv.transfer.base import TransferBackend
from interlock.plugins import Catalogue, discover

BUILT_IN = (
    "interlock.kv.transfer.shared_memory:BACKEND",
    "interlock.kv.transfer.mooncake:BACKEND",
    "interlock.kv.transfer.nixl:BACKEND",
)


@cache
def transfer_backends() -> Catalogue[TransferBackend]:
    """Built-in and third-party backends, and the broken ones with the reason."""
    return discover(
        kind="transfer backend",
        group="interlock.transfer_backends",
        built_in=BUILT_IN,
        expected=TransferBackend,
    )


def library_environment(name: str, inherited: Mapping[str, str]) -> dict[str, str]:
    """What to add to ``inherited`` for a rank that uses the backend ``name``; "" is none."""
    if not name:
        return {}
    declared = transfer_backends().get(name).environment
    return {variable: value for variable, value in declared if variable not in inherited}
