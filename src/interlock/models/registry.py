"""Model families by name: light declarations, heavy code imported only when it is used.

Third parties register a ``ModelFamily`` through the entry point group ``interlock.models``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from interlock.plan.card import ModelCard
from interlock.plugins import load_symbol


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """One folder under ``models/``.

    Attributes:
        architectures: values of ``architectures[0]`` in config.json that this family serves.
        card: "module:function" turning a parsed config.json into a ModelCard; must not import torch.
        model: "module:Class" of the network.
    """

    name: str
    architectures: tuple[str, ...]
    card: str
    model: str

    def read_card(self, config: Mapping[str, Any]) -> ModelCard:
        read: Callable[[Mapping[str, Any]], ModelCard] = load_symbol(self.card)
        return read(config)


BUILT_IN = (
    ModelFamily(
        name="mimo_v2",
        architectures=("MiMoV2FlashForCausalLM", "MiMoV2ForCausalLM"),
        card="interlock.models.mimo_v2.card:read_card",
        model="interlock.models.mimo_v2.model:MiMoV2",
    ),
    ModelFamily(
        name="qwen3_moe",
        architectures=("Qwen3MoeForCausalLM",),
        card="interlock.models.qwen3_moe.card:read_card",
        model="interlock.models.qwen3_moe.model:Qwen3Moe",
    ),
)


@cache
def model_families() -> dict[str, ModelFamily]:
    """All families by name, third parties' included."""
    families = {family.name: family for family in BUILT_IN}
    for entry in entry_points(group="interlock.models"):
        family: ModelFamily = entry.load()
        families[family.name] = family
    return families
