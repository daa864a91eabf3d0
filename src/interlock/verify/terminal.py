"""The report as a table for the terminal."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table
from rich.text import Text

from interlock.evidence.schema import Arm
from interlock.verify.report import Report, summary

STYLES = {"bit-identical": "green", "within rounding": "yellow", "different": "red"}


def render(report: Report) -> Group:
    """Table, causes and verdict."""
    evidence = report.evidence
    table = Table(title=f"verify {evidence.model.name} ({evidence.model.family}) on {evidence.device.name}")
    for name, justify in (("#", "right"), ("tokens", "right"), ("edge", "left"), ("outcome", "left")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for name in ("largest", "at", "mean KL"):
        table.add_column(name, justify="right")
    table.add_column("cause")
    for prompt in report.prompts:
        outcome = prompt.outcome
        table.add_row(
            str(outcome.index + 1),
            str(outcome.tokens),
            prompt.label,
            Text(outcome.outcome, STYLES[outcome.outcome]),
            f"{outcome.largest:.1e}" if outcome.largest else "0",
            "" if outcome.position is None else str(outcome.position),
            f"{prompt.mean_kl:.1e}" if outcome.largest else "0",
            Text(outcome.cause, "red" if not outcome.explained else ""),
        )
    arms = [Text(f"{arm.name}: {_arm(arm)}") for arm in evidence.arms]
    verdict = Text(summary(report), "bold red" if evidence.verdict == "unexplained" else "bold green")
    notes = [Text(note, "dim") for note in evidence.notes]
    return Group(*arms, table, *_details(report), *notes, verdict)


def _details(report: Report) -> list[Text]:
    """The worst prompt of each cause in full, and how many are like it; every unexplained one."""
    lines = []
    outcomes = [prompt.outcome for prompt in report.prompts if prompt.outcome.details]
    for cause in dict.fromkeys(outcome.cause for outcome in outcomes):
        members = sorted((o for o in outcomes if o.cause == cause), key=lambda o: -o.largest)
        shown = members if cause == "unexplained" else members[:1]
        lines += [Text(f"#{outcome.index + 1}: {outcome.details}") for outcome in shown]
        if len(members) > len(shown):
            lines.append(Text(f"    and {len(members) - len(shown)} more: {cause}"))
    return lines


def _arm(arm: Arm) -> str:
    return arm.url or arm.options or "(defaults)"
