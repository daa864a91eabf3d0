"""Routing and row lists in compiled code, for kernels that are compiled too.

``routing.py`` and ``layouts.py`` say what they mean; tests hold them equal.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path

import torch

from interlock.kernels.base import ExpertRows, Kernels
from interlock.kernels.cpu.build import build_library
from interlock.moe.a2a.contract import ContractError
from interlock.moe.a2a.rows import ExpertInput, MaskedRows, ReplicatedRows
from interlock.plan.card import ExpertsCard

_SIGNATURES: dict[str, tuple[tuple[type, ...], type | None]] = {
    "route": ((c_void_p, c_void_p, *[c_int64] * 4, c_int, c_int, c_float, c_void_p, c_void_p), None),
    "group": ((c_void_p, c_void_p, c_int64, c_int64, c_int64, *[c_void_p] * 4), c_int64),
    "segments": ((c_void_p, c_void_p, *[c_int64] * 4, *[c_void_p] * 3), c_int64),
}


class NativeMoE:
    """The compiled functions on CPU tensors."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        for name, (arguments, result) in _SIGNATURES.items():
            function = getattr(library, f"interlock_moe_{name}")
            function.argtypes, function.restype = arguments, result
        self._route = library.interlock_moe_route
        self._group = library.interlock_moe_group
        self._segments = library.interlock_moe_segments

    @staticmethod
    def can_route(card: ExpertsCard) -> bool:
        """Groups of experts are left to the torch version."""
        return card.num_groups == 1 and card.scoring in ("sigmoid", "softmax")

    def route(
        self, logits: torch.Tensor, bias: torch.Tensor | None, card: ExpertsCard, live_tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As ``routing.choose_experts``: logits float32 [n, E] -> ids int64, weights float32 [n, k]."""
        tokens = logits.shape[0]
        ids = torch.empty(tokens, card.top_k, dtype=torch.int64)
        weights = torch.empty(tokens, card.top_k)
        self._route(
            *(logits.data_ptr(), None if bias is None else bias.data_ptr(), tokens, live_tokens),
            *(card.num_experts, card.top_k, card.scoring == "sigmoid", card.normalise_top_k),
            *(card.routed_scaling_factor, ids.data_ptr(), weights.data_ptr()),
        )
        return ids, weights

    def expert_rows(self, rows: ExpertInput, num_experts: int) -> ExpertRows:
        """As ``layouts.expert_rows``."""
        offsets = torch.empty(num_experts + 1, dtype=torch.int64)
        weights = None if rows.weights is None else rows.weights.contiguous()
        pointer = None if weights is None else weights.data_ptr()
        if isinstance(rows, ReplicatedRows):
            ids = rows.ids.contiguous()
            index = torch.empty(2, ids.numel(), dtype=torch.int64)
            weight = torch.empty(ids.numel())
            filled = self._group(
                *(ids.data_ptr(), pointer, ids.numel(), ids.shape[1], num_experts, offsets.data_ptr()),
                *(index[0].data_ptr(), index[1].data_ptr(), weight.data_ptr()),
            )
            if filled < 0:
                raise ContractError(f"local ids must be below {num_experts}, {int(ids.max())} was given")
            return ExpertRows(offsets, index[0, :filled], index[1, :filled], weight[:filled])
        counts = rows.counts.contiguous()
        total, slab_rows, alignment = rows.rows.shape[0], 0, 1
        if isinstance(rows, MaskedRows):
            slab_rows = rows.rows.shape[1]
            total *= slab_rows
        else:
            alignment = rows.alignment
        most = int(counts.sum())
        at, weight = torch.empty(max(0, most), dtype=torch.int64), torch.empty(max(0, most))
        filled = self._segments(
            *(counts.data_ptr(), pointer, num_experts, slab_rows, alignment, total),
            *(offsets.data_ptr(), at.data_ptr(), weight.data_ptr()),
        )
        if filled < 0:
            raise ContractError(f"counts {counts.tolist()} do not fit the {total} rows that were given")
        return ExpertRows(offsets, at, at, weight)


@cache
def _library() -> NativeMoE:
    return NativeMoE(build_library(sources=Path(__file__).parent / "native", name="interlock_moe.so"))


def native_moe(kernels: Kernels) -> NativeMoE | None:
    """The compiled functions when ``kernels`` are the compiled ones of the CPU, else None."""
    return _library() if kernels.name == "cpu" else None
