"""Every kernel in plain torch: the meaning that all other implementations are compared with.

Any device and any float dtype; float64 inputs are computed in float64, everything else in float32.
"""

from __future__ import annotations

import torch

from interlock.kernels import torch_draw
from interlock.kernels.base import CompileShare, ExpertRows, PackedExperts, PackedWeight
from interlock.kernels.fp8_blocks import Fp8Blocks, linear_w8a8


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in the dtype that sums are computed in."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _store(cache: torch.Tensor, slots: torch.Tensor, values: torch.Tensor) -> None:
    """Write rows to a cache; e4m3, which has no infinity, takes the largest it has in place of more."""
    if cache.dtype == torch.float8_e4m3fn:
        bits = values.clamp(-448, 448).to(cache.dtype).view(torch.uint8)
        cache.view(torch.uint8).flatten(0, 1)[slots] = bits
    else:
        cache.flatten(0, 1)[slots] = values.to(cache.dtype)


def _read(cache: torch.Tensor, pages: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Rows of a cache."""
    if cache.dtype == torch.float8_e4m3fn:
        return cache.view(torch.uint8)[pages, places].view(cache.dtype)
    return cache[pages, places]


def _silu(gate: torch.Tensor) -> torch.Tensor:
    return gate / (1 + torch.exp(-gate))


class TorchKernels:
    """Reference implementation of ``Kernels``; readable first, on any device."""

    name = "torch"
    row_invariant = False

    def compiler(self, share: CompileShare) -> None:
        """Nothing is compiled at a launch."""

    def pack_linear(self, weight: torch.Tensor) -> PackedWeight:
        out_features, in_features = weight.shape
        return PackedWeight(out_features, in_features, weight.dtype, weight, weight.nbytes)

    def pack_linear_fp8(self, weight: torch.Tensor, scales: torch.Tensor | None = None) -> PackedWeight:
        blocks = Fp8Blocks.quantised(weight) if scales is None else Fp8Blocks(weight, scales)
        return PackedWeight(*blocks.shape, blocks.values.dtype, blocks, blocks.nbytes)

    def linear(
        self, x: torch.Tensor, weight: PackedWeight, *, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        if isinstance(weight.data, Fp8Blocks):
            return linear_w8a8(x, weight.data, out_dtype or x.dtype)
        wide, rows = _wide(x), weight.data
        assert isinstance(rows, torch.Tensor)
        return (wide @ rows.to(wide.dtype).T).to(out_dtype or x.dtype)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = _wide(x)
        normalised = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (_wide(normalised.to(x.dtype)) * _wide(weight)).to(x.dtype)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + residual
        return self.rms_norm(total, weight, eps), total

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = _wide(gate_up).chunk(2, dim=-1)
        return (_silu(gate) * up).to(gate_up.dtype)

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
        half = cos_sin.shape[1] // 2
        angles = cos_sin[positions].unsqueeze(1)
        cos, sin = angles[..., :half], angles[..., half:]

        def rotate(heads: torch.Tensor) -> torch.Tensor:
            wide = _wide(heads)
            first, second, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
            return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)

        live = slots >= 0
        _store(k_cache, slots[live], rotate(k)[live])
        _store(v_cache, slots[live], _wide(v)[live] * value_scale)
        return rotate(q).to(q.dtype)

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
        out = q.new_zeros(q.shape[0], q.shape[1], v_cache.shape[-1])
        starts = query_start.tolist()
        for sequence, length in enumerate(kv_len.tolist()):
            begin, end = starts[sequence], starts[sequence + 1]
            if begin == end:
                continue
            positions = torch.arange(length - (end - begin), length, device=q.device)
            first_key = 0 if window is None else max(0, int(positions[0]) - window + 1)
            keys = torch.arange(first_key, length, device=q.device)
            page_size = k_cache.shape[1]
            pages = page_table[sequence].long()[keys // page_size]
            k, v = (_read(cache, pages, keys % page_size) for cache in (k_cache, v_cache))
            visible = keys[None, :] <= positions[:, None]
            if window is not None:
                visible &= keys[None, :] > positions[:, None] - window
            out[begin:end] = _attend(q[begin:end], k, v, visible, scale, sinks).to(q.dtype)
        return out

    def pack_experts(self, gate_up: torch.Tensor, down: torch.Tensor) -> PackedExperts:
        num_experts, hidden_size, intermediate_size = down.shape
        nbytes = gate_up.nbytes + down.nbytes
        return PackedExperts(
            num_experts, hidden_size, intermediate_size, gate_up.dtype, (gate_up, down), nbytes
        )

    def expert_mlp(
        self, x: torch.Tensor, experts: PackedExperts, rows: ExpertRows, out: torch.Tensor
    ) -> None:
        gate_up, down = experts.data
        offsets = rows.offsets.tolist()
        for expert in range(experts.num_experts):
            listed = slice(offsets[expert], offsets[expert + 1])
            if listed.start == listed.stop:
                continue
            wide = _wide(x[rows.source[listed]])
            gate, up = (wide @ gate_up[expert].to(wide.dtype).T).chunk(2, dim=-1)
            activation = _wide((_silu(gate) * up).to(x.dtype))
            result = activation @ down[expert].to(wide.dtype).T
            out[rows.target[listed]] = (result * rows.weight[listed, None]).to(out.dtype)

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
        wide = _wide(rows)
        total = wide.new_zeros(rows.shape[0], rows.shape[2])
        for lane in range(rows.shape[1]):
            total = torch.where(ids[:, lane, None] >= 0, total + wide[:, lane], total)
        return total.to(out_dtype)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """q [t, nh, hd], k [keys, kvh, hd], v [keys, kvh, vd], visible bool [t, keys] -> [t, nh, vd]."""
    group = q.shape[1] // k.shape[1]
    k, v = (_wide(cached).repeat_interleave(group, dim=1) for cached in (k, v))
    scores = torch.einsum("thd,khd->htk", _wide(q), k.to(_wide(q).dtype)) * scale
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        sink_column = sinks.to(scores.dtype)[:, None, None].expand(-1, scores.shape[1], 1)
        scores = torch.cat((scores, sink_column), dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : k.shape[0]]
    return torch.einsum("htk,khd->thd", weights, v.to(weights.dtype))
