"""Evidence as ``verify`` would write it, made without running an engine."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from interlock.evidence.record import device_facts, interlock_version, model_facts, recorded_arm
from interlock.evidence.schema import Evidence, Measurement, PromptOutcome
from interlock.options import Options
from interlock.plan.facts import MachineFacts
from interlock.plan.launch_plan import LaunchPlan
from interlock.plan.resolve import resolve
from tests.plan.machines import machine, tiny_card
from tests.plan.test_receipts import honest

FOLDER = "/somewhere/model"


def plan_of(**options: object) -> LaunchPlan:
    given = Options.of(**{"model": FOLDER, "moe_runner_backend": "torch", **options})
    return resolve(given, tiny_card(), machine(), model_path=Path(FOLDER))


@cache
def sample() -> Evidence:
    """A clean comparison of the plan with itself."""
    return evidence_of(plan_of())


def evidence_of(plan: LaunchPlan, facts: MachineFacts | None = None, **changes: Any) -> Evidence:
    facts = facts or machine()
    options = f"--moe-runner-backend {plan.moe_runner_backend}"
    arms = tuple(recorded_arm(name, options, plan, honest(plan)) for name in ("control", "candidate"))
    fields: dict[str, Any] = {
        "kind": "verify",
        "created": "2026-01-02T03:04:05Z",
        "interlock": interlock_version(),
        "model": model_facts(plan),
        "device": device_facts(plan, facts),
        "packages": dict(facts.packages),
        "arms": arms,
        "verdict": "equal",
        "prompts": tuple(
            PromptOutcome(index=i, tokens=8 * i + 1, continuation=4, outcome="bit-identical", largest=0.0)
            for i in range(3)
        ),
        "measurements": (Measurement(name="positions", arm="candidate", value=30.0, unit="positions"),),
    }
    return Evidence(**{**fields, **changes}).sealed()
