"""The plan as people read it."""

from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console

from interlock.options import Options
from interlock.plan.explain import GROUPS, capacities, explain, memory_rows, summary
from interlock.plan.launch_plan import LaunchPlan
from interlock.plan.resolve import resolve
from tests.plan.machines import machine, mimo_card, tiny_card

PLAN = resolve(
    Options.of(model="m", tp_size=4, attn_dp_size=2, moe_a2a_backend="collective"), tiny_card(), machine()
)


def shown(plan: LaunchPlan) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(explain(plan))
    return console.export_text()


def test_every_item_is_shown_with_its_reason() -> None:
    listed = {item for items in GROUPS.values() for item in items}
    assert listed == set(LaunchPlan.__struct_fields__) - {"card", "memory", "provenance"}
    text = shown(PLAN)
    for item in listed:
        assert f"  {item} " in text
        assert PLAN.provenance[item].reason.split("[")[0][:60] in text


@pytest.mark.parametrize(
    ("backend", "when"),
    [("shared_memory", "held from the start"), ("collective", "at most, while a step runs")],
)
def test_bytes_of_an_exchange_say_when_they_are_held(backend: str, when: str) -> None:
    plan = resolve(Options.of(model="m", tp_size=2, moe_a2a_backend=backend), tiny_card(), machine())
    assert plan.provenance["moe_buffer_bytes"].reason.endswith(when)


def test_only_the_groups_that_are_asked_for_are_shown() -> None:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(explain(PLAN, ("Ranks",)))
    text = console.export_text()
    assert "  tp_size " in text
    assert "  moe_a2a_backend " not in text


def test_memory_table_adds_up() -> None:
    rows = dict(memory_rows(PLAN))
    parts = ("weights", "KV, full attention", "KV, sliding window", "a2a buffers", "activations")
    assert sum(rows[part] for part in parts) == rows["together"] <= rows["available"]


def test_capacities_are_in_tokens() -> None:
    rows = {name: value for name, value, _ in capacities(PLAN)}
    assert rows["T prefill"] == f"{PLAN.moe_prefill_capacity} tokens"
    assert rows["full KV"] == f"{PLAN.full_pages * PLAN.page_size} tokens"
    assert rows["window KV"] == f"{PLAN.window_pages * PLAN.page_size} tokens"


def test_summary_is_short_and_names_what_matters() -> None:
    text = summary(PLAN)
    assert len(text.splitlines()) <= 6
    for word in ("tp 4", "ep 4", "collective", "T ", "longest request"):
        assert word in text
    facts = machine(memory_total=2 << 40, memory_available=2 << 40)
    assert "308.8B" in summary(resolve(Options.of(model="m"), mimo_card(), facts))


def test_values_with_markup_are_shown_as_they_are() -> None:
    odd = msgspec.structs.replace(PLAN, model_path="/data/[bold]x[/bold]")
    assert "/data/[bold]x[/bold]" in shown(odd)


def test_plan_travels_as_json() -> None:
    assert msgspec.json.decode(msgspec.json.encode(PLAN), type=LaunchPlan) == PLAN
