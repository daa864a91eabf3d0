"""Random cases for a2a backends: the same on every rank, from a seed alone.

A *setting* is what a dispatcher is built from; a *case* is one dispatch and combine of all ranks. Settings
walk over layouts, row dtypes and sizes so that few of them cover many combinations.

Rows are made so that a misplaced one shows: every value depends on rank, token and channel and is a small
integer (or any e4m3 code with a power-of-two scale), the experts multiply by +-0.5, 1, 2, and the routing
weights are powers of two, so every product and every sum is exact in bfloat16's 8 bits or float32's 24.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch

from interlock.moe.a2a.backend import A2ABackend
from interlock.moe.a2a.rows import SCALE_GROUP
from interlock.moe.placement import place
from interlock.moe.terms import Layout, Phase

PATTERNS = ("uniform", "one expert", "one rank", "unused slots", "all unused")
HIDDEN = (8, 64, 96, 200, 256)
FACTORS = (1.0, -1.0, 2.0, 0.5, -2.0)


@dataclass(frozen=True, slots=True)
class Setting:
    """One dispatcher's sizes. ``dtype`` is that of results: "float32" or "bfloat16"."""

    index: int
    ranks: int
    num_experts: int
    top_k: int
    hidden_size: int
    row_dtype: str
    dtype: str
    layouts: tuple[tuple[Phase, Layout], ...]
    capacity: tuple[tuple[Phase, int], ...]
    alignment: int
    deterministic: bool
    validate: bool

    def __str__(self) -> str:
        sizes = f"R={self.ranks} E={self.num_experts} k={self.top_k} h={self.hidden_size} A={self.alignment}"
        layouts = "/".join(layout.value for _, layout in self.layouts)
        capacity = "/".join(str(tokens) for _, tokens in self.capacity)
        return f"setting {self.index} ({sizes} T={capacity} {layouts} {self.row_dtype}->{self.dtype})"

    def factor(self, expert: int) -> float:
        """What expert ``expert`` multiplies a row by."""
        return FACTORS[expert % len(FACTORS)]


@dataclass(frozen=True, slots=True)
class Case:
    """Inputs by rank: hidden [n, h], ids [n, k], weights [n, k], scales [n, h / 128] or None."""

    label: str
    phase: Phase
    pattern: str
    hidden: tuple[torch.Tensor, ...]
    ids: tuple[torch.Tensor, ...]
    weights: tuple[torch.Tensor, ...]
    scales: tuple[torch.Tensor | None, ...]

    @property
    def tokens(self) -> list[int]:
        return [ids.shape[0] for ids in self.ids]


def settings(backend: A2ABackend, ranks: int, seed: int) -> Iterator[Setting]:
    """An endless walk over what ``backend`` declares."""
    layouts = list(product(*(sorted(backend.layouts[phase]) for phase in Phase)))
    hidden = [size for size in HIDDEN if size % backend.hidden_multiple == 0] or [backend.hidden_multiple]
    if backend.hidden_sizes:
        hidden = sorted(backend.hidden_sizes)[:2]
    combinations = list(product(layouts, sorted(backend.row_dtypes), ("float32", "bfloat16")))
    combinations = [c for c in combinations if c[1] in ("fp8", c[2]) and c[2] in backend.result_dtypes]
    order = random.Random(seed)
    index = 0
    while True:
        order.shuffle(combinations)
        for chosen, row_dtype, dtype in combinations:
            experts = ranks + order.choice((0, 1, ranks, 2 * ranks + 1, 3 * ranks))
            if backend.even_experts:
                experts -= experts % ranks
            yield Setting(
                index=index,
                ranks=ranks,
                num_experts=experts,
                top_k=min(experts, order.choice((1, 2, 3, 4, 8)), backend.max_top_k or experts),
                hidden_size=order.choice(hidden),
                row_dtype=row_dtype,
                dtype=dtype,
                layouts=tuple(zip(Phase, chosen, strict=True)),
                capacity=tuple((phase, order.choice((1, 2, 3, 5, 9, 17))) for phase in Phase),
                alignment=order.choice((1, 1, 4, 8)),
                deterministic=order.random() < 0.5,
                validate=order.random() < 0.5,
            )
            index += 1


def make_case(setting: Setting, number: int, seed: int) -> Case:
    """Case ``number`` of ``setting``; equal arguments give equal cases."""
    pick = random.Random(f"{seed}/{setting.index}/{number}")
    generator = torch.Generator().manual_seed(pick.randrange(2**62))
    phase = pick.choice(list(Phase))
    capacity = dict(setting.capacity)[phase]
    pattern = pick.choice(PATTERNS)
    counts = _token_counts(pick, setting.ranks, capacity)
    target = pick.randrange(setting.num_experts)
    ids = tuple(_routes(setting, pattern, n, target, generator) for n in counts)
    rows = [_rows(setting, rank, ids[rank], generator) for rank in range(setting.ranks)]
    return Case(
        label=f"{setting}, case {number}, {phase.value}, n={counts}, {pattern}",
        phase=phase,
        pattern=pattern,
        hidden=tuple(hidden for hidden, _ in rows),
        ids=ids,
        weights=tuple(2.0 ** torch.randint(-2, 3, i.shape, generator=generator) for i in ids),
        scales=tuple(scales for _, scales in rows),
    )


def _token_counts(pick: random.Random, ranks: int, capacity: int) -> list[int]:
    ordinary = (0, 1, max(0, capacity - 1), capacity, pick.randint(0, capacity))
    shape = pick.choice(("mixed", "mixed", "equal", "one busy"))
    if shape == "mixed":
        return [min(capacity, pick.choice(ordinary)) for _ in range(ranks)]
    if shape == "equal":
        return [min(capacity, pick.choice(ordinary))] * ranks
    busy = pick.randrange(ranks)
    return [capacity if rank == busy else 0 for rank in range(ranks)]


def _routes(
    setting: Setting, pattern: str, tokens: int, target: int, generator: torch.Generator
) -> torch.Tensor:
    """ids [tokens, k]: used ones ascending in a row, -1 anywhere."""
    experts, top_k = setting.num_experts, setting.top_k
    preference = torch.rand(tokens, experts, generator=generator)
    if pattern == "one expert":
        preference[:, target] = 2.0
    if pattern == "one rank":
        held = next(part for part in place(experts, setting.ranks) if target in part)
        preference[:, held.start : held.stop] += 2.0
    ids = preference.argsort(dim=1, descending=True)[:, :top_k].sort(dim=1).values
    unused = torch.zeros_like(ids, dtype=torch.bool)
    if pattern == "one rank":
        unused = (ids < held.start) | (ids >= held.stop)
    if pattern == "one expert" and int(target) % 2:
        unused = ids != target
    if pattern == "unused slots":
        unused = torch.rand(ids.shape, generator=generator) < 0.5
    if pattern == "all unused":
        unused = torch.ones_like(unused)
    return ids.masked_fill(unused, -1)


def _rows(
    setting: Setting, rank: int, ids: torch.Tensor, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows and scales; a token without a single expert is NaN throughout, for nobody may read it."""
    tokens, width = ids.shape[0], setting.hidden_size
    idle = (ids < 0).all(dim=1, keepdim=True)
    if setting.row_dtype == "fp8":
        codes = torch.randint(0, 0x7F, (tokens, width), generator=generator)
        codes = codes + 0x80 * torch.randint(0, 2, codes.shape, generator=generator)
        codes = codes.masked_fill(idle, 0x7F).to(torch.uint8)
        groups = -(-width // SCALE_GROUP)
        scales = 2.0 ** torch.randint(-3, 4, (tokens, groups), generator=generator)
        return codes.view(torch.float8_e4m3fn), scales.masked_fill(idle, torch.nan)
    token = torch.arange(tokens).unsqueeze(1)
    salt = int(torch.randint(0, 89, (1,), generator=generator))
    values = (rank * 31 + token * 7 + torch.arange(width) * 3 + salt) % 89 - 44
    rows = values.float().masked_fill(idle, torch.nan)
    return rows.to(getattr(torch, setting.row_dtype)), None
