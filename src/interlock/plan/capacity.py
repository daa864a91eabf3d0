"""Token limits of a step, and the capacity T that follows from them.

T of a phase is what one rank may dispatch in one step. The scheduler's limits hold for each attention
replica; its attention-TP ranks share the tokens of a step out before they dispatch, except in a layout in
which every rank holds all tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from interlock.errors import Refusal
from interlock.moe.terms import Layout, Phase
from interlock.options import Options
from interlock.plan.decided import Decided, asked_integer, integer, rule
from interlock.plan.moe import Experts
from interlock.plan.topology import World

DEFAULT_CHUNK: Final = {"cpu": 512, "cuda": 8192}
DEFAULT_RUNNING: Final = {"cpu": 64, "cuda": 256}
RETRACTED_CHUNK: Final = {"cpu": 64, "cuda": 512}
"""Chunk of a decode server, which computes prompts only of requests that it had to retract."""
PROOF_REQUESTS: Final = 4
"""Decode batch of a prefill server: the warm-up, which shows that the backend in use is the planned one."""
DRAFT_TOKENS: Final = 1
"""Tokens that a running request adds to a decode step; more than one with speculative decoding."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Tokens and requests of one step. All sizes are for each replica, capacities for each rank."""

    page_size: Decided[int]
    chunked_prefill_size: Decided[int]
    max_running_requests: Decided[int]
    prefill_capacity: Decided[int]
    decode_capacity: Decided[int]

    def items(self) -> dict[str, Decided[int]]:
        """Plan items."""
        return {
            "page_size": self.page_size,
            "chunked_prefill_size": self.chunked_prefill_size,
            "max_running_requests": self.max_running_requests,
            "moe_prefill_capacity": self.prefill_capacity,
            "moe_decode_capacity": self.decode_capacity,
        }


def decide_limits(
    options: Options, world: World, experts: Experts, device: str, mode: str = "none"
) -> Limits:
    """Limits that fit each other; a chunk or a batch larger than a given T is refused.

    Args:
        mode: of disaggregation; each role plans little for the phase that it does not serve.
    """
    page = integer(options, "page_size")
    chunk_preset = (RETRACTED_CHUNK if mode == "decode" else DEFAULT_CHUNK)[device]
    chunk, prefill = _limit_and_capacity(
        options,
        limit="chunked_prefill_size",
        capacity="moe_prefill_capacity",
        preset=max(chunk_preset, page.value),
        why="a decode server computes prompts only again" if mode == "decode" else f"default on {device}",
        split=_split(experts.layout_prefill.value, world),
        what=(Phase.PREFILL, "a chunk of {} tokens"),
    )
    running, decode = _limit_and_capacity(
        options,
        limit="max_running_requests",
        capacity="moe_decode_capacity",
        preset=DEFAULT_RUNNING[device],
        why=f"default on {device}",
        split=_split(experts.layout_decode.value, world),
        what=(Phase.DECODE, "a batch of {} requests"),
        most=PROOF_REQUESTS if mode == "prefill" else None,
    )
    if chunk.value < page.value:
        raise Refusal(
            option="--chunked-prefill-size",
            given=chunk.value,
            rule=f"a chunk must hold at least one page of {page.value} tokens (--page-size)",
            alternatives=[f"--chunked-prefill-size {page.value}", f"--page-size {chunk.value}"],
        )
    return Limits(page, chunk, running, prefill, decode)


def refuse_capacity_without_experts(options: Options) -> None:
    """A model without experts dispatches nothing, so a given T would have no effect."""
    for name in ("moe_prefill_capacity", "moe_decode_capacity"):
        given = asked_integer(options, name)
        if given is not None:
            raise Refusal(
                option=_flag(name),
                given=given.value,
                rule="this model has no experts, so the option would have no effect",
                alternatives=[f"{_flag(name)} auto"],
            )


def refuse_capacity_beyond(most: Mapping[Phase, int], backend: str, limits: Limits, split: int) -> None:
    """Refuse a T that the a2a backend cannot dispatch; ``split`` attention-TP ranks share tokens out."""
    rows = (
        (Phase.PREFILL, limits.prefill_capacity, "moe_prefill_capacity", "chunked_prefill_size"),
        (Phase.DECODE, limits.decode_capacity, "moe_decode_capacity", "max_running_requests"),
    )
    for phase, decided, capacity, limit in rows:
        if phase in most and decided.value > most[phase]:
            raise Refusal(
                option=_flag(capacity),
                given=decided.value,
                rule=f"--moe-a2a-backend {backend} dispatches at most {most[phase]} tokens of a rank in "
                f"{phase}; T follows from {_flag(limit)}",
                alternatives=[f"{_flag(limit)} {most[phase] * split}"],
            )


def _split(layout: Layout, world: World) -> int:
    """Ranks that share the tokens of a replica out before they dispatch."""
    return 1 if layout is Layout.REPLICATED else world.attn_tp_size


def _limit_and_capacity(
    options: Options,
    *,
    limit: str,
    capacity: str,
    preset: int,
    why: str,
    split: int,
    what: tuple[Phase, str],
    most: int | None = None,
) -> tuple[Decided[int], Decided[int]]:
    """One phase's limit and T: each from the other, from the preset, or checked when both are given.

    Args:
        why: reason of the preset.
        most: the largest step of the phase where the server's role makes it smaller than the limit.
    """
    asked_limit, asked_capacity = asked_integer(options, limit), asked_integer(options, capacity)
    limit_flag, capacity_flag = _flag(limit), _flag(capacity)
    phase, step = what
    if asked_limit is None:
        reach = asked_capacity.value * split // DRAFT_TOKENS if asked_capacity and most is None else preset
        reason = why if reach >= preset else f"what {capacity_flag} allows"
        asked_limit = rule(min(preset, reach), reason)
    largest = asked_limit.value if most is None else min(most, asked_limit.value)
    tokens = largest * DRAFT_TOKENS
    needed = -(-tokens // split)
    shared = f", shared out over {split} attention-TP ranks" if split > 1 else ""
    if asked_capacity is None:
        role = "" if most is None else " of a prefill server, in its warm-up"
        reason = f"{step.format(largest)} is the largest {phase} step{role}{shared}"
        return asked_limit, rule(needed, reason)
    if asked_capacity.value < needed:
        raise Refusal(
            option=capacity_flag,
            given=asked_capacity.value,
            rule=f"{step.format(largest)} ({limit_flag}) is {needed} tokens on a rank{shared}, "
            f"more than this T",
            alternatives=[
                f"{capacity_flag} {needed}",
                f"{limit_flag} {max(1, asked_capacity.value * split // DRAFT_TOKENS)}",
            ],
        )
    return asked_limit, asked_capacity


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
