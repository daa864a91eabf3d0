"""How the tokens of a run were spread over the experts: traced after the timed rounds, on the same tokens.

Time of an MoE step depends on which experts are touched, so a figure without this says little.
"""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from interlock.bench.session import Load, Session
from interlock.engine.messages import Inspection

MAX_SAMPLES = 4


@dataclass(frozen=True, slots=True)
class RoutingSpread:
    """Means over MoE layers.

    Attributes:
        entropy: of the load over experts, as a share of the largest possible (1: all experts alike).
        busiest: load of the busiest expert over the mean load.
        tokens: positions that were traced.
        distinct: batch -> experts of a layer that a step of that many tokens touches, expected.
    """

    entropy: float
    busiest: float
    tokens: int
    distinct: dict[int, float]


def spread_of(
    counts: Sequence[Counter[int]], num_experts: int, tokens: int, batches: Sequence[int]
) -> RoutingSpread:
    """The spread from how often each expert of each layer was chosen by ``tokens`` tokens."""
    entropies, busiest = [], []
    distinct = dict.fromkeys(batches, 0.0)
    for layer in counts:
        total = sum(layer.values())
        shares = [count / total for count in layer.values()]
        entropies.append(-sum(share * math.log(share) for share in shares) / math.log(max(2, num_experts)))
        busiest.append(max(layer.values()) * num_experts / total)
        for batch in batches:
            chosen = sum(1 - (1 - count / tokens) ** batch for count in layer.values())
            distinct[batch] += chosen / len(counts)
    layers = len(counts)
    return RoutingSpread(sum(entropies) / layers, sum(busiest) / layers, tokens, distinct)


def trace_spread(
    session: Session,
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[Sequence[int]],
    batches: Sequence[int],
) -> RoutingSpread | None:
    """Run some of the texts once more as prompts, with a trace of the routes of their generated tokens.

    None for a model without experts, or when nothing was generated.
    """
    experts = session.plan.card.experts
    if experts is None:
        return None
    longest = session.plan.max_model_len - 1
    texts = [
        (len(prompt), (*prompt, *output)[:longest])
        for prompt, output in zip(prompts, outputs, strict=False)
        if output
    ]
    layers: dict[int, dict[tuple[int, int], list[int]]] = {}
    for index, (start, text) in enumerate(texts[:MAX_SAMPLES]):
        with tempfile.TemporaryDirectory(prefix="interlock-routes-") as folder:
            inspection = Inspection(trace=folder, first=start)
            session.run(Load(prompts=(text,), max_tokens=1, inspection=inspection))
            for path in sorted(Path(folder).glob("*.safetensors")):
                _read(path, index, layers)
    if not layers:
        return None
    counts = [Counter(e for ids in rows.values() for e in ids if e >= 0) for rows in layers.values()]
    tokens = len(next(iter(layers.values())))
    return spread_of(counts, experts.num_experts, tokens, batches)


def _read(path: Path, text: int, layers: dict[int, dict[tuple[int, int], list[int]]]) -> None:
    """Ids of every traced row by layer and (text, position): ranks that hold the same row say the same."""
    from safetensors import safe_open

    with safe_open(str(path), framework="np") as file:
        for name in file.keys():  # noqa: SIM118
            kind, _, layer = name.partition(".")
            if kind == "ids":
                positions = file.get_tensor(f"routed.{layer}").tolist()
                rows = layers.setdefault(int(layer), {})
                for position, ids in zip(positions, file.get_tensor(name).tolist(), strict=True):
                    rows[(text, position)] = ids
