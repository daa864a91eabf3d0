"""Model families for tests. Each builds something else than the plan says and may not be served; but for
``SlowToLoad``, which is merely slow on one rank and must be waited for."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec

from interlock.models.mimo_v2.card import read_card as read_mimo_card
from interlock.models.registry import ModelFamily
from interlock.plan.card import ModelCard

MUTANTS = ("SmallerCapacity", "SwappedRunner", "NoExperts", "SkipsALayer", "SlowToLoad")


def read_card(name: str, config: Mapping[str, Any]) -> ModelCard:
    return msgspec.structs.replace(read_mimo_card(config), family=name)


def __getattr__(name: str) -> Any:
    """``read_NAME`` and ``NAME``: the card reader and the family of a mutant."""
    mutant = name.removeprefix("read_")
    if mutant not in MUTANTS:
        raise AttributeError(name)
    if name != mutant:
        return partial(read_card, mutant)
    return ModelFamily(
        name=mutant,
        architectures=(f"{mutant}ForCausalLM",),
        card=f"interlock_mutants:read_{mutant}",
        model=f"interlock_mutants.model:{mutant}",
    )
