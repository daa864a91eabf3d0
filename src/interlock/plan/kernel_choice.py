"""Which kernel set the ranks compute with, from the device and from what is installed."""

from __future__ import annotations

from typing import Final

from interlock.errors import Refusal
from interlock.kernels.availability import triton_problem
from interlock.options import Options
from interlock.plan.decided import Decided, asked_text, rule
from interlock.plan.facts import MachineFacts

NATIVE, REFERENCE, TRITON = "cpu", "torch", "triton"
ROW_INVARIANT: Final = frozenset({NATIVE})
"""Kernel sets whose classes declare ``row_invariant``."""
FP8_LINEARS: Final = frozenset({TRITON})
"""Kernel sets that compute linears with fp8 blocks fast."""
FP8_EMULATIONS: Final = frozenset({REFERENCE})
"""Kernel sets that compute them slowly, on any device and with any activations: only when asked to."""
FP8_CAPABILITIES: Final = ((9, 0), (9, 9))
"""Compute capabilities that the fp8 GEMMs are written for, both included: Hopper's matrix instructions."""
PREFERRED: Final = {"cpu": (NATIVE, REFERENCE), "cuda": (TRITON, REFERENCE)}
"""By device, fastest first; the last runs anywhere."""


def kernels_problem(name: str, facts: MachineFacts, device: str, ranks: int) -> str | None:
    """Why the kernel set ``name`` cannot compute with ``ranks`` ranks on ``device``, or None."""
    if name == NATIVE:
        if device != "cpu":
            return f"the native kernels run on a CPU, and --device is {device}"
        return facts.native_kernels_problem
    if name == TRITON:
        if device != "cuda":
            return f"the Triton kernels run on an NVIDIA GPU, and --device is {device}"
        capabilities = [found.capability for found in facts.devices[:ranks]]
        return triton_problem(facts.packages.get("triton"), capabilities)
    return None


def default_kernels(facts: MachineFacts, device: str, ranks: int) -> str:
    """The fastest kernel set that computes on ``device`` here."""
    names = PREFERRED[device]
    return next(name for name in names if kernels_problem(name, facts, device, ranks) is None)


def decide_kernels(options: Options, facts: MachineFacts, device: str, ranks: int) -> Decided[str]:
    """The kernel set that was asked for, or the fastest one that computes here."""
    asked = asked_text(options, "kernels")
    chosen = asked.value if asked else default_kernels(facts, device, ranks)
    problem = kernels_problem(chosen, facts, device, ranks)
    if options.switch("deterministic"):
        _refuse_varying(chosen, facts, device)
    if asked is None:
        return rule(chosen, _reason(chosen, facts, device, ranks))
    if problem:
        alternatives = [f"--kernels {name}" for name in PREFERRED[device] if name != chosen]
        if chosen == TRITON and device == "cpu" and facts.devices:
            alternatives.insert(0, "--device cuda")
        raise Refusal(option="--kernels", given=chosen, rule=problem, alternatives=alternatives)
    return asked


def _reason(chosen: str, facts: MachineFacts, device: str, ranks: int) -> str:
    best = PREFERRED[device][0]
    if chosen != best:
        kind = "native CPU" if best == NATIVE else "Triton"
        return f"{kind} kernels cannot be used: {kernels_problem(best, facts, device, ranks)}"
    if chosen == NATIVE:
        return "a C++ compiler is there, and --device is cpu"
    return f"triton {facts.packages['triton']} is there, and --device is cuda"


def _refuse_varying(kernels: str, facts: MachineFacts, device: str) -> None:
    """Refuse kernels whose bits depend on other rows."""
    if kernels in ROW_INVARIANT:
        return
    rule_text = f"its kernels must be row-invariant, and --kernels {kernels} are not"
    alternatives = ["--no-deterministic"]
    if device != "cpu":
        alternatives.insert(0, f"--device cpu --kernels {NATIVE}")
    elif facts.native_kernels_problem:
        rule_text += f"; {facts.native_kernels_problem}"
    else:
        alternatives.insert(0, f"--kernels {NATIVE}")
    raise Refusal(option="--deterministic", given="", rule=rule_text, alternatives=alternatives)
