"""The formulas that both references use, on dense tensors.

Legend: T tokens, nh query and kv key-value heads, hd query/key and vd value head size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., h] over the root of its mean square, times weight [h]."""
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def swiglu(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """x [T, h] -> [T, h]: down(silu(gate x) * up x), weights as checkpoints store them, [out, in]."""
    z = x @ gate.T
    return (z * torch.sigmoid(z) * (x @ up.T)) @ down.T


def rope(x: torch.Tensor, *, theta: float, rotary_dim: int) -> torch.Tensor:
    """x [T, heads, d] at positions 0..T-1: channels i, i + r/2 of the first r turn by pos * theta^(-2i/r)."""
    half = rotary_dim // 2
    frequency = theta ** (-torch.arange(0, rotary_dim, 2, dtype=x.dtype) / rotary_dim)
    angle = torch.arange(x.shape[0], dtype=x.dtype)[:, None] * frequency
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b, rest = x[..., :half], x[..., half:rotary_dim], x[..., rotary_dim:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    visible: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention, q [T, nh, hd], k [T, kv, hd], v [T, kv, vd] -> [T, nh * vd].

    ``visible``: keys a query sees including its own, None for all. ``sinks`` [nh]: one more logit a head that
    takes probability and has no value.
    """
    tokens, heads, width = q.shape
    k, v = (t.repeat_interleave(heads // t.shape[1], 1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * width**-0.5
    i, j = torch.arange(tokens)[:, None], torch.arange(tokens)[None]
    mask = j <= i
    if visible is not None:
        mask = mask & (i - j < visible)
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(heads, 1, 1).expand(heads, tokens, 1)], -1)
    probabilities = torch.softmax(scores, -1)[..., :tokens]
    return torch.einsum("hqk,khd->qhd", probabilities, v).reshape(tokens, -1)


def mixture(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    expert: Callable[[torch.Tensor, int], torch.Tensor],
) -> torch.Tensor:
    """sum over lanes of weights[t, lane] * expert(x[t], ids[t, lane]); expert by expert."""
    out = torch.zeros_like(x)
    for number in sorted({int(i) for i in ids.flatten()}):
        token, lane = (ids == number).nonzero(as_tuple=True)
        out[token] += weights[token, lane, None] * expert(x[token], number)
    return out
