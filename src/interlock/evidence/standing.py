"""What the ledger says of a launch: proven here, nearly (another size, device, or family), or not at all."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from interlock.errors import Refusal
from interlock.evidence.check import problems
from interlock.evidence.ledger import Entry, default_folders, entries
from interlock.evidence.record import device_facts
from interlock.evidence.schema import EARLIER, Evidence, arm_plan
from interlock.options import OPTIONS
from interlock.plan.facts import MachineFacts
from interlock.plan.launch_plan import LaunchPlan, Source

PROVEN_ITEMS = (
    "tp_size",
    "ep_size",
    "attn_dp_size",
    "ranks_per_gpu",
    "moe_a2a_backend",
    "moe_runner_backend",
    "kernels",
    "attention_backend",
    "dtype",
    "device",
)
"""Options that decide the combination."""


@dataclass(frozen=True, slots=True)
class Combination:
    """What evidence is about."""

    family: str
    a2a: str
    runner: str
    kernels: str
    weight_format: str
    dtype: str
    device: str
    tp_size: int
    ep_size: int
    attn_dp_size: int
    ranks_per_gpu: int = 1
    attention: str = EARLIER["attention_backend"]

    @classmethod
    def of_plan(cls, plan: LaunchPlan, device_key: str) -> Combination:
        return cls(
            family=plan.card.family,
            a2a=plan.moe_a2a_backend,
            runner=plan.moe_runner_backend,
            kernels=plan.kernels,
            weight_format=plan.card.weight_format,
            dtype=plan.dtype,
            device=device_key,
            tp_size=plan.tp_size,
            ep_size=plan.ep_size,
            attn_dp_size=plan.attn_dp_size,
            ranks_per_gpu=plan.ranks_per_gpu,
            attention=plan.attention_backend,
        )

    @classmethod
    def of_evidence(cls, evidence: Evidence) -> Combination:
        plan = arm_plan(evidence.arms[-1])
        return cls(
            family=evidence.model.family,
            a2a=str(plan.get("moe_a2a_backend")),
            runner=str(plan.get("moe_runner_backend")),
            kernels=str(plan.get("kernels")),
            weight_format=evidence.model.weight_format,
            dtype=str(plan.get("dtype")),
            device=evidence.device.key,
            tp_size=int(plan.get("tp_size", 0)),
            ep_size=int(plan.get("ep_size", 0)),
            attn_dp_size=int(plan.get("attn_dp_size", 0)),
            ranks_per_gpu=int(plan.get("ranks_per_gpu", 1)),
            attention=str(plan.get("attention_backend")),
        )

    def __str__(self) -> str:
        return (
            f"{self.family} {self.weight_format} in {self.dtype}, a2a {self.a2a}, runner {self.runner}, "
            f"kernels {self.kernels}, attention {self.attention}, "
            f"TP {self.tp_size} EP {self.ep_size} DP {self.attn_dp_size}, on {self.device}"
            + (f", {self.ranks_per_gpu} ranks a GPU" if self.ranks_per_gpu > 1 else "")
        )

    def sizes(self) -> tuple[int, int, int]:
        return self.tp_size, self.ep_size, self.attn_dp_size


class Standing(Enum):
    """How near the best evidence comes, best first."""

    PROVEN = "proven"
    REHEARSED = "rehearsed with ranks that shared a GPU"
    OTHER_SIZE = "proven with other sizes"
    OTHER_DEVICE = "proven on another device"
    SIBLING = "proven for a sibling family"
    UNPROVEN = "unproven"


@dataclass(frozen=True, slots=True)
class Proof:
    """The standing of a launch, the file it rests on, and one sentence."""

    standing: Standing
    path: Path | None
    sentence: str


def standing_of(plan: LaunchPlan, facts: MachineFacts, ledger: Iterable[Entry]) -> Proof:
    """What ``ledger`` says of ``plan`` on the machine of ``facts``. Evidence that contradicts itself, or that
    found unexplained differences, proves nothing."""
    wanted = Combination.of_plan(plan, device_facts(plan, facts).key)
    best: tuple[int, Standing, Entry, Combination] | None = None
    for entry in ledger:
        evidence = entry.evidence
        if evidence is None or not proves(evidence):
            continue
        shown = Combination.of_evidence(evidence)
        near = nearness(wanted, shown)
        order = list(Standing).index(near)
        if near is not Standing.UNPROVEN and (best is None or order < best[0]):
            best = (order, near, entry, shown)
    if best is None:
        return Proof(Standing.UNPROVEN, None, f"{wanted}: no evidence")
    _, near, entry, shown = best
    assert entry.evidence is not None
    return Proof(near, entry.path, f"{wanted}: {_words(near, shown)} ({entry.path.name})")


def proves(evidence: Evidence) -> bool:
    """Whether the file shows its combination correct."""
    return evidence.kind == "verify" and evidence.verdict in ("equal", "explained") and not problems(evidence)


def nearness(wanted: Combination, shown: Combination) -> Standing:
    """How near ``shown`` comes to ``wanted``; only one thing may differ. A run in which ranks shared a GPU
    says nothing of the links between GPUs; one in which they did not says all that a rehearsal would."""
    if shown == wanted:
        return Standing.PROVEN
    is_rehearsal = shown.ranks_per_gpu > wanted.ranks_per_gpu
    shown = replace(shown, ranks_per_gpu=wanted.ranks_per_gpu)
    if shown == wanted:
        return Standing.REHEARSED if is_rehearsal else Standing.PROVEN
    same_sizes = replace(
        shown, tp_size=wanted.tp_size, ep_size=wanted.ep_size, attn_dp_size=wanted.attn_dp_size
    )
    if same_sizes == wanted:
        return Standing.OTHER_SIZE
    if replace(same_sizes, device=wanted.device) == wanted:
        return Standing.OTHER_DEVICE
    if replace(same_sizes, family=wanted.family) == wanted:
        return Standing.SIBLING
    return Standing.UNPROVEN


def admit(plan: LaunchPlan, facts: MachineFacts, folders: Iterable[Path] | None = None) -> str | None:
    """Apply ``--evidence``: None to serve in silence, or the line to print first.

    Raises:
        Refusal: ``require``, and the launch is not proven here.
    """
    if plan.evidence == "off":
        return None
    proof = standing_of(plan, facts, entries(folders if folders is not None else default_folders()))
    if proof.standing is Standing.PROVEN:
        return None
    if plan.evidence == "require":
        raise Refusal(
            option="--evidence",
            given="require",
            rule=f"this launch is not proven here: {proof.sentence}",
            alternatives=(_verify_command(plan), "--evidence warn"),
        )
    return f"evidence: {proof.standing.value}: {proof.sentence}; prove it with: {_verify_command(plan)}"


def _words(near: Standing, shown: Combination) -> str:
    if near is Standing.REHEARSED:
        return f"rehearsed with {shown.ranks_per_gpu} ranks on each GPU"
    if near is Standing.OTHER_SIZE:
        tp, ep, dp = shown.sizes()
        return f"proven with TP {tp} EP {ep} DP {dp}"
    if near is Standing.OTHER_DEVICE:
        return f"proven on another device, {shown.device}"
    if near is Standing.SIBLING:
        return f"proven for a sibling family, {shown.family}"
    return "proven"


def _verify_command(plan: LaunchPlan) -> str:
    """The command that would prove the launch: the options of the combination that the user set."""
    flags = [
        OPTIONS[name].paste(getattr(plan, name))
        for name in PROVEN_ITEMS
        if name in plan.provenance and plan.provenance[name].source is Source.USER
    ]
    return f'interlock verify {plan.model} --control "" --candidate "{" ".join(flags)}"'
