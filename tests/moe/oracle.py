"""Plain loops over tokens and lanes: what routing and a whole MoE layer mean, in numpy float64."""

from __future__ import annotations

import numpy as np

from interlock.plan.card import ExpertsCard


def make_card(num_experts: int = 8, top_k: int = 2, **overrides: object) -> ExpertsCard:
    fields: dict[str, object] = {
        "num_experts": num_experts,
        "top_k": top_k,
        "intermediate_size": 16,
        "scoring": "sigmoid",
        "normalise_top_k": True,
        "has_selection_bias": True,
    }
    return ExpertsCard(**(fields | overrides))


def route(logits: np.ndarray, bias: np.ndarray | None, card: ExpertsCard) -> tuple[np.ndarray, np.ndarray]:
    """ids [n, k] ascending with -1 last, weights [n, k]; scores in float32 as the contract has them."""
    ids = np.full((len(logits), card.top_k), -1, dtype=np.int64)
    weights = np.zeros((len(logits), card.top_k))
    for token, row in enumerate(logits.astype(np.float64)):
        if card.scoring == "sigmoid":
            scores = 1 / (1 + np.exp(-row))
        else:
            scores = np.exp(row - row.max())
            scores /= scores.sum()
        scores = scores.astype(np.float32)
        choice = scores + (0 if bias is None else bias.astype(np.float32))
        choice = np.where(np.isneginf(row), -np.inf, choice)
        allowed = _allowed(choice, card)
        order = sorted((e for e in allowed if choice[e] > -np.inf), key=lambda e: (-choice[e], e))
        chosen = sorted(order[: card.top_k])
        values = scores[chosen].astype(np.float64)
        if card.normalise_top_k:
            values = values / (values.sum() + 1e-20)
        ids[token, : len(chosen)] = chosen
        weights[token, : len(chosen)] = values * card.routed_scaling_factor
    return ids, weights


def _allowed(choice: np.ndarray, card: ExpertsCard) -> list[int]:
    size = card.num_experts // card.num_groups
    best = 2 if card.scoring == "sigmoid" else 1
    groups = [choice[g * size : (g + 1) * size] for g in range(card.num_groups)]
    rank = [np.sort(group)[::-1][:best].sum() for group in groups]
    kept = sorted(range(card.num_groups), key=lambda g: (-rank[g], g))[: card.top_k_groups]
    return [e for g in kept for e in range(g * size, (g + 1) * size)]


def moe(
    hidden: np.ndarray,
    ids: np.ndarray,
    weights: np.ndarray,
    gate: np.ndarray,
    up: np.ndarray,
    down: np.ndarray,
) -> np.ndarray:
    """hidden [n, h]; gate, up [E, i, h]; down [E, h, i] -> [n, h] in float64."""
    out = np.zeros(hidden.shape)
    for token, lane in np.argwhere(ids >= 0):
        expert, x = ids[token, lane], hidden[token].astype(np.float64)
        g = gate[expert] @ x
        out[token] += weights[token, lane] * (down[expert] @ (g / (1 + np.exp(-g)) * (up[expert] @ x)))
    return out
