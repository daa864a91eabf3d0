"""Which generation of DeepEP is installed, told by its distributions' versions. Imports nothing of it.

DeepEP 1.x has ``Buffer`` (NVSHMEM); 2.0 to 2.4 have ``Buffer`` and ``ElasticBuffer`` (NCCL's device API);
2.5 and later have neither, but ``EPBuffer``. Wheels of others carry the same module under names of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from packaging.version import InvalidVersion, Version

DISTRIBUTIONS = ("deep_ep", "sgl-deep-ep", "tokenspeed-deepep")
"""Any one of them brings the module ``deep_ep``."""
SOURCE = "https://github.com/deepseek-ai/DeepEP"
GOOD_VERSION = "2.1.0"
"""What ``deepep_v2`` and ``deepep`` are written against (commit dd758ca)."""
_WHEELS_OF_2_1 = "sgl-deep-ep"
"""Numbered on its own: 0.1.x is built from DeepEP 2.1."""


@dataclass(frozen=True, slots=True)
class Installed:
    """``release`` is DeepEP's own (major, minor), whatever the distribution is numbered."""

    distribution: str
    version: str
    release: tuple[int, int]

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"


def installed(packages: Mapping[str, str]) -> Installed | None:
    """The DeepEP among ``packages`` (version by distribution name), or None."""
    for name in DISTRIBUTIONS:
        if name not in packages:
            continue
        try:
            version = Version(packages[name])
        except InvalidVersion:
            return Installed(name, packages[name], (0, 0))
        release = (2, 1) if name == _WHEELS_OF_2_1 else (version.major, version.minor)
        return Installed(name, packages[name], release)
    return None


def how_to_install() -> str:
    """The sentence that ends every complaint about the package."""
    return f"install DeepEP {GOOD_VERSION} ({SOURCE}, commit dd758ca)"


def elastic_problem(packages: Mapping[str, str]) -> str | None:
    """Why the installed DeepEP cannot serve ``deepep_v2``, or None."""
    found = installed(packages)
    if found is None:
        return f"needs DeepEP with ElasticBuffer, and no DeepEP is installed: {how_to_install()}"
    if found.release < (2, 0):
        return f"needs ElasticBuffer, and {found} has v1's Buffer only: {how_to_install()}"
    if found.release >= (2, 5):
        return (
            f"needs ElasticBuffer, which DeepEP 2.5 replaced by EPBuffer; {found} is installed: "
            f"{how_to_install()}"
        )
    if found.release != (2, 1):
        return f"reads fields of the handles of DeepEP 2.1, and {found} is installed: {how_to_install()}"
    return None


def legacy_problem(packages: Mapping[str, str]) -> str | None:
    """Why the installed DeepEP cannot serve ``deepep`` (v1's Buffer), or None."""
    found = installed(packages)
    if found is None:
        return f"needs DeepEP with v1's Buffer, and no DeepEP is installed: {how_to_install()}"
    if found.release >= (2, 5):
        return f"needs v1's Buffer, which DeepEP 2.5 dropped; {found} is installed: {how_to_install()}"
    if found.release < (1, 2):
        return f"needs v1's Buffer of DeepEP 1.2 or later; {found} is installed: {how_to_install()}"
    return None
