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
    lines = [Text(f"{arm.name}: {_arm(arm)}") for arm in evidence.arms]
    lines += [
        Text(f"#{prompt.outcome.index + 1}: {prompt.outcome.details}")
        for prompt in report.prompts
        if prompt.outcome.details
    ]
    verdict = Text(summary(report), "bold red" if evidence.verdict == "unexplained" else "bold green")
    return Group(*lines[: len(evidence.arms)], table, *lines[len(evidence.arms) :], verdict)


def _arm(arm: Arm) -> str:
    return arm.url or arm.options or "(defaults)"
