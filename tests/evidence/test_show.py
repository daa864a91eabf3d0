"""``interlock evidence list|show|check`` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from interlock.cli import run
from interlock.evidence.ledger import installation_folder, write_evidence
from interlock.plan.rehearsal import sharing_notice
from tests.evidence.samples import evidence_of, plan_of, sample


def test_list_shows_every_file_and_why_some_do_not_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_evidence(sample(), tmp_path)
    (tmp_path / "broken.json").write_text("{}")
    assert run(["evidence", "list", "--ledger", str(tmp_path), "--json"]) == 0
    lines = {line["file"]: line for line in json.loads(capsys.readouterr().out)}
    assert lines[path.name]["verdict"] == "equal"
    assert lines[path.name]["sizes"] == "1/1/1"
    assert lines["broken.json"]["verdict"].startswith("unreadable")
    assert run(["evidence", "list", "--ledger", str(tmp_path)]) == 0
    assert "equal" in capsys.readouterr().out


def test_list_says_which_evidence_is_a_rehearsal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What ranks that shared a GPU showed is not read as what GPUs of their own would."""
    path = write_evidence(evidence_of(plan_of(), notes=(sharing_notice(4),)), tmp_path)
    assert run(["evidence", "list", "--ledger", str(tmp_path), "--json"]) == 0
    (line,) = json.loads(capsys.readouterr().out)
    assert (line["file"], line["verdict"]) == (path.name, "equal (rehearsal)")


def test_show_finds_a_file_by_the_beginning_of_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_evidence(sample(), tmp_path)
    assert run(["evidence", "show", path.name[:9], "--ledger", str(tmp_path)]) == 0
    assert "verdict: equal" in capsys.readouterr().out
    assert run(["evidence", "show", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["schema"] == "interlock.evidence/1"
    assert run(["evidence", "show", "nothing", "--ledger", str(tmp_path)]) == 1
    assert "no evidence file nothing" in capsys.readouterr().err


def test_check_fails_for_a_changed_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_evidence(sample(), tmp_path)
    assert run(["evidence", "check", str(path)]) == 0
    path.write_text(path.read_text().replace('"equal"', '"explained"'))
    assert run(["evidence", "check", "--ledger", str(tmp_path)]) == 1
    assert "digest does not match" in capsys.readouterr().out


def test_the_evidence_of_this_installation_holds() -> None:
    """Every file that ships is whole and agrees with itself."""
    assert run(["evidence", "check", "--ledger", str(installation_folder())]) == 0
