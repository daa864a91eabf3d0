"""Results as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from interlock.bench.statistics import Figure

if TYPE_CHECKING:
    from interlock.bench.a2a import A2APoint
    from interlock.bench.compare import Comparison
    from interlock.bench.decode import DecodeResult, Point
    from interlock.bench.layer import LayerPoint, Skipped
    from interlock.bench.limits import Limits
    from interlock.bench.prefill import PrefillResult
    from interlock.bench.routing import RoutingSpread
    from interlock.bench.serving.run import ServeResult

SHOWN = ("batch", "chunk_delivered", "tokens", "percentile", "layout", "part")


def spread(figure: Figure, scale: float = 1.0, digits: int = 3) -> str:
    """``12.3 (12.1 to 12.9)``: the median and the least and most of the rounds."""
    if len(figure.samples) == 1:
        return f"{figure.median * scale:.{digits}g}"
    low, high = figure.least * scale, figure.most * scale
    return f"{figure.median * scale:.{digits}g} ({low:.{digits}g} to {high:.{digits}g})"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    return table


def decode_table(result: DecodeResult, spreads: Mapping[str, RoutingSpread | None]) -> RenderableType:
    """ms per token by batch and arm, growth, crossovers, what was discarded."""
    arms = list(result.points)
    table = _table("Decode: ms per token, median (least to most of the rounds)", "batch", *arms)
    for batch in result.spec.batches:
        table.add_row(str(batch), *(_decode_cell(result.points[arm][batch]) for arm in arms))
    table.add_section()
    table.add_row("growth", *(_factor(result.growth(arm)) for arm in arms))
    table.add_row("discarded", *(str(sum(p.discarded for p in result.points[a].values())) for a in arms))
    agreement = [f"{result.same_tokens(arm):.0%}" for arm in arms]
    table.add_row("same tokens", *agreement)
    busiest = [spreads.get(arm) for arm in arms]
    if any(busiest):
        table.add_row("routing entropy", *(f"{each.entropy:.3f}" if each else "-" for each in busiest))
    lines = []
    for cross in result.crossovers():
        certainty = "" if cross.clear else " (but the spreads meet)"
        lines.append(
            f"{cross.faster} is faster than {cross.slower} from batch {cross.batch} on; the lines meet near "
            f"{cross.interpolated:.3g}{certainty}"
        )
    lines.append(
        f"context {result.spec.context} tokens at the start, {_contexts(result.points.values())} in the "
        f"steps that counted; {result.spec.rounds} rounds, {result.spec.steps} steps each; discarded: "
        "steps at another batch, and before the batch settled"
    )
    return Group(table, *map(Text, lines))


def _contexts(points: Iterable[Mapping[int, Point]]) -> str:
    spans = [span for by_batch in points for point in by_batch.values() for span in point.contexts]
    if not spans:
        return "none"
    return f"{min(a for a, _ in spans):.0f} to {max(b for _, b in spans):.0f}"


def _decode_cell(point: Point) -> str:
    if point.figure is None:
        return "never ran"
    return spread(point.figure, digits=4)


def _factor(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def prefill_table(result: PrefillResult) -> RenderableType:
    """Input tokens a second by arm and chunk, with what was delivered."""
    table = _table(
        "Prefill: input tokens computed a second, median (spread)",
        "arm", "asked chunk", "delivered", "tokens/s", "whole run", "against first", "steps", "discarded",
        "cached",
    )  # fmt: skip
    notes = []
    for arm, points in result.points.items():
        for chunk, point in points.items():
            ratio = result.ratio(arm, chunk)
            speed = spread(point.figure, digits=5) if point.figure else "-"
            whole = f"{sorted(point.whole)[len(point.whole) // 2]:.5g}" if point.whole else "-"
            table.add_row(
                arm, str(chunk), str(point.delivered), speed, whole,
                f"{ratio:.2f}x" if isinstance(ratio, float) else ratio,
                str(point.steps), str(point.discarded), str(point.cached_tokens),
            )  # fmt: skip
            if point.reason:
                notes.append(f"{arm}, chunk {chunk}: {point.reason}")
    return Group(table, *map(Text, notes))


def serve_table(result: ServeResult) -> RenderableType:
    """Latencies, rates and outcomes of one run."""
    figures = result.figures
    times = _table("Latency of completed requests, ms", "", "p50", "p90", "p99")
    names = {
        "ttft": "time to first token",
        "tpot": "time per token",
        "itl": "between chunks",
        "latency": "whole",
    }
    for name, title in names.items():
        shares = figures.times[name].values()
        times.add_row(title, *("-" if v is None else f"{v * 1e3:.4g}" for v in shares))
    rates = _table(f"Rates over {figures.wall:.3g} s", "what", "a second")
    for name, value in figures.rates.items():
        rates.add_row(
            name.removesuffix("_per_second").replace("_", " "), "-" if value is None else f"{value:.4g}"
        )
    late = "-" if figures.lateness_most is None else f"{figures.lateness_most * 1e3:.3g} ms"
    lines = [
        f"{figures.offered} requests: {figures.completed} completed, {figures.failed} failed, "
        f"{figures.incomplete} incomplete",
        f"output length received {_mean(figures.mean_output_tokens)} of {result.spec.output_tokens} asked; "
        f"prompts {_mean(figures.mean_prompt_tokens)} of {result.spec.input_tokens} asked; "
        f"prefix cache hits {'unknown' if figures.hit_rate is None else f'{figures.hit_rate:.1%}'}",
        f"sent at most {late} late; latencies count from when a request was due",
    ]
    if not result.spec.arrivals.is_open:
        lines.append("closed loop: a slow server is asked less often, so these latencies flatter it")
    lines += [f"warning: {text}" for text in result.warnings]
    lines += [f"error: {text}" for text in figures.errors[:5]]
    return Group(times, rates, *map(Text, lines))


def _mean(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def layer_table(points: Sequence[LayerPoint | Skipped], limits: Limits) -> RenderableType:
    """Time of the experts beside the roofline."""
    table = _table(
        "One layer's experts", "runner", "layout", "tokens", "experts touched", "us, median (spread)",
        "weights GB/s", "GFLOP/s", "roofline us", "of roofline",
    )  # fmt: skip
    notes = []
    from interlock.bench.layer import Skipped

    for point in points:
        if isinstance(point, Skipped):
            notes.append(
                f"{point.runner}, {point.layout}, {point.tokens} tokens: not measured, {point.reason}"
            )
            continue
        seconds = point.figure.median
        table.add_row(
            point.runner, point.layout, str(point.tokens), str(point.work.touched), spread(point.figure, 1e6),
            f"{point.work.weight_bytes / seconds / 1e9:.4g}", f"{point.work.flops / seconds / 1e9:.4g}",
            f"{point.limit * 1e6:.4g}", f"{point.share_of_limit:.0%}",
        )  # fmt: skip
    notes.append(f"bandwidth {limits.bandwidth / 1e9:.4g} GB/s ({limits.read_by})")
    notes.append(f"peak {limits.flops / 1e9:.5g} GFLOP/s ({limits.computed_by})")
    return Group(table, *map(Text, notes))


def a2a_table(points: Sequence[A2APoint], ranks: int) -> RenderableType:
    """Time and bandwidths of each part of each backend, by tokens."""
    copies = points[0].copies
    peer = "" if copies.peer is None else f", from one GPU to another {copies.peer / 1e9:.4g}"
    table = _table(
        f"Dispatch and combine over {ranks} ranks; a copy moves {copies.device / 1e9:.4g} GB/s{peer}",
        "tokens", "part", "backend", "layout", "us, slowest rank", "logical GB/s", "share of copy",
        "link GB/s", "share of link",
    )  # fmt: skip
    for point in sorted(points, key=lambda p: (p.tokens, p.part)):
        share = point.share_of_link
        table.add_row(
            str(point.tokens), point.part, point.backend, point.layout, spread(point.figure, 1e6, 4),
            f"{point.logical_bandwidth / 1e9:.4g}", f"{point.share_of_copy:.1%}",
            f"{point.link_bandwidth / 1e9:.4g}", "-" if share is None else f"{share:.1%}",
        )  # fmt: skip
    return table


def compare_table(comparison: Comparison, names: tuple[str, str]) -> RenderableType:
    """Pairs with their ratio; above it what was allowed to differ."""
    header = [Text(f"differs, as allowed: {each}") for each in comparison.allowed]
    table = _table("Second over first", "measurement", names[0], names[1], "unit", "ratio", "clear of noise")
    for pair in comparison.pairs:
        conditions = pair.first.conditions
        where = [f"{key} {conditions[key]}" for key in SHOWN if conditions.get(key) is not None]
        clear = {True: "yes", False: "no", None: "-"}[pair.is_clear]
        table.add_row(
            f"{pair.first.name} {', '.join(where)}", f"{pair.first.value:.4g}", f"{pair.second.value:.4g}",
            pair.first.unit, f"{pair.ratio:.3f}", clear,
        )  # fmt: skip
    return Group(*header, table, *(Text(text) for text in comparison.unpaired[:10]))
