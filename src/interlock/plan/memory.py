"""Memory of a rank: what weights, buffers and activations leave for the KV pools, and how the pools are cut.

The a2a buffers are reserved before the pools are sized. Pools hold what the scheduler's limits can use at
most, or less where memory is the limit; a plan whose pools cannot hold one longest request is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from interlock.errors import Refusal
from interlock.options import Options
from interlock.plan.capacity import Limits
from interlock.plan.card import ModelCard
from interlock.plan.decided import Decided, asked_integer, from_model, rule
from interlock.plan.facts import MachineFacts
from interlock.plan.launch_plan import MemoryEstimate
from interlock.plan.rehearsal import CONTEXT_BYTES
from interlock.plan.topology import World

HOST_SHARE: Final = 0.9
"""Share of the free host memory that a server may plan with; the rest is for everything else there."""
DEVICE_SHARE: Final = 0.92
"""Share of a device's free memory; the rest is for the context, libraries and fragmentation."""
HOST_KV_SHARE: Final = 0.25
"""Share of what is left on a host that pools take without being asked to."""
MIN_AUTO_LEN: Final = 1024
MIB: Final = 2**20


@dataclass(frozen=True, slots=True)
class Fixed:
    """Bytes that do not depend on the pools."""

    weights: int
    a2a_buffers: int
    activations: int
    graphs: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.a2a_buffers + self.activations + self.graphs


@dataclass(frozen=True, slots=True)
class Pools:
    """The page spaces of one replica."""

    full_pages: Decided[int]
    window_pages: Decided[int]
    max_model_len: Decided[int]

    def items(self) -> dict[str, Decided[int]]:
        """Plan items."""
        return {
            "full_pages": self.full_pages,
            "window_pages": self.window_pages,
            "max_model_len": self.max_model_len,
        }


@dataclass(frozen=True, slots=True)
class PageSpaces:
    """What the pools are sized from. ``window`` is the widest window in keys, None without such layers;
    page bytes are those of all layers of a space on one rank, 0 without such layers."""

    page_size: int
    full_page_bytes: int
    window_page_bytes: int
    window: int | None

    def pages(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def window_pages_for(self, tokens: int, step: int) -> int:
        """Most window pages that a sequence of ``tokens`` holds while it computes ``step`` at a time."""
        if self.window is None:
            return 0
        return min(self.pages(tokens), self.pages(self.window - 1 + step) + 1)

    def least_window_pages(self, tokens: int, step: int) -> int:
        """Window pages with which one sequence of ``tokens`` runs, and the space is valid at all."""
        if self.window is None:
            return 0
        return max(self.pages(self.window) + 1, self.window_pages_for(tokens, step))

    def nbytes(self, full_pages: int, window_pages: int) -> int:
        return full_pages * self.full_page_bytes + window_pages * self.window_page_bytes


def available_bytes(facts: MachineFacts, device: str, world: World) -> int:
    """Bytes that one rank may plan with."""
    if device == "cpu":
        return int(facts.memory_available * HOST_SHARE) // world.local_ranks
    sharing = world.ranks_per_gpu.value
    free = int(min(found.memory_free for found in facts.devices[: world.local_gpus]) * DEVICE_SHARE)
    return max(0, free - (sharing - 1) * CONTEXT_BYTES) // sharing


def widest_window(card: ModelCard, extra: int) -> int | None:
    """Keys that the widest sliding-window layer sees, itself included."""
    windows = [layer.attention.window for layer in card.layers if layer.attention.window is not None]
    return max(windows) + extra if windows else None


def decide_pools(
    options: Options,
    card: ModelCard,
    world: World,
    limits: Limits,
    spaces: PageSpaces,
    fixed: Fixed,
    available: int,
    device: str,
) -> Pools:
    """Pages of both spaces and the longest request."""
    asked_len = asked_integer(options, "max_model_len")
    if asked_len is not None and asked_len.value > card.max_position:
        raise Refusal(
            option="--max-model-len",
            given=asked_len.value,
            rule=f"the model's positions end at {card.max_position}",
            alternatives=[f"--max-model-len {card.max_position}"],
        )
    chunk, running = limits.chunked_prefill_size.value, limits.max_running_requests.value
    longest = asked_len.value if asked_len else card.max_position
    least_len = asked_len.value if asked_len else min(card.max_position, max(MIN_AUTO_LEN, spaces.page_size))
    least = _least_pages(spaces, least_len, chunk)
    budget = _budget(options, spaces, least, fixed, available, least_len, world, device)
    cached = options.switch("prefix_cache")
    wanted = (
        running * spaces.pages(longest),
        _wanted_window(spaces, longest, chunk, running, cached) if spaces.window else 0,
    )
    full, window = _cut(spaces, budget.value, least, wanted)
    reason = _reason(budget, (full, window), wanted, running)
    length = asked_len or _longest(card, spaces, full, window, chunk)
    return Pools(
        _pages(full, spaces.full_page_bytes, budget, reason, "full-attention"),
        _pages(window, spaces.window_page_bytes, budget, reason, "sliding-window"),
        length,
    )


def _least_pages(spaces: PageSpaces, length: int, chunk: int) -> tuple[int, int]:
    full = spaces.pages(length) if spaces.full_page_bytes else 0
    return full, spaces.least_window_pages(length, chunk)


def _wanted_window(spaces: PageSpaces, longest: int, chunk: int, running: int, cached: bool) -> int:
    """All running requests decoding beside one chunk, of one request or of many; twice what decodes where
    finished prefixes keep a tail."""
    decoding = running * spaces.window_pages_for(longest, 1)
    prefill = max(spaces.least_window_pages(longest, chunk), spaces.pages(min(chunk, running * longest)))
    return decoding * (2 if cached else 1) + prefill


def _budget(
    options: Options,
    spaces: PageSpaces,
    least: tuple[int, int],
    fixed: Fixed,
    available: int,
    length: int,
    world: World,
    device: str,
) -> Decided[int]:
    """Bytes for the pools. Refuses when they cannot hold one request of ``length`` tokens."""
    needed, left = spaces.nbytes(*least), available - fixed.total
    asked = asked_integer(options, "kv_memory")
    if asked is not None and asked.value < needed:
        raise Refusal(
            option="--kv-memory",
            given=size(asked.value),
            rule=f"one request of {length} tokens needs {size(needed)} of KV pages on a rank",
            alternatives=[f"--kv-memory {-(-needed // MIB)}MiB", *_shorter(spaces, asked.value, length)],
        )
    if left < (asked.value if asked else needed):
        graphs = f", {size(fixed.graphs)} for CUDA graphs" if fixed.graphs else ""
        pools = f"{size(asked.value)} for --kv-memory" if asked else f"{size(needed)} for KV pages"
        raise Refusal(
            option="--kv-memory" if asked and left >= needed else "--tp-size",
            given=size(asked.value) if asked and left >= needed else world.tp_size.value,
            rule=f"a rank needs {size(fixed.weights)} for weights, {size(fixed.a2a_buffers)} for a2a "
            f"buffers, {size(fixed.activations)} for activations{graphs} and {pools}, together "
            f"{size(fixed.total + (asked.value if asked else needed))}; {size(available)} is available",
            alternatives=[f"--kv-memory {left // MIB}MiB"] if left // MIB * MIB >= needed else [],
        )
    if asked is not None:
        return asked
    if device != "cpu":
        return rule(left, "all memory that weights, buffers and activations leave")
    share = max(needed, int(left * HOST_KV_SHARE))
    return rule(share, f"{HOST_KV_SHARE:.0%} of the host memory that the rest leaves (--kv-memory sets it)")


def _shorter(spaces: PageSpaces, budget: int, length: int) -> list[str]:
    if not spaces.full_page_bytes:
        return []
    window = spaces.least_window_pages(length, 1) * spaces.window_page_bytes
    pages = (budget - window) // spaces.full_page_bytes
    return [f"--max-model-len {pages * spaces.page_size}"] if pages > 0 else []


def _cut(spaces: PageSpaces, budget: int, least: tuple[int, int], wanted: tuple[int, int]) -> tuple[int, int]:
    """Pages of both spaces within ``budget``: the window space gets what it wants up to half."""
    if not spaces.full_page_bytes:
        return 0, max(least[1], min(wanted[1], budget // spaces.window_page_bytes))
    window = 0
    if spaces.window_page_bytes:
        rest = budget - least[0] * spaces.full_page_bytes
        cap = max(least[1], min(rest, budget // 2) // spaces.window_page_bytes)
        window = max(least[1], min(wanted[1], cap))
    full = (budget - window * spaces.window_page_bytes) // spaces.full_page_bytes
    return min(full, wanted[0]), window


def _reason(budget: Decided[int], pages: tuple[int, int], wanted: tuple[int, int], running: int) -> str:
    if pages == wanted:
        return f"as much as {running} requests of the longest length can use"
    return f"{size(budget.value)} for KV: {budget.reason}"


def _pages(pages: int, page_bytes: int, budget: Decided[int], reason: str, kind: str) -> Decided[int]:
    if page_bytes == 0:
        return from_model(0, f"the model has no {kind} layers")
    return Decided(pages, budget.source, reason)


def _longest(
    card: ModelCard, spaces: PageSpaces, full_pages: int, window_pages: int, chunk: int
) -> Decided[int]:
    """The longest request that both spaces hold while it is computed ``chunk`` tokens at a time."""
    held = full_pages * spaces.page_size if spaces.full_page_bytes else card.max_position
    if spaces.window_pages_for(held, chunk) > window_pages:
        held = window_pages * spaces.page_size
    if held >= card.max_position:
        return from_model(card.max_position, "the model's largest position")
    return rule(held, f"what the KV pool holds; the model's positions end at {card.max_position}")


def estimate(spaces: PageSpaces, pools: Pools, fixed: Fixed, available: int) -> MemoryEstimate:
    """The memory table of the plan."""
    return MemoryEstimate(
        weights=fixed.weights,
        kv_full=pools.full_pages.value * spaces.full_page_bytes,
        kv_window=pools.window_pages.value * spaces.window_page_bytes,
        a2a_buffers=fixed.a2a_buffers,
        activations=fixed.activations,
        graphs=fixed.graphs,
        available=available,
    )


def size(count: int) -> str:
    """``1536`` -> ``"1.5 KiB"``."""
    amount = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(amount) < 1024:
            return f"{amount:.4g} {unit}"
        amount /= 1024
    return f"{amount:.4g} TiB"
