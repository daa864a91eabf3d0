"""The report as one HTML page that needs nothing else: inline SVG and CSS, light and dark."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from interlock.evidence.schema import Arm
from interlock.verify.report import PromptReport, Report, summary

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 720, 120, 44, 8, 26
WIDEST_BAR = 18
MOST_NUMBERS = 12
SMALLEST = 1e-9

STYLE = """
:root { color-scheme: light dark; --fg: #18212b; --muted: #5a6775; --bg: #f4f6f8; --panel: #ffffff;
  --line: #dbe1e7; --good: #12735d; --mild: #9a6208; --bad: #b42318; --accent: #12735d; --second: #8250df; }
@media (prefers-color-scheme: dark) { :root { --fg: #dfe6ed; --muted: #93a1af; --bg: #0e1217;
  --panel: #151b22; --line: #27313b; --good: #46c09f; --mild: #e0a94a; --bad: #ff8579;
  --accent: #46c09f; --second: #bc8cff; } }
* { box-sizing: border-box; }
body { font: 14px/1.5 system-ui, sans-serif; color: var(--fg); background: var(--bg); max-width: 1000px;
  margin: 0 auto; padding: 1.5rem 1rem 3rem; font-variant-numeric: tabular-nums; }
h1 { font-size: 1.25rem; margin: 0 0 .8rem; } h2 { font-size: .95rem; margin: 1.6rem 0 .5rem; }
table, details, .verdict { background: var(--panel); border: 1px solid var(--line); border-radius: 10px; }
table { border-collapse: separate; border-spacing: 0; width: 100%; overflow: hidden; }
th, td { text-align: left; padding: .32rem .8rem; border-bottom: 1px solid var(--line); vertical-align: top;
  overflow-wrap: anywhere; }
th { font-size: .82rem; font-weight: 600; color: var(--muted); white-space: nowrap; }
tr:last-child > * { border-bottom: 0; }
details { margin: .6rem 0; padding: .5rem .9rem; } details details { border: 0; margin: 0; padding: .2rem 0; }
details[open] > summary { margin-bottom: .4rem; } summary { cursor: pointer; }
p { margin: .5rem 0; } p.note { color: var(--muted); font-size: .85rem; margin-top: .9rem; }
.verdict { padding: .7rem 1rem; border-left: 4px solid; font-weight: 600; margin: 0 0 1rem; }
.good { color: var(--good); } .mild { color: var(--mild); } .bad { color: var(--bad); }
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--muted); font: 11px system-ui, sans-serif; }
svg .axis { stroke: var(--line); } svg .limit { stroke: var(--mild); stroke-dasharray: 4 3; }
svg .mark { stroke: var(--bad); stroke-dasharray: 2 3; }
.a { fill: var(--accent); opacity: .85; } .b { fill: var(--second); opacity: .85; }
@media (max-width: 560px) { th, td { padding: .3rem .4rem; } }
"""

CLASSES = {"bit-identical": "good", "within rounding": "mild", "different": "bad"}


def page(report: Report) -> str:
    """The whole page."""
    evidence = report.evidence
    title = f"verify {evidence.model.name}: {evidence.verdict}"
    kind = "bad" if evidence.verdict == "unexplained" else "good"
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="verdict {kind}">{escape(summary(report))}</p>',
        _facts(report),
        "<h2>Prompts</h2>",
        _table(report.prompts),
        *_prompts(report),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>{''.join(body)}</body></html>\n"
    )


def _facts(report: Report) -> str:
    evidence = report.evidence
    rows = [(arm.name, _arm(arm)) for arm in evidence.arms]
    rows += [
        ("model", f"{evidence.model.name}, {evidence.model.family}, {evidence.model.weight_format}"),
        ("device", f"{evidence.device.name} ({evidence.device.key})"),
        ("made", f"{evidence.created} by interlock {evidence.interlock}"),
        ("packages", ", ".join(f"{name} {version}" for name, version in evidence.packages.items())),
        ("rounding", f"log-probabilities within {report.tolerance:g}"),
    ]
    rows += [("note", note) for note in evidence.notes if not note.startswith("log-probabilities within")]
    cells = "".join(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in rows)
    return f"<table>{cells}</table>"


def _arm(arm: Arm) -> str:
    return arm.url or arm.options or "(defaults)"


def _table(prompts: Sequence[PromptReport]) -> str:
    head = "".join(
        f"<th>{name}</th>" for name in ("#", "tokens", "edge", "outcome", "largest", "at", "cause")
    )
    rows = []
    for prompt in prompts:
        outcome = prompt.outcome
        cells = (
            str(outcome.index + 1),
            str(outcome.tokens),
            escape(prompt.label),
            f'<span class="{CLASSES[outcome.outcome]}">{outcome.outcome}</span>',
            f"{outcome.largest:.2e}" if outcome.largest else "0",
            "" if outcome.position is None else str(outcome.position),
            escape(outcome.cause),
        )
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    return f"<table><tr>{head}</tr>{''.join(rows)}</table>"


def _prompts(report: Report) -> Iterator[str]:
    """The prompts that differ, open; then those that do not, together under one line."""
    same = [prompt for prompt in report.prompts if prompt.outcome.outcome == "bit-identical"]
    for prompt in report.prompts:
        if prompt not in same:
            yield _prompt(prompt, report.tolerance)
    if same:
        inner = "".join(_prompt(prompt, report.tolerance) for prompt in same)
        title = f'<span class="good">{len(same)} bit-identical</span>'
        yield f"<details><summary>{title}</summary>{inner}</details>"


def _prompt(prompt: PromptReport, tolerance: float) -> str:
    outcome = prompt.outcome
    is_open = " open" if outcome.outcome != "bit-identical" else ""
    parts = [
        f"<details{is_open}><summary>Prompt {outcome.index + 1}, {_tokens(outcome.tokens)}, "
        f'<span class="{CLASSES[outcome.outcome]}">{outcome.outcome}</span></summary>'
    ]
    if outcome.details:
        parts.append(f"<p>{escape(outcome.cause)}: {escape(outcome.details)}</p>")
    marks = sorted({end for ends in prompt.chunk_ends for end in ends[:-1]})
    parts.append(
        '<p class="note">Difference of log-probabilities by position (dashed: a prefill step ends)</p>'
    )
    parts.append(_by_position(prompt, tolerance, marks))
    if prompt.layers:
        parts.append(
            '<p class="note">Relative difference by layer: '
            '<span style="color:var(--accent)">attention</span>, '
            '<span style="color:var(--second)">MLP or experts</span>; below, the share of tokens with the '
            "same experts</p>"
        )
        parts.append(_by_layer(prompt))
    for flip in prompt.flips[:8]:
        parts.append(
            f"<p>Layer {flip.layer}, position {flip.position}: experts {list(flip.left)} against "
            f"{list(flip.joined)}, {flip.gap:.1e} apart</p>"
        )
    return "".join(parts) + "</details>"


def _by_position(prompt: PromptReport, tolerance: float, marks: Sequence[int]) -> str:
    if not prompt.positions:
        return "<p>no position was scored by both arms</p>"
    axis = _Axis([*prompt.differences, tolerance])
    span = max(prompt.positions) + 1
    step = (WIDTH - LEFT) / span
    parts = list(axis.lines())
    if tolerance:
        parts.append(_line(LEFT, axis.y(tolerance), WIDTH, axis.y(tolerance), "limit"))
    parts += [_line(LEFT + mark * step, 0, LEFT + mark * step, HEIGHT, "mark") for mark in marks]
    for position, value in zip(prompt.positions, prompt.differences, strict=True):
        width = min(max(step - 0.4, 0.6), WIDEST_BAR)
        parts.append(axis.bar(LEFT + position * step, width, value, "a"))
    parts += _numbers(span, step)
    return _svg(parts)


def _by_layer(prompt: PromptReport) -> str:
    axis = _Axis([value for row in prompt.layers for value in (row.attention, row.mlp)])
    step = (WIDTH - LEFT) / len(prompt.layers)
    parts = list(axis.lines())
    for index, row in enumerate(prompt.layers):
        left = LEFT + index * step
        width = min(step * 0.38, WIDEST_BAR)
        parts.append(axis.bar(left + step * 0.1, width, row.attention, "a"))
        parts.append(axis.bar(left + step * 0.1 + width + 1, width, row.mlp, "b"))
        if row.same_routes is not None and len(prompt.layers) <= 24:
            parts.append(f'<text x="{left:.1f}" y="{HEIGHT + 22}">{row.same_routes:.0%}</text>')
    parts += _numbers(len(prompt.layers), step, y=HEIGHT + 11)
    return _svg(parts)


class _Axis:
    """A logarithmic axis from ``SMALLEST`` to a decade above the largest value."""

    def __init__(self, values: Sequence[float]) -> None:
        finite = [value for value in values if math.isfinite(value)]
        self._top = max(math.ceil(math.log10(max([*finite, SMALLEST * 10]))), -7)
        self._bottom = round(math.log10(SMALLEST))

    def y(self, value: float) -> float:
        if value <= SMALLEST:
            return HEIGHT
        share = (math.log10(value) - self._bottom) / (self._top - self._bottom)
        return HEIGHT * (1 - min(share, 1.0))

    def bar(self, x: float, width: float, value: float, kind: str) -> str:
        top = self.y(value) if math.isfinite(value) else 0.0
        if top >= HEIGHT:
            return ""
        return (
            f'<rect class="{kind}" x="{x:.1f}" y="{top:.1f}" width="{width:.1f}" height="{HEIGHT - top:.1f}">'
            f"<title>{value:.3g}</title></rect>"
        )

    def lines(self) -> Iterator[str]:
        for exponent in range(self._bottom + 1, self._top + 1, 2):
            y = self.y(10.0**exponent)
            yield _line(LEFT, y, WIDTH, y, "axis")
            yield f'<text x="4" y="{y + 4:.1f}">1e{exponent}</text>'
        yield _line(LEFT, HEIGHT, WIDTH, HEIGHT, "axis")


def _numbers(count: int, step: float, y: float = HEIGHT + 14) -> list[str]:
    steps = (step * 10**power for power in range(7) for step in (1, 2, 5))
    every = next(step for step in steps if count / step <= MOST_NUMBERS)
    return [f'<text x="{LEFT + index * step:.1f}" y="{y}">{index}</text>' for index in range(0, count, every)]


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _svg(parts: Sequence[str]) -> str:
    box = f"0 {-TOP} {WIDTH} {TOP + HEIGHT + BOTTOM}"
    return f'<svg viewBox="{box}" role="img">{"".join(parts)}</svg>'


def _tokens(count: int) -> str:
    return f"{count} token" + ("" if count == 1 else "s")
