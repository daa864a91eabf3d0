"""What a scheduler hands to the model runner for one step, and its form on the wire.

Legend as in ``step.py``: n tokens, s sequences, P pages in the longest page table, m rows to sample,
q prompt rows whose log-probabilities are wanted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from interlock.engine.request import Request
from interlock.engine.slots import SlotTable
from interlock.engine.upload import upload_together
from interlock.moe.terms import Phase
from interlock.step import PageMap, Step

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepArrays:
    """A ``Step`` as numpy arrays: everything that the ranks that follow a replica need.

    Attributes:
        token_ids, positions: int64 [n].
        query_start: int32 [s + 1]; kv_len: int32 [s].
        full_table, window_table: int32 [s, P], or None for a page space that the model does not have.
        full_slots, window_slots: int64 [n], likewise.
        sample_rows: int64 [m].
        prompt_rows: int64 [q], rows whose logits are wanted for prompt logprobs (all ranks of a replica
            compute these logits, in the sub-batches of ``prompt_row_blocks``).
        live_tokens: tokens that are not padding.
        inspection: JSON of a ``StepInspection`` for a step that ``verify`` looks into, else "".
    """

    phase: Phase
    token_ids: Int64s
    positions: Int64s
    query_start: Int32s
    kv_len: Int32s
    full_table: Int32s | None
    full_slots: Int64s | None
    window_table: Int32s | None
    window_slots: Int64s | None
    sample_rows: Int64s
    prompt_rows: Int64s
    live_tokens: int
    inspection: str = ""

    def padded(self, tokens: int) -> StepArrays:
        """The same step with padding tokens (id 0, position 0, slot -1) appended up to ``tokens``."""
        extra = tokens - len(self.token_ids)
        if extra < 0:
            raise ValueError(f"a step of {len(self.token_ids)} tokens cannot be padded to {tokens}")
        if extra == 0:
            return self
        zeros = np.zeros(extra, dtype=np.int64)
        nowhere = np.full(extra, -1, dtype=np.int64)
        return replace(
            self,
            token_ids=np.concatenate([self.token_ids, zeros]),
            positions=np.concatenate([self.positions, zeros]),
            full_slots=None if self.full_slots is None else np.concatenate([self.full_slots, nowhere]),
            window_slots=None if self.window_slots is None else np.concatenate([self.window_slots, nowhere]),
        )


PROMPT_ROWS_AT_ONCE = 64
"""Prompt rows whose logits are materialised together; [64, vocab] float32 is 38 MiB at 152k tokens."""


def prompt_row_blocks(arrays: StepArrays) -> list[Int64s]:
    """``prompt_rows`` cut into the sub-batches in which every rank of a replica computes their logits."""
    rows = arrays.prompt_rows
    return [rows[i : i + PROMPT_ROWS_AT_ONCE] for i in range(0, len(rows), PROMPT_ROWS_AT_ONCE)]


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Sampling parameters of the m rows of a step, one array a parameter; see ``SamplingParams``.

    Attributes:
        positions: int64 [m], position that the sampled token will have (the counter of its random draw).
        adjusts: bool [m], the row's logits are changed by penalties, a bias or a min_tokens mask.
        logprobs: int64 [m], alternatives wanted, -1 for no logprobs.
        plain_greedy: every row is greedy, unchanged, and wants no logprobs.
    """

    temperature: npt.NDArray[np.float32]
    top_k: Int64s
    top_p: npt.NDArray[np.float64]
    min_p: npt.NDArray[np.float64]
    seed: npt.NDArray[np.uint64]
    positions: Int64s
    adjusts: npt.NDArray[np.bool_]
    logprobs: Int64s
    plain_greedy: bool

    @classmethod
    def of(cls, table: SlotTable, slots: Int64s, *, lead: int = 0) -> SamplingRows:
        """Parameters of ``slots`` when ``lead`` more tokens of each will be known."""
        length = table.length[slots] + lead
        adjusts = table.adjusts[slots] | (length - table.prompt_len[slots] < table.min_tokens[slots])
        temperature = table.temperature[slots]
        logprobs = table.logprobs[slots]
        return cls(
            temperature=temperature,
            top_k=table.top_k[slots],
            top_p=table.top_p[slots],
            min_p=table.min_p[slots],
            seed=table.seed[slots],
            positions=length,
            adjusts=adjusts,
            logprobs=logprobs,
            plain_greedy=not (temperature.any() or adjusts.any() or (logprobs >= 0).any()),
        )


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens ``start : end`` of one request, computed in a prefill step; the last chunk ``finishes`` it."""

    request: Request
    start: int
    end: int
    finishes: bool


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Whose prompt logprobs this step computes: ``count`` consecutive entries of ``prompt_rows``, whose next
    tokens are ``targets`` int64 [count]."""

    request: Request
    targets: Int64s


@dataclass(frozen=True, slots=True)
class Batch:
    """One step of one replica.

    Attributes:
        requests: the request of each row of ``arrays.sample_rows``.
        slots: int64 [m], their rows in the slot table.
        chunks: prefill only, every request that takes part.
        prompt_scores: who wants the rows of ``arrays.prompt_rows``, in that order.
        sources: int64 [n], for a step that was scheduled before the tokens of the step before it were known:
            rows of that step whose sampled tokens are this step's ``token_ids``.
    """

    arrays: StepArrays
    requests: tuple[Request, ...]
    slots: Int64s
    sampling: SamplingRows
    chunks: tuple[Chunk, ...] = ()
    prompt_scores: tuple[PromptScores, ...] = ()
    sources: Int64s | None = None

    @property
    def phase(self) -> Phase:
        return self.arrays.phase

    @property
    def participants(self) -> tuple[Request, ...]:
        """Every request whose tokens the step computes, sampled from or not."""
        return tuple(chunk.request for chunk in self.chunks) if self.chunks else self.requests


_FIELDS = tuple(StepArrays.__dataclass_fields__)


def encode_arrays(arrays: StepArrays) -> bytes:
    """Bytes of a step for the ranks that follow (msgpack of dtype, shape and raw data of each field)."""
    return msgspec.msgpack.encode([_pack(getattr(arrays, name)) for name in _FIELDS])


def decode_arrays(data: bytes) -> StepArrays:
    """Inverse of ``encode_arrays``. Raises ``msgspec.DecodeError`` or ``ValueError`` for malformed bytes."""
    values = msgspec.msgpack.decode(data, type=list[Any])
    fields = dict(zip(_FIELDS, map(_unpack, values), strict=True))
    return StepArrays(**(fields | {"phase": Phase(fields["phase"])}))


def _pack(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return (value.dtype.char, value.shape, np.ascontiguousarray(value).data)
    return value


def _unpack(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    dtype, shape, data = value
    return np.frombuffer(bytearray(data), dtype=np.dtype(dtype)).reshape(shape)


def idle_arrays(phase: Phase, *, has_full: bool, has_window: bool) -> StepArrays:
    """A step of no tokens, for a replica without work in a phase that others run."""
    none = np.zeros(0, dtype=np.int64)
    table = np.zeros((0, 0), dtype=np.int32)
    return StepArrays(
        phase=phase,
        token_ids=none,
        positions=none,
        query_start=np.zeros(1, dtype=np.int32),
        kv_len=np.zeros(0, dtype=np.int32),
        full_table=table if has_full else None,
        full_slots=none if has_full else None,
        window_table=table if has_window else None,
        window_slots=none if has_window else None,
        sample_rows=none,
        prompt_rows=none,
        live_tokens=0,
    )


def to_step(arrays: StepArrays, device: torch.device | str = "cpu") -> Step:
    """The step as tensors on ``device``."""
    plain = (arrays.token_ids, arrays.positions, arrays.query_start, arrays.kv_len, arrays.sample_rows)
    maps = ((arrays.full_table, arrays.full_slots), (arrays.window_table, arrays.window_slots))
    held = [array for pair in maps for array in pair if array is not None]
    tensors = upload_together([*plain, *held], device)
    token_ids, positions, query_start, kv_len, sample_rows = tensors[: len(plain)]
    rest = iter(tensors[len(plain) :])
    full, window = (
        None if table is None or slots is None else PageMap(table=next(rest), slots=next(rest))
        for table, slots in maps
    )
    return Step(
        phase=arrays.phase,
        token_ids=token_ids,
        positions=positions,
        query_start=query_start,
        kv_len=kv_len,
        full=full,
        window=window,
        sample_rows=sample_rows,
        live_tokens=arrays.live_tokens,
    )
