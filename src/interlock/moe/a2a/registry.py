"""All a2a backends by name. Third parties register an ``A2ABackend`` under ``interlock.a2a_backends``."""

from __future__ import annotations

from functools import cache

from interlock.moe.a2a.backend import A2ABackend
from interlock.plugins import Catalogue, discover

BUILT_IN = (
    "interlock.moe.a2a.none:BACKEND",
    "interlock.moe.a2a.collective:BACKEND",
    "interlock.moe.a2a.shared_memory:BACKEND",
    "interlock.moe.a2a.symmetric:BACKEND",
    "interlock.moe.a2a.deepep_v2:BACKEND",
    "interlock.moe.a2a.deepep:BACKEND",
    "interlock.moe.a2a.mooncake:BACKEND",
    "interlock.moe.a2a.ascend_fuseep:BACKEND",
)


@cache
def a2a_backends() -> Catalogue[A2ABackend]:
    """Built-in and third-party backends, and the broken ones with the reason."""
    return discover(
        kind="a2a backend", group="interlock.a2a_backends", built_in=BUILT_IN, expected=A2ABackend
    )
