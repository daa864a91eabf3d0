"""What may be compared, what is refused and with which name, and which speeds count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from interlock.bench.compare import compare
from interlock.bench.gate import objections
from interlock.cli import run
from interlock.errors import Refusal
from interlock.evidence.ledger import write_evidence
from interlock.evidence.schema import (
    Arm,
    DeviceFacts,
    Evidence,
    Measurement,
    ModelFacts,
    PromptOutcome,
)
from tests.bench.stub_session import stub_plan

MODEL = ModelFacts(name="stub", family="fake", architecture="Fake", config_hash="c", weight_format="float32")
DEVICE = DeviceFacts(kind="cpu", name="a cpu", key="cpu x86_64", cores=2)


def arm(name: str = "ep2", **changes: Any) -> Arm:
    return Arm(name=name, plan=msgspec.to_builtins(stub_plan(**changes), enc_hook=str))


def decode_point(arm_name: str, value: float, **conditions: Any) -> Measurement:
    pinned = {"tool": "decode", "batch": 32, "context": 512, "steps": 16, "prefix_cache": False}
    return Measurement(
        name="decode_ms_per_token",
        arm=arm_name,
        value=value,
        unit="ms",
        conditions=pinned | conditions,
        samples=(value * 0.99, value, value * 1.01),
    )


def evidence(*arms: Arm, points: tuple[Measurement, ...] = (), **changes: Any) -> Evidence:
    values: dict[str, Any] = {
        "kind": "bench",
        "created": "2026-12-01T10:00:00Z",
        "interlock": "0.1.0",
        "model": MODEL,
        "device": DEVICE,
        "packages": {"torch": "2.13.0"},
        "arms": arms,
        "verdict": "measured",
        "measurements": points or tuple(decode_point(each.name, 40.0) for each in arms),
    }
    return Evidence(**values | changes).sealed()


def test_matched_arms_are_compared() -> None:
    first = evidence(arm(), points=(decode_point("ep2", 40.0),))
    second = evidence(arm(), points=(decode_point("ep2", 30.0), decode_point("ep2", 50.0, batch=64)))
    comparison = compare(first, second)
    (pair,) = comparison.pairs
    assert pair.ratio == pytest.approx(0.75)
    assert pair.is_clear is True
    assert comparison.unpaired == ("only the second has decode_ms_per_token (batch 64)",)
    same = compare(first, first)
    assert same.pairs[0].is_clear is False


def test_another_chunk_size_is_refused_by_name() -> None:
    """K08: two settings that differ in the chunk; the comparison fails and names the key and both values."""
    first, second = evidence(arm(chunked_prefill_size=256)), evidence(arm(chunked_prefill_size=512))
    with pytest.raises(Refusal, match=r"chunked_prefill_size: 256 against 512") as refused:
        compare(first, second)
    assert "--allow chunked_prefill_size" in str(refused.value)
    allowed = compare(first, second, allow={"chunked_prefill_size"})
    assert [str(each) for each in allowed.allowed] == ["chunked_prefill_size: 256 against 512"]


@pytest.mark.parametrize(
    ("item", "first", "second"),
    [("ep_size", 1, 2), ("page_size", 16, 32), ("prefix_cache", True, False), ("threads", 1, 2),
     ("moe_prefill_capacity", 256, 64), ("dtype", "float32", "bfloat16"), ("moe_a2a_backend", "none", "x")],
)  # fmt: skip
def test_every_setting_in_effect_counts(item: str, first: Any, second: Any) -> None:
    """K08: also what no flag named but a default set."""
    with pytest.raises(Refusal, match=f"{item}: {first} against {second}"):
        compare(evidence(arm(**{item: first})), evidence(arm(**{item: second})))


def test_names_of_models_ports_and_hosts_do_not_count() -> None:
    first, second = arm(port=1, host="a", log_level="info"), arm(port=2, host="b", log_level="error")
    comparison = compare(evidence(first), evidence(second))
    assert comparison.pairs
    assert comparison.allowed == ()


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("package.torch", {"packages": {"torch": "2.11.0"}}),
        ("device.key", {"device": msgspec.structs.replace(DEVICE, key="H200")}),
        ("device.cores", {"device": msgspec.structs.replace(DEVICE, cores=4)}),
        ("model.config_hash", {"model": msgspec.structs.replace(MODEL, config_hash="d")}),
        ("verdict", {"verdict": "invalid"}),
    ],
)
def test_other_machines_models_and_packages_are_refused_by_name(name: str, changes: dict[str, Any]) -> None:
    with pytest.raises(Refusal, match=name.replace(".", r"\.")):
        compare(evidence(arm()), evidence(arm(), **changes))


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("chunk_delivered", {"chunk_delivered": 16384}, {"chunk_delivered": 8192}),
        ("context", {"context": 512}, {"context": 1024}),
        ("hit_rate", {"hit_rate": 0.0}, {"hit_rate": 0.5}),
        ("failure_rate", {"failure_rate": 0.0}, {"failure_rate": 0.02}),
    ],
)
def test_what_was_delivered_must_match(name: str, first: dict[str, Any], second: dict[str, Any]) -> None:
    """K08, K04, K01: another delivered chunk, another share of cache hits, more than 1 % of failures."""
    with pytest.raises(Refusal, match=name):
        compare(
            evidence(arm(), points=(decode_point("ep2", 40.0, **first),)),
            evidence(arm(), points=(decode_point("ep2", 40.0, **second),)),
        )


def test_arms_of_a_run_are_chosen_by_name() -> None:
    both = evidence(arm("tp2", ep_size=1), arm("ep2", ep_size=2))
    with pytest.raises(Refusal, match="the run has the arms tp2, ep2"):
        compare(both, both)
    with pytest.raises(Refusal, match="ep_size: 1 against 2"):
        compare(both, both, first_arm="tp2", second_arm="ep2")
    comparison = compare(both, both, first_arm="tp2", second_arm="ep2", allow={"ep_size"})
    assert comparison.pairs[0].first.arm == "tp2"
    assert comparison.pairs[0].second.arm == "ep2"


def test_runs_with_nothing_in_common_are_refused() -> None:
    second = evidence(arm(), points=(decode_point("ep2", 1.0, batch=64),))
    with pytest.raises(Refusal, match="nothing in common"):
        compare(evidence(arm()), second)


def proof(verdict: str = "equal", **changes: Any) -> Evidence:
    outcome = PromptOutcome(index=0, tokens=8, continuation=8, outcome="different", largest=2.5)
    prompts = (outcome,) if verdict == "unexplained" else ()
    points = (decode_point("ep2", 0.0),)
    return evidence(arm(), points=points, kind="verify", verdict=verdict, prompts=prompts, **changes)


@pytest.mark.parametrize(
    ("ledger", "objection"),
    [
        ([], "no accuracy evidence"),
        ([proof(interlock="0.0.9")], "old accuracy evidence: of interlock 0.0.9"),
        ([proof("unexplained")], "largest log-probability difference 2.5"),
        ([proof(device=msgspec.structs.replace(DEVICE, key="H200"))], "no accuracy evidence"),
        ([proof(), proof("unexplained", created="2026-12-02T10:00:00Z")], "unexplained"),
        ([proof()], ""),
        ([proof("explained")], ""),
    ],
)
def test_a_speed_needs_accuracy_of_the_same_version(ledger: list[Evidence], objection: str) -> None:
    """K07: thirty percent faster counts for nothing without accuracy evidence of now."""
    baseline, candidate = evidence(arm()), evidence(arm(), points=(decode_point("ep2", 28.0),))
    found = list(objections(baseline, candidate, candidate.arms[0], ledger))
    assert [objection in text for text in found] == ([True] if objection else [])


def test_a_stale_or_edited_baseline_is_rejected() -> None:
    """K07: a baseline of an older version, or one whose numbers were changed by hand."""
    candidate = evidence(arm())
    old = evidence(arm(), interlock="0.0.9")
    assert "stale baseline" in next(objections(old, candidate, candidate.arms[0], [proof()]))
    edited = msgspec.structs.replace(candidate, measurements=(decode_point("ep2", 99.0),))
    assert "changed after" in next(objections(edited, candidate, candidate.arms[0], [proof()]))


def test_compare_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """K08: exit code 2 and the key; with --allow, 0 and the difference in the header."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    first = write_evidence(evidence(arm(chunked_prefill_size=256)), tmp_path, name="a")
    second = write_evidence(evidence(arm(chunked_prefill_size=512)), tmp_path, name="b")
    assert run(["bench", "compare", str(first), str(second)]) == 2
    assert "chunked_prefill_size: 256 against 512" in capsys.readouterr().err
    assert run(["bench", "compare", str(first), str(second), "--allow", "chunked_prefill_size"]) == 0
    out = capsys.readouterr().out
    assert "differs, as allowed: chunked_prefill_size: 256 against 512" in out
    assert "note: no accuracy evidence" in out
    verified = ["bench", "compare", str(first), str(first), "--require-verified"]
    assert run(verified) == 1
    assert "rejected: no accuracy evidence for arm ep2" in capsys.readouterr().out
    assert run(["bench", "compare", str(first), str(tmp_path / "none.json")]) == 1


def test_rehearsals_are_no_speeds() -> None:
    first, shared = evidence(arm()), evidence(arm(ranks_per_gpu=2))
    with pytest.raises(Refusal, match="rehearsal: 2 ranks share a GPU; not a speed measurement"):
        compare(first, shared, allow={"ranks_per_gpu"})
