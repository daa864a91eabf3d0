"""The attention backend, decided from declarations, the model's heads and the cache.

The only knowledge of a backend is what it declares; no name appears in this file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from interlock.errors import Refusal
from interlock.options import Options
from interlock.plan.card import AttentionCard, ModelCard
from interlock.plan.decided import Decided, asked_text, rule
from interlock.plan.join import Situation, capability_problem, package_problem

if TYPE_CHECKING:
    from interlock.nn.attention_backends.base import AttentionBackend

OPTION = "--attention-backend"


@dataclass(frozen=True, slots=True)
class CacheFormat:
    """How keys and values are cached: their dtype, and tokens of a page."""

    kv_dtype: str
    page_size: int


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a backend cannot be used, and flags that might help."""

    text: str
    remedies: tuple[str, ...] = ()


def decide_attention(
    options: Options,
    card: ModelCard,
    backends: Mapping[str, AttentionBackend],
    here: Situation,
    cache: CacheFormat,
) -> Decided[str]:
    """The backend that was asked for, or the portable one: no stored measurement shows a faster one."""
    asked = asked_text(options, "attention_backend")
    if asked is None:
        return _by_itself(card, backends, here, cache)
    problem = backend_problem(backends[asked.value], here, cache, card)
    if problem is not None:
        raise Refusal(
            option=OPTION,
            given=asked.value,
            rule=problem.text,
            alternatives=[f"{OPTION} auto", *problem.remedies],
        )
    return asked


def _by_itself(
    card: ModelCard, backends: Mapping[str, AttentionBackend], here: Situation, cache: CacheFormat
) -> Decided[str]:
    portable = next(backend for backend in backends.values() if backend.portable)
    others = "; ".join(
        f"{backend.name} {_why_not(backend, here, cache, card)}"
        for backend in backends.values()
        if backend is not portable
    )
    reason = "computes everywhere, and no stored measurement shows a faster one"
    return rule(portable.name, f"{reason} (passed over: {others})" if others else reason)


def _why_not(backend: AttentionBackend, here: Situation, cache: CacheFormat, card: ModelCard) -> str:
    problem = backend_problem(backend, here, cache, card)
    if problem is not None:
        return problem.text
    if backend.never_run:
        return f"was never run: it wants {backend.never_run}"
    return "was not measured"


def backend_problem(
    backend: AttentionBackend, here: Situation, cache: CacheFormat | None, card: ModelCard | None
) -> Problem | None:
    """Why ``backend`` cannot be used, or None. Without ``cache`` and ``card``: for any model."""
    if here.device not in backend.devices:
        return Problem(f"runs on {_list(backend.devices)}, not on {here.device}")
    text = capability_problem(backend, here)
    if text is not None:
        return Problem(text)
    if here.deterministic and not backend.row_invariant:
        return Problem("is not row-invariant, which --deterministic needs", ("--no-deterministic",))
    if here.dtype not in backend.dtypes:
        remedies = tuple(f"--dtype {dtype}" for dtype in sorted(backend.dtypes))
        return Problem(f"computes in {_list(backend.dtypes)}, not {here.dtype}", remedies)
    if cache is not None and (problem := _cache_problem(backend, cache)) is not None:
        return problem
    for attention in dict.fromkeys(layer.attention for layer in card.layers) if card is not None else ():
        for text in _layer_problems(backend, attention):
            return Problem(text)
    text = package_problem(backend.packages, here.facts, install=backend.install)
    return None if text is None else Problem(text)


def _cache_problem(backend: AttentionBackend, cache: CacheFormat) -> Problem | None:
    if backend.kv_dtypes and cache.kv_dtype not in backend.kv_dtypes:
        return Problem(
            f"reads keys and values of {_list(backend.kv_dtypes)}, and --kv-cache-dtype is {cache.kv_dtype}",
            ("--kv-cache-dtype auto",),
        )
    if cache.page_size % backend.page_multiple:
        return Problem(
            f"needs a page size that is a multiple of {backend.page_multiple}, not {cache.page_size}",
            (f"--page-size {backend.page_multiple}",),
        )
    return None


def _layer_problems(backend: AttentionBackend, attention: AttentionCard) -> Iterator[str]:
    widths = attention.head_dim, attention.v_head_dim
    if backend.head_widths and not any(each.hold(*widths) for each in backend.head_widths):
        known = "; ".join(map(str, backend.head_widths))
        yield f"computes heads of width {known}; this model has keys of {widths[0]} and values of {widths[1]}"
    if attention.window is not None and not backend.windows:
        yield "computes no sliding windows, which this model has"
    if attention.has_sink and not backend.sinks:
        yield "computes no attention sinks, which this model has"


def _list(names: frozenset[str]) -> str:
    return " or ".join(sorted(names))
