"""All expert runners by name. Third parties register theirs under ``interlock.expert_runners``."""

from __future__ import annotations

from functools import cache

from interlock.moe.experts.base import ExpertRunner
from interlock.plugins import Catalogue, discover

BUILT_IN = (
    "interlock.moe.experts.torch:RUNNER",
    "interlock.moe.experts.torch_fp8:RUNNER",
    "interlock.moe.experts.cpu:RUNNER",
    "interlock.moe.experts.triton:RUNNER",
    "interlock.moe.experts.triton_fp8:RUNNER",
    "interlock.moe.experts.deep_gemm:RUNNER",
    "interlock.moe.experts.fastest_fp8:RUNNER",
    "interlock.moe.experts.flashinfer_cutlass:RUNNER",
    "interlock.moe.experts.flashinfer_trtllm:RUNNER",
)


@cache
def expert_runners() -> Catalogue[ExpertRunner]:
    """Built-in and third-party runners, and the broken ones with the reason."""
    return discover(
        kind="expert runner", group="interlock.expert_runners", built_in=BUILT_IN, expected=ExpertRunner
    )
