"""``Kernels`` on the CPU in native code: thin wrappers that check shapes and pass pointers.

Legend: as in ``kernels/base.py``. float32 and bfloat16 only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

import torch

from interlock.kernels import torch_draw
from interlock.kernels.base import CompileShare, ExpertRows, PackedExperts, PackedWeight
from interlock.kernels.cpu.arena import WeightArena
from interlock.kernels.cpu.library import native_library, raise_status

_PANEL = 32
_TYPES = {torch.float32: 0, torch.bfloat16: 1}


@dataclass(frozen=True, slots=True)
class Panels:
    """Packed weights and their addresses (``tensors`` keeps the memory alive)."""

    tensors: tuple[torch.Tensor, ...]
    pointers: tuple[int, ...]


def _bad(name: str, tensor: torch.Tensor, wanted: str) -> NoReturn:
    given = f"{tensor.dtype} {list(tensor.shape)} with strides {list(tensor.stride())} on {tensor.device}"
    raise ValueError(f"{name}: must be {wanted}, got {given}")


def _type(name: str, tensor: torch.Tensor) -> int:
    """Type code of a float tensor with a dense last dimension."""
    code = _TYPES.get(tensor.dtype)
    if code is None or not tensor.is_cpu or (tensor.stride()[-1] != 1 and tensor.shape[-1] != 1):
        _bad(name, tensor, "a float32 or bfloat16 CPU tensor with a dense last dimension")
    return code


def _dense(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """Address of a contiguous tensor of exactly this dtype and shape."""
    if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous() or not tensor.is_cpu:
        _bad(name, tensor, f"a contiguous {dtype} CPU tensor {list(shape)}")
    return tensor.data_ptr()


def _panel_elements(n: int, k: int, dtype: torch.dtype) -> int:
    """Elements of [n, k] packed in panels: n in whole panels, k in whole 32-bit lanes (see gemm.hpp)."""
    in_lane = 4 // dtype.itemsize
    return -(-n // _PANEL) * _PANEL * (-(-k // in_lane) * in_lane)


class CpuKernels:
    """Native kernels with ``threads`` threads; results do not depend on their number."""

    name = "cpu"
    row_invariant = True

    def __init__(self, *, threads: int) -> None:
        self.threads = threads
        self._native = native_library()
        self._arena = WeightArena()

    def compiler(self, share: CompileShare) -> None:
        """Nothing is compiled at a launch."""

    def pack_linear(self, weight: torch.Tensor) -> PackedWeight:
        code = _type("weight", weight)
        if weight.ndim != 2:
            _bad("weight", weight, "[N, K]")
        n, k = weight.shape
        panels = self._arena.empty(_panel_elements(n, k, weight.dtype), weight.dtype)
        self._native.pack_linear(weight.data_ptr(), code, weight.stride(0), n, k, panels.data_ptr())
        return PackedWeight(n, k, weight.dtype, Panels((panels,), (panels.data_ptr(),)), panels.nbytes)

    def pack_linear_fp8(self, weight: torch.Tensor, scales: torch.Tensor | None = None) -> PackedWeight:
        raise TypeError('kernels "cpu" compute float32 or bfloat16 weights: dequantise fp8 blocks first')

    def linear(
        self, x: torch.Tensor, weight: PackedWeight, *, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        code, k = _type("x", x), weight.in_features
        shape = x.shape
        if len(shape) != 2 or shape[1] != k:
            _bad("x", x, f"[n, {k}]")
        n = shape[0]
        out = torch.empty(n, weight.out_features, dtype=out_dtype or x.dtype)
        out_code = code if out_dtype is None else _type("out_dtype", out)
        self._native.linear(
            *(
                x.data_ptr(),
                x.stride()[0],
                n,
                weight.data.pointers[0],
                weight.out_features,
                k,
                out.data_ptr(),
            ),
            *(code, _TYPES[weight.dtype], out_code, self.threads),
        )
        return out

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        code, weight_code = _type("x", x), _type("weight", weight)
        shape = x.shape
        h = shape[-1]
        if weight.shape != (h,):
            _bad("weight", weight, f"[{h}]")
        outer, outer_stride, inner, inner_stride = 1, 0, 1, 0
        if x.ndim == 2:
            outer, outer_stride = x.shape[0], x.stride()[0]
        elif x.ndim > 2:
            x = x if x.ndim == 3 else x.flatten(0, -3)
            (outer, inner, _), (outer_stride, inner_stride, _) = x.shape, x.stride()
        out = torch.empty(shape, dtype=x.dtype)
        self._native.rms_norm(
            *(x.data_ptr(), outer, outer_stride, inner, inner_stride, h, weight.data_ptr(), eps),
            *(out.data_ptr(), code, weight_code, self.threads),
        )
        return out

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        code, weight_code = _type("x", x), _type("weight", weight)
        if x.ndim != 2:
            _bad("x", x, "[n, h]")
        n, h = x.shape
        if residual.shape != x.shape or _type("residual", residual) != code:
            _bad("residual", residual, f"{x.dtype} [{n}, {h}] like x")
        if weight.shape != (h,):
            _bad("weight", weight, f"[{h}]")
        out, total = torch.empty(n, h, dtype=x.dtype), torch.empty(n, h, dtype=x.dtype)
        self._native.add_rms_norm(
            *(x.data_ptr(), x.stride(0), residual.data_ptr(), residual.stride(0), n, h),
            *(weight.data_ptr(), eps, out.data_ptr(), total.data_ptr(), code, weight_code, self.threads),
        )
        return out, total

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        code = _type("gate_up", gate_up)
        if gate_up.ndim != 2 or gate_up.shape[1] % 2:
            _bad("gate_up", gate_up, "[n, 2i]")
        n, i = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty(n, i, dtype=gate_up.dtype)
        self._native.silu_and_mul(
            gate_up.data_ptr(), gate_up.stride(0), n, i, out.data_ptr(), code, self.threads
        )
        return out

    def rope_and_store(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slots: torch.Tensor,
        value_scale: float,
    ) -> torch.Tensor:
        code = _type("q", q)
        if q.ndim != 3:
            _bad("q", q, "[n, nh, hd]")
        n, nh, hd = q.shape
        pages, page_size, kvh, vd, cache_code = _cache_sizes(k_cache, v_cache, hd)
        if k.shape != (n, kvh, hd) or _type("k", k) != code:
            _bad("k", k, f"{q.dtype} [{n}, {kvh}, {hd}]")
        if v.shape != (n, kvh, vd) or _type("v", v) != code:
            _bad("v", v, f"{q.dtype} [{n}, {kvh}, {vd}]")
        if cos_sin.ndim != 2 or cos_sin.shape[1] % 2 or cos_sin.shape[1] > hd:
            _bad("cos_sin", cos_sin, f"[max_pos, r] with r even and at most {hd}")
        max_position, rotary = cos_sin.shape
        out = torch.empty(n, nh, hd, dtype=q.dtype)
        status = self._native.rope_and_store(
            *(q.data_ptr(), q.stride(0), q.stride(1), k.data_ptr(), k.stride(0), k.stride(1)),
            *(v.data_ptr(), v.stride(0), v.stride(1), n, nh, kvh, hd, vd),
            _dense("positions", positions, torch.int64, (n,)),
            _dense("cos_sin", cos_sin, torch.float32, (max_position, rotary)),
            *(max_position, rotary, k_cache.data_ptr(), v_cache.data_ptr()),
            _dense("slots", slots, torch.int64, (n,)),
            *(pages * page_size, value_scale, out.data_ptr(), code, cache_code, self.threads),
        )
        if status:
            raise_status(status)
        return out

    def paged_attention(
        self,
        q: torch.Tensor,
        *,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        page_table: torch.Tensor,
        query_start: torch.Tensor,
        kv_len: torch.Tensor,
        scale: float,
        window: int | None,
        sinks: torch.Tensor | None,
        max_keys: int | None = None,
    ) -> torch.Tensor:
        code = _type("q", q)
        if q.ndim != 3:
            _bad("q", q, "[n, nh, hd]")
        n, nh, hd = q.shape
        pages, page_size, kvh, vd, cache_code = _cache_sizes(k_cache, v_cache, hd)
        if nh % kvh:
            _bad("q", q, f"[n, nh, hd] with nh a multiple of the {kvh} key-value heads")
        if window is not None and window < 1:
            raise ValueError(f"window: must be at least 1 or None, got {window}")
        sequences = kv_len.shape[0]
        if page_table.ndim != 2 or page_table.shape[0] != sequences:
            _bad("page_table", page_table, f"[{sequences}, P]")
        columns = page_table.shape[1]
        out = torch.empty(n, nh, vd, dtype=q.dtype)
        status = self._native.paged_attention(
            *(q.data_ptr(), q.stride(0), q.stride(1), n, nh, hd, k_cache.data_ptr(), v_cache.data_ptr()),
            *(pages, page_size, kvh, vd, _dense("page_table", page_table, torch.int32, (sequences, columns))),
            *(columns, columns, _dense("query_start", query_start, torch.int32, (sequences + 1,))),
            *(_dense("kv_len", kv_len, torch.int32, (sequences,)), sequences, scale, window or 0),
            None if sinks is None else _dense("sinks", sinks, torch.float32, (nh,)),
            *(out.data_ptr(), code, cache_code, self.threads),
        )
        if status:
            raise_status(status)
        return out

    def pack_experts(self, gate_up: torch.Tensor, down: torch.Tensor) -> PackedExperts:
        code = _type("gate_up", gate_up)
        if down.ndim != 3:
            _bad("down", down, "[E, h, i]")
        experts, h, i = down.shape
        gate_up_pointer = _dense("gate_up", gate_up, gate_up.dtype, (experts, 2 * i, h))
        down_pointer = _dense("down", down, gate_up.dtype, (experts, h, i))
        packed_gate_up = self._arena.empty(experts * 2 * _panel_elements(i, h, gate_up.dtype), gate_up.dtype)
        packed_down = self._arena.empty(experts * _panel_elements(h, i, gate_up.dtype), gate_up.dtype)
        pointers = (packed_gate_up.data_ptr(), packed_down.data_ptr())
        self._native.pack_experts(gate_up_pointer, down_pointer, code, experts, h, i, *pointers)
        panels = Panels((packed_gate_up, packed_down), pointers)
        nbytes = packed_gate_up.nbytes + packed_down.nbytes
        return PackedExperts(experts, h, i, gate_up.dtype, panels, nbytes)

    def expert_mlp(
        self, x: torch.Tensor, experts: PackedExperts, rows: ExpertRows, out: torch.Tensor
    ) -> None:
        code, out_code, h = _type("x", x), _type("out", out), experts.hidden_size
        if x.ndim != 2 or x.shape[1] != h:
            _bad("x", x, f"[*, {h}]")
        if out.ndim != 2 or out.shape[1] != h or (out_code != code and out_code != 0):
            _bad("out", out, f"float32 or {x.dtype} [*, {h}]")
        listed = rows.source.shape[0]
        status = self._native.expert_mlp(
            *(x.data_ptr(), x.shape[0], x.stride(0), *experts.data.pointers),
            *(experts.num_experts, h, experts.intermediate_size),
            _dense("rows.offsets", rows.offsets, torch.int64, (experts.num_experts + 1,)),
            *(listed, _dense("rows.source", rows.source, torch.int64, (listed,))),
            _dense("rows.target", rows.target, torch.int64, (listed,)),
            _dense("rows.weight", rows.weight, torch.float32, (listed,)),
            *(out.data_ptr(), out.shape[0], out.stride(0)),
            *(code, _TYPES[experts.dtype], out_code, self.threads),
        )
        if status:
            raise_status(status)

    def draw(
        self,
        logits: torch.Tensor,
        *,
        temperature: torch.Tensor,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
        min_p: torch.Tensor,
        uniforms: torch.Tensor,
    ) -> torch.Tensor:
        return torch_draw.draw(
            logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, uniforms=uniforms
        )

    def sum_lanes(self, rows: torch.Tensor, ids: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
        code = _type("rows", rows)
        if rows.ndim != 3:
            _bad("rows", rows, "[n, k, h]")
        n, k, h = rows.shape
        out = torch.empty(n, h, dtype=out_dtype)
        self._native.sum_lanes(
            *(rows.data_ptr(), rows.stride(0), rows.stride(1), _dense("ids", ids, torch.int64, (n, k))),
            *(n, k, h, out.data_ptr(), code, _type("out_dtype", out), self.threads),
        )
        return out


def _cache_sizes(k_cache: torch.Tensor, v_cache: torch.Tensor, hd: int) -> tuple[int, int, int, int, int]:
    """(pages, page_size, kvh, vd, type code) of one layer's cache."""
    if k_cache.ndim != 4 or k_cache.shape[3] != hd or not k_cache.is_contiguous():
        _bad("k_cache", k_cache, f"contiguous [pages, page_size, kvh, {hd}]")
    pages, page_size, kvh, _ = k_cache.shape
    if v_cache.shape[:3] != k_cache.shape[:3] or v_cache.ndim != 4 or not v_cache.is_contiguous():
        _bad("v_cache", v_cache, f"contiguous [{pages}, {page_size}, {kvh}, vd]")
    code = _type("k_cache", k_cache)
    if _type("v_cache", v_cache) != code:
        _bad("v_cache", v_cache, f"{k_cache.dtype} like k_cache")
    return pages, page_size, kvh, v_cache.shape[3], code
