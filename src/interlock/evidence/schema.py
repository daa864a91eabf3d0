"""The evidence file: what ``verify`` and ``bench`` record of a run, as JSON. Light: imports no torch.

A file is one ``Evidence``. ``docs/evidence.md`` describes every field for readers of the JSON. Changes that a
reader of an older file would misread get a new ``SCHEMA``; new optional fields do not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, Literal

import msgspec

SCHEMA: Final = "interlock.evidence/1"
Scalar = str | int | float | bool | None


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What was run.

    Attributes:
        name: as the user gave it, without the folders before it.
        config_hash: sha256 of the canonical config.json (``ModelCard.config_hash``).
        weight_format: as stored: "float32", "bfloat16", "fp8_block".
    """

    name: str
    family: str
    architecture: str
    config_hash: str
    weight_format: str
    parameters: int = 0


class DeviceFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Where it ran.

    Attributes:
        kind: "cpu" or "cuda".
        name: model of the CPU or GPU, for people.
        key: what must be equal for two devices to count as the same one: the GPU's name, or for CPUs the
            architecture (the CPU kernels compute the same bits on every CPU of an architecture).
        driver: version of the GPU driver, "" on CPUs.
    """

    kind: str
    name: str
    key: str
    count: int = 1
    memory_total: int = 0
    driver: str = ""
    os: str = ""
    python: str = ""
    cores: int = 0


class Arm(msgspec.Struct, frozen=True, kw_only=True):
    """One side of a comparison.

    Attributes:
        options: as given on the command line.
        plan: the full ``LaunchPlan`` with provenance as a JSON object (``model_path`` without its parents);
            None for a server of another make.
        receipts: rank (in decimal) -> plan item -> what that rank observed.
        url: address of a server that was not started here.
    """

    name: str
    options: str = ""
    plan: dict[str, Any] | None = None
    receipts: dict[str, dict[str, Any]] = {}
    url: str = ""


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """One number of one arm.

    Attributes:
        name: what was measured, "decode_ms_per_token".
        value: the median where ``samples`` are given.
        conditions: what was pinned and what was delivered ({"batch": 32, "context": 512}).
        samples: every repetition that counted.
        discarded: repetitions that did not count, since the run was not the one that was asked for.
    """

    name: str
    arm: str
    value: float
    unit: str
    conditions: dict[str, Scalar] = {}
    samples: tuple[float, ...] = ()
    discarded: int = 0


class PromptOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """How the two arms of ``verify`` compare on one prompt.

    Attributes:
        outcome: "bit-identical", "within rounding" or "different".
        largest: largest difference of a log-probability, and ``position`` where.
        cause: "" when identical; else "chunk boundaries", "prefix-cache hit", "routing flip",
            "reduction order" or "unexplained".
        details: the cause in one sentence.
    """

    index: int
    tokens: int
    continuation: int
    outcome: str
    largest: float
    position: int | None = None
    cause: str = ""
    details: str = ""
    explained: bool = True


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """One evidence file.

    Attributes:
        schema: ``SCHEMA``.
        kind: which tool wrote it.
        created: UTC, ISO 8601.
        arms: the control first (verify); the combination that is proven is that of the last arm.
        packages: version by distribution name.
        verdict: verify: "equal", "explained" or "unexplained"; bench: "measured" or "invalid".
        prompts: verify only.
        measurements: numbers of either tool.
        notes: sentences for people.
        digest: sha256 of all else; a file that was edited by hand does not match it.
    """

    schema: str = SCHEMA
    kind: Literal["verify", "bench"]
    created: str
    interlock: str
    model: ModelFacts
    device: DeviceFacts
    packages: dict[str, str]
    arms: tuple[Arm, ...]
    verdict: str
    prompts: tuple[PromptOutcome, ...] = ()
    measurements: tuple[Measurement, ...] = ()
    notes: tuple[str, ...] = ()
    digest: str = ""

    def sealed(self) -> Evidence:
        """A copy with its ``digest``."""
        return msgspec.structs.replace(self, digest=digest_of(self))


def digest_of(evidence: Evidence) -> str:
    """sha256 of the canonical JSON without the digest itself."""
    content = msgspec.to_builtins(msgspec.structs.replace(evidence, digest=""), enc_hook=str)
    content = msgspec.to_builtins(msgspec.convert(content, Evidence))  # 2 in a float field reads back as 2.0
    return hashlib.sha256(msgspec.json.encode(content, order="sorted")).hexdigest()


EARLIER: Final[Mapping[str, str]] = MappingProxyType({"attention_backend": "paged_attention"})
"""What held of every launch before plans had these items."""


def arm_plan(arm: Arm) -> Mapping[str, Any]:
    """The recorded plan; empty for a server of another make."""
    return {**EARLIER, **arm.plan} if arm.plan else {}
