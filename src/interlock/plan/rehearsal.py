"""Rehearsal: a deployment of many ranks on fewer GPUs, to see that it is correct. It says nothing of speed.

Ranks on one GPU take turns, so every exchange costs tens of milliseconds, unless the NVIDIA Multi-Process
Service (MPS) runs them side by side. Then kernels that wait for each other must fit on the GPU at once, so
NCCL may use few blocks. NCCL lets ranks share a GPU from 2.30 on, and only when it is told to by its
environment, which a rank must have before it starts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from interlock.errors import Refusal
from interlock.options import Options
from interlock.plan import decided as from_
from interlock.plan.decided import Decided, rule
from interlock.plan.facts import MachineFacts
from interlock.plan.launch_plan import LaunchPlan
from interlock.plan.nccl import NcclLibrary

LEAST_NCCL: Final = (2, 30)
STALL_SECONDS: Final = 600.0
"""Ranks that share a GPU wait for each other's kernels, and compile beside each other."""
CONTEXT_BYTES: Final = 1 << 30
"""What each rank's context and libraries take of a shared GPU, beyond one rank's, which is planned for."""
ENVIRONMENT: Final[Mapping[str, str]] = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MIN_NCHANNELS": "1",
    "NCCL_MAX_NCHANNELS": "4",
    "NCCL_MAX_P2P_NCHANNELS": "4",
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}
"""What a rank that shares its GPU needs before torch and NCCL are loaded."""
REHEARSAL: Final = "rehearsal: "
"""How the sentence begins that every report of a rehearsal has."""
_FLAG: Final = "--ranks-per-gpu"


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """The items of this module."""

    nccl_library: Decided[str]
    stall_timeout: Decided[float]

    def items(self) -> dict[str, Decided[Any]]:
        """Plan items."""
        return {"nccl_library": self.nccl_library, "stall_timeout": self.stall_timeout}


def decide_rehearsal(options: Options, facts: MachineFacts, ranks_per_gpu: int) -> Rehearsal:
    """The NCCL library that the ranks load, and how long they wait.

    Raises:
        Refusal: no NCCL here lets ranks share a GPU.
    """
    stall = from_.number(options, "stall_timeout")
    if ranks_per_gpu == 1:
        return Rehearsal(rule("", "every rank has a GPU of its own, or computes on a CPU"), stall)
    if not options.is_set("stall_timeout"):
        stall = rule(STALL_SECONDS, f"ranks that share a GPU take turns ({_FLAG} {ranks_per_gpu})")
    chosen = shared_nccl(facts.nccl, ranks_per_gpu)
    own = next((library for library in facts.nccl if library.of_torch), None)
    reason = f"NCCL {chosen.version} lets ranks share a GPU"
    if not chosen.of_torch:
        reason += f" and is loaded in place of torch's own{f' {own.version}' if own else ''}"
    return Rehearsal(rule(chosen.path, reason), stall)


def shared_nccl(libraries: Sequence[NcclLibrary], ranks_per_gpu: int) -> NcclLibrary:
    """The first of ``libraries`` that lets ranks share a GPU.

    Raises:
        Refusal: none does; says what to install.
    """
    fitting = [library for library in libraries if library.numbers[:2] >= LEAST_NCCL]
    if not fitting:
        raise Refusal(
            option=_FLAG,
            given=ranks_per_gpu,
            rule=f"{_FLAG} needs NCCL 2.30 or later, which lets ranks share a GPU; {_found(libraries)}. "
            "Install it beside torch's own, which stays as it is: "
            "pip install --no-deps --target nccl 'nvidia-nccl-cu13>=2.30.4', and start with PYTHONPATH=nccl",
            alternatives=[f"{_FLAG} 1"],
        )
    return fitting[0]


def _found(libraries: Sequence[NcclLibrary]) -> str:
    if not libraries:
        return "none is found"
    return "found " + ", ".join(
        (library.version or "an unknown version") + (" (torch's own)" if library.of_torch else "")
        for library in libraries
    )


def notice(plan: LaunchPlan) -> str:
    """What every report of a rehearsal says; "" for other plans."""
    return sharing_notice(plan.ranks_per_gpu)


def sharing_notice(ranks_per_gpu: int) -> str:
    """The sentence for ``ranks_per_gpu`` ranks on each GPU; "" for one."""
    if ranks_per_gpu == 1:
        return ""
    return f"{REHEARSAL}{ranks_per_gpu} ranks share a GPU; not a speed measurement"


def rank_environment(ranks_per_gpu: int, nccl_library: str, inherited: Mapping[str, str]) -> dict[str, str]:
    """The environment to start a rank process with: ``inherited``, and what sharing a GPU needs."""
    if ranks_per_gpu == 1:
        return dict(inherited)
    environment = {**inherited, **ENVIRONMENT}
    preloaded = inherited.get("LD_PRELOAD", "").replace(":", " ").split()
    if nccl_library and nccl_library not in preloaded:
        environment["LD_PRELOAD"] = ":".join([nccl_library, *preloaded])
    return environment
