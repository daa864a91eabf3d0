"""``interlock evidence list|show|check``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.table import Table

from interlock.console import console
from interlock.errors import InterlockError
from interlock.evidence.check import problems
from interlock.evidence.ledger import Entry, default_folders, entries, read_evidence
from interlock.evidence.record import said_rehearsals
from interlock.evidence.schema import Evidence
from interlock.evidence.standing import Combination


def print_list(folders: Sequence[Path] | None, *, as_json: bool) -> int:
    """One line a file."""
    found = list(entries(folders or default_folders()))
    if as_json:
        print(msgspec.json.format(msgspec.json.encode([_line(entry) for entry in found]), indent=2).decode())
        return 0
    table = Table()
    for name in ("file", "kind", "model", "a2a", "TP/EP/DP", "device", "date", "verdict"):
        table.add_column(name, overflow="fold")
    for entry in found:
        line = _line(entry)
        table.add_row(*line.values())
    places = ", ".join(map(str, folders or default_folders()))
    console().print(table if found else f"no evidence in {places}")
    return 0


def print_one(name: str, folders: Sequence[Path] | None, *, as_json: bool) -> int:
    """One file in full, or for people."""
    path = _find(name, folders)
    evidence = read_evidence(path)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(evidence), indent=2).decode())
        return 0
    screen = console()
    screen.print(f"{path}\n{evidence.kind} of {evidence.created} by interlock {evidence.interlock}")
    screen.print(f"device: {evidence.device.name} ({evidence.device.key})")
    screen.print("packages: " + ", ".join(f"{k} {v}" for k, v in evidence.packages.items()), highlight=False)
    for arm in evidence.arms:
        screen.print(f"{arm.name}: {arm.url or arm.options or '(defaults)'}", highlight=False)
    screen.print(_numbers(evidence))
    for note in evidence.notes:
        screen.print(note, highlight=False)
    screen.print(f"verdict: {evidence.verdict}")
    wrong = problems(evidence)
    for problem in wrong:
        screen.print(f"does not count: {problem}", style="red", highlight=False)
    return 1 if wrong else 0


def print_check(files: Sequence[Path] | None, folders: Sequence[Path] | None) -> int:
    """Every problem of every file; 1 when there is any."""
    found = [_entry(path) for path in files] if files else list(entries(folders or default_folders()))
    bad = 0
    for entry in found:
        wrong = [entry.problem] if entry.evidence is None else problems(entry.evidence)
        bad += bool(wrong)
        print(f"{entry.path.name}: {'ok' if not wrong else 'does not count'}")
        for problem in wrong:
            print(f"  {problem}")
    print(f"{len(found)} files, {bad} of them do not count")
    return 1 if bad else 0


def _entry(path: Path) -> Entry:
    try:
        return Entry(path, read_evidence(path))
    except InterlockError as error:
        return Entry(path, None, str(error))


def _line(entry: Entry) -> dict[str, str]:
    evidence = entry.evidence
    if evidence is None:
        blank = dict.fromkeys(("kind", "model", "a2a", "sizes", "device", "date"), "")
        return {"file": entry.path.name, **blank, "verdict": f"unreadable: {entry.problem}"}
    has_plan = bool(evidence.arms) and evidence.arms[-1].plan is not None
    about = Combination.of_evidence(evidence) if has_plan else None
    wrong = problems(evidence)
    return {
        "file": entry.path.name,
        "kind": evidence.kind,
        "model": f"{evidence.model.name} ({evidence.model.family}, {evidence.model.weight_format})",
        "a2a": about.a2a if about else "",
        "sizes": "/".join(map(str, about.sizes())) if about else "",
        "device": evidence.device.name,
        "date": evidence.created[:10],
        "verdict": _verdict(evidence) if not wrong else f"does not count: {wrong[0]}",
    }


def _verdict(evidence: Evidence) -> str:
    return f"{evidence.verdict} (rehearsal)" if said_rehearsals(evidence) else evidence.verdict


def _numbers(evidence: Evidence) -> Table:
    table = Table()
    if evidence.prompts:
        for name in ("#", "tokens", "outcome", "largest", "cause", "details"):
            table.add_column(name, overflow="fold")
        for prompt in evidence.prompts:
            table.add_row(
                str(prompt.index + 1),
                str(prompt.tokens),
                prompt.outcome,
                f"{prompt.largest:.1e}" if prompt.largest else "0",
                prompt.cause,
                prompt.details,
            )
        return table
    for name in ("measurement", "arm", "value", "unit", "conditions"):
        table.add_column(name, overflow="fold")
    for number in evidence.measurements:
        conditions = ", ".join(f"{key} {value}" for key, value in number.conditions.items())
        table.add_row(number.name, number.arm, f"{number.value:.6g}", number.unit, conditions)
    return table


def _find(name: str, folders: Sequence[Path] | None) -> Path:
    if Path(name).is_file():
        return Path(name)
    paths = [entry.path for entry in entries(folders or default_folders())]
    exact = [path for path in paths if name in (path.name, path.stem)]
    matching = exact or [path for path in paths if path.name.startswith(name)]
    if len(matching) == 1:
        return matching[0]
    if matching:
        raise InterlockError(f"{name} is the beginning of {', '.join(path.name for path in matching)}")
    raise InterlockError(f"no evidence file {name}; interlock evidence list shows those that exist")
