"""What the ledger says of a launch, and what ``--evidence`` makes of it."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from interlock.errors import Refusal
from interlock.evidence.ledger import entries, write_evidence
from interlock.evidence.record import rehearsal_notes
from interlock.evidence.schema import Evidence
from interlock.evidence.standing import Proof, Standing, admit, standing_of
from interlock.options import Options
from interlock.plan.launch_plan import LaunchPlan
from interlock.plan.resolve import resolve
from tests.evidence.samples import FOLDER, evidence_of, plan_of, sample
from tests.plan.machines import gpu_machine, machine, tiny_card

replace = msgspec.structs.replace


def told(plan: LaunchPlan, folder: Path, *written: Evidence) -> Proof:
    for evidence in written:
        write_evidence(evidence, folder)
    return standing_of(plan, machine(), entries([folder]))


def sibling(evidence: Evidence, family: str) -> Evidence:
    """The same run of a model of another family."""
    arms = []
    for arm in evidence.arms:
        plan = msgspec.json.decode(msgspec.json.encode(arm.plan))
        plan["card"]["family"] = family
        plan["model_family"] = family
        receipts = {rank: {**items, "model_family": family} for rank, items in arm.receipts.items()}
        arms.append(replace(arm, plan=plan, receipts=receipts))
    model = replace(evidence.model, family=family)
    return replace(evidence, model=model, arms=tuple(arms)).sealed()


def test_the_same_combination_is_proven(tmp_path: Path) -> None:
    proof = told(plan_of(), tmp_path, sample())
    assert proof.standing is Standing.PROVEN
    assert proof.path is not None


def test_nothing_is_proven_by_nothing(tmp_path: Path) -> None:
    assert told(plan_of(), tmp_path).standing is Standing.UNPROVEN
    assert told(plan_of(), tmp_path / "absent").standing is Standing.UNPROVEN


@pytest.mark.parametrize(
    ("options", "standing"),
    [
        ({}, Standing.PROVEN),
        ({"chunked_prefill_size": 48}, Standing.PROVEN),
        ({"tp_size": 2}, Standing.OTHER_SIZE),
        ({"dtype": "bfloat16"}, Standing.UNPROVEN),
        ({"moe_a2a_backend": "collective", "tp_size": 2}, Standing.UNPROVEN),
        ({"kernels": "torch"}, Standing.UNPROVEN),
    ],
)
def test_what_differs_decides(tmp_path: Path, options: dict[str, object], standing: Standing) -> None:
    evidence = evidence_of(plan_of(kernels="cpu"))
    assert told(plan_of(**{"kernels": "cpu", **options}), tmp_path, evidence).standing is standing


def test_another_device_and_a_sibling_family_are_said_as_such(tmp_path: Path) -> None:
    arm64 = evidence_of(plan_of(), machine(architecture="aarch64"))
    proof = told(plan_of(), tmp_path / "device", arm64)
    assert proof.standing is Standing.OTHER_DEVICE
    assert "proven on another device, cpu aarch64" in proof.sentence
    proof = told(plan_of(), tmp_path / "family", sibling(sample(), "qwen3_moe"))
    assert proof.standing is Standing.SIBLING
    assert "proven for a sibling family, qwen3_moe" in proof.sentence


def test_another_attention_backend_is_another_combination(tmp_path: Path) -> None:
    """Records from before there was a choice are of the kernel set's own."""
    flash = msgspec.structs.replace(plan_of(), attention_backend="flash_attention")
    assert told(flash, tmp_path, sample()).standing is Standing.UNPROVEN
    arms = []
    for arm in sample().arms:
        plan = {name: value for name, value in (arm.plan or {}).items() if name != "attention_backend"}
        receipts = {
            rank: {name: value for name, value in items.items() if name != "attention_backend"}
            for rank, items in arm.receipts.items()
        }
        arms.append(replace(arm, plan=plan, receipts=receipts))
    old = replace(sample(), arms=tuple(arms)).sealed()
    assert told(plan_of(), tmp_path / "old", old).standing is Standing.PROVEN
    assert told(flash, tmp_path / "old").standing is Standing.UNPROVEN


def test_a_rehearsal_proves_the_computation_and_not_the_links(tmp_path: Path) -> None:
    one_gpu = gpu_machine(gpus=4)
    plan = resolve(Options.of(model=FOLDER, tp_size=4), tiny_card(dtype="bfloat16"), one_gpu)
    shared = resolve(
        Options.of(model=FOLDER, tp_size=4, ranks_per_gpu=4), tiny_card(dtype="bfloat16"), one_gpu
    )
    evidence = {name: evidence_of(each, one_gpu) for name, each in (("real", plan), ("shared", shared))}

    def standing(wanted: LaunchPlan, name: str) -> Standing:
        folder = tmp_path / name
        write_evidence(evidence[name], folder)
        return standing_of(wanted, one_gpu, entries([folder])).standing

    assert standing(plan, "shared") is Standing.REHEARSED
    assert standing(shared, "shared") is Standing.PROVEN
    assert standing(shared, "real") is Standing.PROVEN
    assert evidence["shared"].device.count == 1
    assert rehearsal_notes(evidence["shared"].arms) == (
        "rehearsal: 4 ranks share a GPU; not a speed measurement",
    )
    assert rehearsal_notes(evidence["real"].arms) == ()
    with pytest.raises(Refusal, match="rehearsed with 4 ranks on each GPU"):
        admit(msgspec.structs.replace(plan, evidence="require"), one_gpu, [tmp_path / "shared"])


def test_the_best_evidence_counts(tmp_path: Path) -> None:
    arm64 = evidence_of(plan_of(), machine(architecture="aarch64"))
    proof = told(plan_of(), tmp_path, sibling(sample(), "qwen3_moe"), arm64, sample())
    assert proof.standing is Standing.PROVEN


def test_evidence_that_found_faults_or_contradicts_itself_proves_nothing(tmp_path: Path) -> None:
    first = replace(
        sample().prompts[0], outcome="different", cause="unexplained", largest=1.0, explained=False
    )
    faulty = replace(sample(), prompts=(first, *sample().prompts[1:]), verdict="unexplained").sealed()
    arms = (sample().arms[0], replace(sample().arms[1], receipts={}))
    contradicting = replace(sample(), arms=arms).sealed()
    bench = replace(sample(), kind="bench", prompts=(), verdict="measured").sealed()
    assert told(plan_of(), tmp_path, faulty, contradicting, bench).standing is Standing.UNPROVEN


def test_warn_gives_one_line_require_refuses_off_is_silent(tmp_path: Path) -> None:
    folders = [tmp_path]
    line = admit(plan_of(), machine(), folders)
    assert line is not None
    assert "\n" not in line
    assert line.startswith("evidence: unproven: mimo_v2 float32")
    command = f'interlock verify {FOLDER} --control "" --candidate "--moe-runner-backend torch"'
    assert line.endswith(command)
    with pytest.raises(Refusal, match=re.escape("--evidence require: this launch is not proven here")):
        admit(plan_of(evidence="require"), machine(), folders)
    assert admit(plan_of(evidence="off"), machine(), folders) is None
    write_evidence(sample(), tmp_path)
    for mode in ("warn", "require", "off"):
        assert admit(plan_of(evidence=mode), machine(), folders) is None


def test_require_refuses_what_is_only_proven_elsewhere(tmp_path: Path) -> None:
    write_evidence(evidence_of(plan_of(), machine(architecture="aarch64")), tmp_path)
    with pytest.raises(Refusal, match="proven on another device"):
        admit(plan_of(evidence="require"), machine(), [tmp_path])
