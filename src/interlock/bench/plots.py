"""Plots of a run from its evidence, as PNG and SVG. Needs matplotlib, the extra ``interlock[bench]``."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from interlock.errors import Refusal
from interlock.evidence.record import said_rehearsals
from interlock.evidence.schema import Evidence, Measurement

FORMATS: Final = ("png", "svg")
AXES: Final = {
    "decode_ms_per_token": ("batch", "global batch", "ms per token"),
    "prefill_input_tokens_computed_per_second": (
        "chunk_delivered",
        "delivered chunk, tokens",
        "input tokens/s",
    ),
    "moe_experts": ("tokens", "tokens", "us"),
    "a2a": ("tokens", "tokens of a rank", "us"),
}


PART_LINES: Final = {"both": "-", "dispatch": "--", "combine": ":", "graph": "-."}


def require_matplotlib() -> None:
    """Refuse before anything is measured.

    Raises:
        Refusal: matplotlib is not installed; names the extra.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise Refusal(
            option="--plot",
            given="",
            rule="plots need matplotlib, which is not installed",
            alternatives=("pip install 'interlock[bench]'", "--no-plot"),
        )


def plot(evidence: Evidence, stem: Path) -> list[Path]:
    """Write ``stem``.png and ``stem``.svg; nothing when the run has nothing to draw."""
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.8), layout="constrained")
    axes = figure.add_subplot()
    drawn = _serve(evidence, axes) or _lines(evidence, axes)
    if not drawn:
        return []
    title = [f"{evidence.model.name} on {evidence.device.name}", *said_rehearsals(evidence)]
    axes.set_title("\n".join(title), fontsize=10)
    axes.grid(visible=True, alpha=0.3)
    paths = [stem.with_name(f"{stem.name}.{suffix}") for suffix in FORMATS]
    for path in paths:
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    return paths


def _lines(evidence: Evidence, axes: Any) -> bool:
    """One line for each arm (and layout), medians with the spread of the samples as bars."""
    for name, (key, x_label, y_label) in AXES.items():
        points = [m for m in evidence.measurements if m.name == name and m.conditions.get(key) is not None]
        if not points:
            continue
        for label in dict.fromkeys(map(_label, points)):
            line = sorted((m for m in points if _label(m) == label), key=lambda m: _x(m, key))
            low = [m.value - min(m.samples or (m.value,)) for m in line]
            high = [max(m.samples or (m.value,)) - m.value for m in line]
            x, y = [_x(m, key) for m in line], [m.value for m in line]
            style = _style(line[0], [m.arm for m in points])
            axes.errorbar(x, y, yerr=[low, high], marker="o", capsize=3, label=label, **style)
            roofline = [m.conditions.get("roofline_us") for m in line]
            if name == "moe_experts" and None not in roofline:
                axes.plot(x, roofline, linestyle=":", color="grey", linewidth=1)
        if len({_x(m, key) for m in points}) > 1:
            axes.set_xscale("log", base=2)
            ticks = sorted({_x(m, key) for m in points})
            axes.set_xticks(ticks, labels=[f"{tick:g}" for tick in ticks])
        if name in ("moe_experts", "a2a"):
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        if name == "a2a":
            axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))
        else:
            axes.legend(fontsize=8)
        return True
    return False


def _style(measurement: Measurement, arms: Sequence[str]) -> dict[str, str]:
    """Parts of one arm share its colour and differ by their lines."""
    part = measurement.conditions.get("part")
    if part is None:
        return {}
    index = list(dict.fromkeys(arms)).index(measurement.arm)
    return {"color": f"C{index % 10}", "linestyle": PART_LINES.get(str(part), "-")}


def _label(measurement: Measurement) -> str:
    if measurement.conditions.get("tool") == "prefill":
        return measurement.arm.partition("@")[0]
    part = measurement.conditions.get("part")
    return f"{measurement.arm} {part}" if part else measurement.arm


def _x(measurement: Measurement, key: str) -> float:
    value = measurement.conditions[key]
    assert isinstance(value, int | float)
    return float(value)


def _serve(evidence: Evidence, axes: Any) -> bool:
    """Percentiles of each latency as groups of bars."""
    points = [
        m for m in evidence.measurements if m.name.startswith("serve_") and "percentile" in m.conditions
    ]
    if not points:
        return False
    names: Sequence[str] = list(dict.fromkeys(m.name for m in points))
    shares = list(dict.fromkeys(str(m.conditions["percentile"]) for m in points))
    for index, share in enumerate(shares):
        values = {m.name: m.value for m in points if m.conditions["percentile"] == share}
        places = [place + index * 0.25 for place in range(len(names))]
        axes.bar(places, [values.get(name, 0.0) for name in names], width=0.22, label=share)
    labels = [name.removeprefix("serve_").removesuffix("_completed_only") for name in names]
    axes.set_xticks([place + 0.25 for place in range(len(names))], labels=labels)
    axes.set_yscale("log")
    axes.set_ylabel("ms, completed requests")
    axes.legend(fontsize=8)
    return True
