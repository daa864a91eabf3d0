"""Compare what a dispatcher delivered with what the loop oracle says must be there, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from interlock.moe.a2a.rows import ContiguousRows, ExpertInput, MaskedRows, ReplicatedRows
from interlock.moe.conformance.cases import Case, Setting
from interlock.moe.conformance.oracle import DTYPES, Lane, lanes_of, result_of
from interlock.moe.fp8_rows import dequantise_rows
from interlock.moe.placement import place


class Mismatch(Exception):
    """What differs, in one line."""


@dataclass(frozen=True, slots=True)
class Filled:
    """One filled row: where it lies (flat), its bytes with its scales', and its local expert and weight."""

    at: int
    content: bytes
    local_expert: int
    weight: float


def check_received(rows: ExpertInput, case: Case, setting: Setting, rank: int, *, ordered: bool) -> None:
    """Raise Mismatch when counts, order, bytes, scales or weights differ from the oracle's."""
    if isinstance(rows, ReplicatedRows):
        _check_replicated(rows, case, setting, rank)
        return
    lanes = lanes_of(case, setting, rank)
    held = place(setting.num_experts, setting.ranks)[rank]
    counts = [sum(lane.local_expert == e for lane in lanes) for e in range(len(held))]
    if rows.counts.tolist() != counts:
        raise Mismatch(f"counts are {rows.counts.tolist()}, should be {counts}")
    filled = _filled(rows, counts)
    wanted = [(lane.local_expert, _content_of(lane, case), lane.weight) for lane in lanes]
    got = [(row.local_expert, row.content, row.weight) for row in filled]
    if not ordered:
        wanted, got = sorted(wanted), sorted(got)
    for index, (theirs, ours) in enumerate(zip(got, wanted, strict=True)):
        if theirs != ours:
            raise Mismatch(f"row {index} of expert {ours[0]} is not token {lanes[index]}")


def computed(rows: ExpertInput, setting: Setting, rank: int) -> torch.Tensor:
    """What integer-valued experts make of the rows; everything that no row fills is NaN."""
    dtype = DTYPES[setting.dtype]
    held = place(setting.num_experts, setting.ranks)[rank]
    device = rows.rows.device
    scales = None if rows.scales is None else rows.scales.cpu()
    plain = rows.rows.cpu() if scales is None else dequantise_rows(rows.rows.cpu(), scales, dtype)
    if isinstance(rows, ReplicatedRows):
        ids, weights = rows.ids.cpu(), None if rows.weights is None else rows.weights.cpu()
        out = torch.full((*ids.shape, setting.hidden_size), torch.nan, dtype=dtype)
        for token, lane in (ids >= 0).nonzero().tolist():
            expert = held.start + int(ids[token, lane])
            weight = 1.0 if weights is None else float(weights[token, lane])
            out[token, lane] = result_of(plain[token], setting.factor(expert), weight, dtype)
        return out.to(device)
    out = torch.full(plain.shape, torch.nan, dtype=dtype)
    flat, source = out.view(-1, setting.hidden_size), plain.reshape(-1, setting.hidden_size)
    for row in _filled(rows, rows.counts.tolist()):
        factor = setting.factor(held.start + row.local_expert)
        flat[row.at] = result_of(source[row.at], factor, row.weight, dtype)
    return out.to(device)


def _filled(rows: ContiguousRows | MaskedRows, counts: list[int]) -> list[Filled]:
    starts = _starts(rows, counts)
    flat = _bytes(rows.rows.reshape(-1, rows.rows.shape[-1]))
    scales = None if rows.scales is None else _bytes(rows.scales.reshape(-1, rows.scales.shape[-1]))
    weights = None if rows.weights is None else rows.weights.flatten().tolist()
    filled = []
    for expert, (start, count) in enumerate(zip(starts, counts, strict=True)):
        for at in range(start, start + count):
            content = flat[at] + (b"" if scales is None else scales[at])
            filled.append(Filled(at, content, expert, 1.0 if weights is None else weights[at]))
    return filled


def _starts(rows: ContiguousRows | MaskedRows, counts: list[int]) -> list[int]:
    if isinstance(rows, MaskedRows):
        if rows.rows.shape[1] < max(counts, default=0):
            raise Mismatch(f"the slab has {rows.rows.shape[1]} rows an expert, {max(counts)} are needed")
        return [expert * rows.rows.shape[1] for expert in range(len(counts))]
    starts, next_free = [], 0
    for count in counts:
        start = -(-next_free // rows.alignment) * rows.alignment
        starts.append(start)
        next_free = start + count
    psum = [start + count for start, count in zip(starts, counts, strict=True)]
    if rows.psum.tolist() != psum:
        raise Mismatch(f"psum is {rows.psum.tolist()}, should be {psum} with alignment {rows.alignment}")
    total = -(-next_free // rows.alignment) * rows.alignment
    if rows.rows.shape[0] != total:
        raise Mismatch(f"{rows.rows.shape[0]} rows, should be {total}")
    return starts


def _check_replicated(rows: ReplicatedRows, case: Case, setting: Setting, rank: int) -> None:
    """Every token of every rank is there once, in rank order; padding between ranks has no ids."""
    held = place(setting.num_experts, setting.ranks)[rank]
    share = rows.ids.shape[0] // setting.ranks
    content = _bytes(rows.rows)
    for source in range(setting.ranks):
        tokens = case.tokens[source]
        first = source * share
        if tokens > share:
            raise Mismatch(f"{rows.ids.shape[0]} rows for {case.tokens} tokens")
        local = case.ids[source] - held.start
        local = local.masked_fill((local < 0) | (local >= len(held)) | (case.ids[source] < 0), -1)
        if not torch.equal(rows.ids[first : first + tokens].cpu(), local):
            raise Mismatch(f"local ids of the tokens of rank {source} are wrong")
        if not bool((rows.ids[first + tokens : first + share] == -1).all()):
            raise Mismatch(f"padding behind the tokens of rank {source} has ids")
        if content[first : first + tokens] != _bytes(case.hidden[source]):
            raise Mismatch(f"rows of rank {source} are wrong")
        used = local >= 0
        if rows.weights is not None:
            got = rows.weights[first : first + tokens].cpu()[used]
            if not torch.equal(got, case.weights[source][used]):
                raise Mismatch(f"weights of the tokens of rank {source} are wrong")


def _content_of(lane: Lane, case: Case) -> bytes:
    content = _bytes(case.hidden[lane.source][lane.token : lane.token + 1])[0]
    scales = case.scales[lane.source]
    return content if scales is None else content + _bytes(scales[lane.token : lane.token + 1])[0]


def _bytes(rows: torch.Tensor) -> list[bytes]:
    flat = rows.cpu().contiguous().view(torch.uint8)
    return [bytes(row) for row in flat.numpy()]
