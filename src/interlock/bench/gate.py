"""Whether a faster run may be believed: proven correct with the same settings, beside a baseline of its own.

A speed counts only with accuracy evidence of the same version and combination, and against a baseline that
was measured with that version too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from interlock.evidence.schema import Arm, Evidence, arm_plan, digest_of

DECISIVE: Final = (
    "model_family", "moe_a2a_backend", "moe_runner_backend", "moe_layout_prefill", "moe_layout_decode",
    "dtype", "kv_cache_dtype", "kernels", "attention_backend", "device", "tp_size", "ep_size", "attn_dp_size",
    "deterministic",
)  # fmt: skip
"""Plan items on which the numbers that a model computes depend."""


def objections(
    baseline: Evidence, candidate: Evidence, arm: Arm, ledger: Iterable[Evidence]
) -> Iterator[str]:
    """Why the candidate's speed does not count; nothing when it does.

    Args:
        arm: the candidate's arm.
        ledger: evidence among which ``verify`` may have proven it.
    """
    for evidence, name in ((baseline, "baseline"), (candidate, "candidate")):
        if evidence.digest and evidence.digest != digest_of(evidence):
            yield f"the {name}'s file was changed after it was written"
    if baseline.interlock != candidate.interlock:
        yield (
            f"stale baseline: measured with interlock {baseline.interlock} on {baseline.created}, "
            f"the candidate with {candidate.interlock}; measure both now"
        )
    yield from _accuracy(candidate, arm, ledger)


def _accuracy(candidate: Evidence, arm: Arm, ledger: Iterable[Evidence]) -> Iterator[str]:
    proofs = [
        each for each in ledger if each.kind == "verify" and each.arms and _proves(each, candidate, arm)
    ]
    if not proofs:
        yield f"no accuracy evidence for arm {arm.name}: interlock verify with these options writes it"
        return
    current = [each for each in proofs if each.interlock == candidate.interlock]
    if not current:
        versions = ", ".join(sorted({each.interlock for each in proofs}))
        yield f"old accuracy evidence: of interlock {versions}, the candidate is {candidate.interlock}"
        return
    latest = max(current, key=lambda each: each.created)
    if latest.verdict not in ("equal", "explained"):
        worst = max((prompt.largest for prompt in latest.prompts), default=0.0)
        yield (
            f"the accuracy evidence of {latest.created} says {latest.verdict!r} "
            f"(largest log-probability difference {worst:.3g})"
        )


def _proves(proof: Evidence, candidate: Evidence, arm: Arm) -> bool:
    mine, theirs = arm_plan(arm), arm_plan(proof.arms[-1])
    if proof.model.config_hash != candidate.model.config_hash or proof.device.key != candidate.device.key:
        return False
    return bool(theirs) and all(mine.get(item) == theirs.get(item) for item in DECISIVE)
