"""The launch plan for the page: every item as people write it, who set it, and what the ranks observed."""

from __future__ import annotations

from typing import Any

from interlock.plan.explain import GROUPS, capacities, item_text, memory_rows, observed_text
from interlock.plan.launch_plan import LaunchPlan
from interlock.plan.memory import size
from interlock.plan.receipts import RULES, Observed, Where, check


def plan_view(plan: LaunchPlan, receipts: Observed) -> dict[str, Any]:
    """The part ``view`` of what ``/plan`` answers."""
    mismatches = check(plan, receipts)
    wrong = {mismatch.item for mismatch in mismatches}
    shape = (
        f"tp {plan.tp_size}",
        f"ep {plan.ep_size}",
        f"a2a {plan.moe_a2a_backend}",
        plan.device,
        plan.dtype,
    )
    return {
        "plan": {"model": plan.served_model_name, "shape": " · ".join(shape)},
        "items": [
            _item(plan, receipts, group, item, wrong) for group, items in GROUPS.items() for item in items
        ],
        "memory": [{"name": name, "bytes": count, "text": size(count)} for name, count in memory_rows(plan)],
        "capacities": capacities(plan),
        "mismatches": len(mismatches),
    }


def _item(plan: LaunchPlan, receipts: Observed, group: str, item: str, wrong: set[str]) -> dict[str, str]:
    rule, given = RULES[item], plan.provenance.get(item)
    seen = rule.where is not Where.NOWHERE and rule.applies(plan)
    if rule.where is Where.NOWHERE:
        observed = rule.reason
    else:
        observed = _observed(item, receipts) if seen else "not in this launch"
    return {
        "group": group,
        "item": item,
        "value": item_text(plan, item),
        "source": given.source.value if given else "",
        "reason": given.reason if given else "",
        "observed": observed,
        "verdict": "differs" if item in wrong else "agrees" if seen else "unseen",
    }


def _observed(item: str, receipts: Observed) -> str:
    """As ``item_text`` writes planned values."""
    text = observed_text(item, receipts)
    if item == "moe_buffer_bytes" and text.isdigit():
        return size(int(text))
    return {"True": "on", "False": "off"}.get(text, text)
