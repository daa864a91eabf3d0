"""Tiny random checkpoints, written once for a test session and deleted at its end."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from interlock.demo.tiny import TinySpec, write_tiny


@cache
def _root() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="interlock-tiny-")


@cache
def tiny_folder(spec: TinySpec) -> Path:
    """The folder of ``write_tiny(spec)``. Shared between tests: copy it before changing anything."""
    return write_tiny(Path(_root().name) / str(hash(spec) & 0xFFFFFFFF), spec)


def flash(**changes: Any) -> TinySpec:
    """MiMo-V2-Flash layout in float32: split q/k/v, which transformers' own class reads."""
    return TinySpec(qkv="split", fp8=False, dtype="float32").replace(**changes)


def v25(**changes: Any) -> TinySpec:
    """MiMo-V2.5 layout: fused qkv in chunks, fp8 blocks with a scale grid that restarts in each chunk."""
    return TinySpec(**changes)
