"""Evidence that contradicts itself, or was changed, does not count."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from interlock.errors import InterlockError
from interlock.evidence.check import problems, recorded_plan
from interlock.evidence.ledger import entries, read_evidence, write_evidence
from interlock.evidence.schema import Arm, Evidence, Measurement
from tests.evidence.samples import sample

replace = msgspec.structs.replace


def arm_with(evidence: Evidence, **changes: Any) -> Evidence:
    """The candidate's plan or receipts changed, and the file sealed again, as a forger would."""
    control, candidate = evidence.arms
    return replace(evidence, arms=(control, replace(candidate, **changes))).sealed()


def plan_with(evidence: Evidence, **items: Any) -> Evidence:
    plan = evidence.arms[1].plan
    assert plan is not None
    return arm_with(evidence, plan={**plan, **items})


def layers_with(evidence: Evidence, **items: Any) -> Evidence:
    receipts = msgspec.json.decode(msgspec.json.encode(evidence.arms[1].receipts))
    for layer in receipts["0"]["moe_layers"]:
        layer.update(items)
    return arm_with(evidence, receipts=receipts)


def test_honest_evidence_has_no_problem() -> None:
    assert problems(sample()) == []


CONTRADICTIONS: dict[str, tuple[Callable[[Evidence], Evidence], str]] = {
    "digest": (lambda e: replace(e, verdict="explained"), "digest does not match"),
    "family": (lambda e: replace(e, model=replace(e.model, family="other")).sealed(), "model family 'other'"),
    "config": (lambda e: replace(e, model=replace(e.model, config_hash="0")).sealed(), "config hash"),
    "format": (lambda e: replace(e, model=replace(e.model, weight_format="x")).sealed(), "weight format"),
    "device": (lambda e: replace(e, device=replace(e.device, kind="cuda")).sealed(), "device 'cuda'"),
    "backend": (lambda e: layers_with(e, a2a_backend="collective"), "the plan says moe_a2a_backend = none"),
    "runner": (lambda e: layers_with(e, runner_backend="cpu"), "--moe-runner-backend"),
    "calls": (lambda e: layers_with(e, dispatches={"prefill": 0, "decode": 0}), "at least 1 call"),
    "receipts": (lambda e: arm_with(e, receipts={}), "shows no receipt"),
    "options": (lambda e: plan_with(e, page_size=32), "page"),
    "asked": (lambda e: arm_with(e, options="--moe-a2a-backend collective"), "its options ask for"),
    "unreadable": (lambda e: arm_with(e, options="--no-such 3"), "options cannot be read"),
    "no plan": (lambda e: arm_with(e, plan=None), "holds no plan"),
    "no prompts": (lambda e: replace(e, prompts=()).sealed(), "compares no prompt"),
    "verdict": (lambda e: replace(e, verdict="explained").sealed(), "its prompts say 'equal'"),
    "outcome": (
        lambda e: replace(e, prompts=(replace(e.prompts[0], largest=0.3), *e.prompts[1:])).sealed(),
        "prompt 1 is bit-identical with a difference of 0.3",
    ),
    "arm": (
        lambda e: replace(e, measurements=(Measurement(name="x", arm="who", value=1, unit=""),)).sealed(),
        "arm 'who'",
    ),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_contradiction_is_found(name: str) -> None:
    forge, words = CONTRADICTIONS[name]
    assert any(words in problem for problem in problems(forge(sample()))), problems(forge(sample()))


def test_a_file_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    path = write_evidence(sample(), tmp_path)
    assert read_evidence(path) == sample()
    second = write_evidence(sample(), tmp_path)
    assert second != path
    assert [entry.path for entry in entries([tmp_path])] == sorted([path, second])


def test_a_file_is_called_a_url_only_where_a_server_was_asked(tmp_path: Path) -> None:
    """A measurement of parts has arms without a plan, and no server either."""
    for url, wanted in (
        ("", "verify-model-cpu_x86_64-2026"),
        ("http://x", "verify-model-cpu_x86_64-url-2026"),
    ):
        arm = Arm(name="masked", options="", url=url)
        path = write_evidence(replace(sample(), arms=(arm,)), tmp_path)
        assert path.name.startswith(wanted)


def test_a_change_by_hand_is_noticed(tmp_path: Path) -> None:
    path = write_evidence(sample(), tmp_path)
    path.write_text(path.read_text().replace('"verdict": "equal"', '"verdict": "explained"'))
    assert "digest" in problems(read_evidence(path))[0]


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"schema": "interlock.evidence/99"}', "{"])
def test_other_files_are_refused_and_listed_with_the_reason(tmp_path: Path, content: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(content)
    with pytest.raises(InterlockError, match=r"x\.json"):
        read_evidence(path)
    (entry,) = entries([tmp_path])
    assert entry.evidence is None
    assert "x.json" in entry.problem


def test_a_plan_of_an_older_version_is_read_without_the_newer_item() -> None:
    plan = dict(sample().arms[1].plan or {})
    del plan["evidence"]
    recorded = recorded_plan(plan)
    assert recorded.missing == {"evidence"}
    control, candidate = sample().arms
    older = replace(sample(), arms=(control, replace(candidate, plan=plan))).sealed()
    assert problems(older) == []


def test_no_folder_of_the_machine_is_recorded() -> None:
    text = msgspec.json.encode(sample()).decode()
    assert "/somewhere/" not in text
    assert '"model_path":"model"' in text
