"""A model family with a fault that users of other engines met: its MoE layers forget the dispatcher.

It loads, answers correctly, and uses no a2a backend whatever the options say. The server must not start.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from interlock.models.mimo_v2.card import read_card as read_mimo_card
from interlock.models.registry import ModelFamily
from interlock.plan.card import ModelCard


def read_card(config: Mapping[str, Any]) -> ModelCard:
    return msgspec.structs.replace(read_mimo_card(config), family="forgetful")


FAMILY = ModelFamily(
    name="forgetful",
    architectures=("ForgetfulForCausalLM",),
    card="interlock_forgetful:read_card",
    model="interlock_forgetful.model:Forgetful",
)
