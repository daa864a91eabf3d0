"""All attention backends by name. Third parties register theirs under ``interlock.attention_backends``."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from interlock.nn.attention_backends.base import AttentionBackend, AttentionSpec, PagedAttention
from interlock.plugins import Catalogue, discover, load_symbol

if TYPE_CHECKING:
    from interlock.kernels.base import Kernels

BUILT_IN = (
    "interlock.nn.attention_backends.paged_attention:BACKEND",
    "interlock.nn.attention_backends.flash_attention:BACKEND",
)


@cache
def attention_backends() -> Catalogue[AttentionBackend]:
    """Built-in and third-party backends, and the broken ones with the reason."""
    return discover(
        kind="attention backend",
        group="interlock.attention_backends",
        built_in=BUILT_IN,
        expected=AttentionBackend,
    )


def build_attention(name: str, kernels: Kernels) -> PagedAttention:
    """A rank's live backend.

    Raises:
        InterlockError: unknown, broken, or its library cannot be loaded.
    """
    declared = attention_backends().get(name)
    backend: PagedAttention = load_symbol(declared.backend)(AttentionSpec(kernels))
    return backend
