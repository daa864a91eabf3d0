"""The kernel set "triton": ``Kernels`` on an NVIDIA GPU of compute capability 9.0.

Bits of a row depend on the rows beside it (tiles and splits are chosen by the number of rows), so the set
does not promise ``row_invariant``. Weights are bfloat16 or block-fp8; float32 linear weights go through
torch.
"""

from __future__ import annotations

import torch

from interlock.kernels.base import CompileShare, ExpertRows, PackedExperts, PackedWeight, QuantisedRows
from interlock.kernels.triton import attention, draw, linear, moe, norm, rope, row_lists
from interlock.kernels.triton.compile_ahead import TritonCompiler
from interlock.kernels.triton.dense_products import DenseProducts
from interlock.kernels.triton.expert_tensors import GROUP, ExpertTensors, pad_width, quantise_blocks
from interlock.kernels.triton.row_blocks import RowLists
from interlock.kernels.triton.tuned import MoeConfig, MoeShape, load_table, nearest


class TritonKernels:
    """``Kernels`` in Triton. Every method only launches: nothing synchronises with the host."""

    name = "triton"
    row_invariant = False

    def __init__(self) -> None:
        self._products: DenseProducts | None = None

    def take_dense_products(self, products: DenseProducts) -> None:
        """See ``TakesDenseProducts``."""
        self._products = products

    def compiler(self, share: CompileShare) -> TritonCompiler:
        return TritonCompiler(share)

    def pack_linear(self, weight: torch.Tensor) -> PackedWeight:
        rows, depth = weight.shape
        return PackedWeight(rows, depth, weight.dtype, weight, weight.nbytes)

    def pack_linear_fp8(self, weight: torch.Tensor, scales: torch.Tensor | None = None) -> PackedWeight:
        """e4m3 [N, K] with block scales, or a float weight that is quantised; used with fp8 activations."""
        return linear.pack_fp8(weight, scales)

    def linear(
        self, x: torch.Tensor, weight: PackedWeight, *, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        return linear.linear(x, weight, out_dtype=out_dtype, products=self._products)

    def linear_quantised(
        self, rows: QuantisedRows, weight: PackedWeight, *, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        return linear.linear_fp8(rows.values, rows.scales, weight, out_dtype or rows.dtype, self._products)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return norm.rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return norm.add_rms_norm(x, residual, weight, eps)

    def add_rms_norm_quantised(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[QuantisedRows, torch.Tensor]:
        return norm.add_rms_norm_quantised(x, residual, weight, eps)

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return norm.silu_and_mul(gate_up)

    def silu_and_mul_quantised(self, gate_up: torch.Tensor) -> QuantisedRows:
        return norm.silu_and_mul_quantised(gate_up)

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
        return rope.rope_and_store(
            q,
            k,
            v,
            positions=positions,
            cos_sin=cos_sin,
            k_cache=k_cache,
            v_cache=v_cache,
            slots=slots,
            value_scale=value_scale,
        )

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
        return attention.paged_attention(
            q,
            k_cache=k_cache,
            v_cache=v_cache,
            page_table=page_table,
            query_start=query_start,
            kv_len=kv_len,
            scale=scale,
            window=window,
            sinks=sinks,
            max_keys=max_keys,
        )

    def pack_experts(self, gate_up: torch.Tensor, down: torch.Tensor) -> PackedExperts:
        if gate_up.dtype != torch.bfloat16:
            raise TypeError(f"the triton kernels compute bfloat16 or block-fp8 experts, not {gate_up.dtype}")
        hidden = down.shape[1]
        if hidden % 8:
            raise ValueError(f"bfloat16 experts need a hidden size that is a multiple of 8, got {hidden}")
        return _packed(
            down.shape[2], ExpertTensors(*(part.contiguous() for part in pad_width(gate_up, down)))
        )

    def pack_experts_fp8(self, gate_up: torch.Tensor, down: torch.Tensor) -> PackedExperts:
        """Quantise float gate_up [E, 2i, h] and down [E, h, i] to e4m3 with scales of 128 x 128 blocks."""
        hidden, inter = down.shape[1:]
        if hidden % GROUP:
            raise ValueError(f"block-fp8 experts need a hidden size in multiples of {GROUP}, got {hidden}")
        padded = [pad_width(gate_up[expert, None], down[expert, None]) for expert in range(down.shape[0])]
        gates, downs = ([quantise_blocks(pair[side][0]) for pair in padded] for side in (0, 1))
        tensors = ExpertTensors(
            torch.stack([values for values, _ in gates]),
            torch.stack([values for values, _ in downs]),
            torch.stack([scales for _, scales in gates]),
            torch.stack([scales for _, scales in downs]),
        )
        return _packed(inter, tensors)

    def expert_mlp(
        self, x: torch.Tensor, experts: PackedExperts, rows: ExpertRows, out: torch.Tensor
    ) -> None:
        """See ``Kernels.expert_mlp``. With fp8 experts x and the intermediate activation are quantised."""
        places = rows.source.shape[0]
        if places == 0:
            return
        config = moe_config(experts, places)
        psum = rows.offsets[1:].to(torch.int32)
        counts = psum - rows.offsets[:-1].to(torch.int32)
        cuts = row_lists.segment_lists(counts, psum, 0, places, rows.weight, config.block_rows)
        lists = RowLists(
            rows.source.to(torch.int32),
            rows.target.to(torch.int32),
            rows.weight,
            cuts.blocks,
            cuts.block_count,
            cuts.end,
            places=places,
            block_rows=config.block_rows,
        )
        moe.compute(x, None, experts.data, lists, out, config)

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
        return draw.draw(
            logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, uniforms=uniforms
        )

    def sum_lanes(self, rows: torch.Tensor, ids: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
        return moe.sum_lanes(rows, ids, out_dtype)


def moe_config(experts: PackedExperts, rows: int) -> MoeConfig:
    """Launch parameters for ``rows`` routed rows: the nearest entry of the tuned table."""
    shape = MoeShape(
        experts.num_experts,
        experts.hidden_size,
        experts.intermediate_size,
        "fp8" if experts.data.fp8 else "bfloat16",
    )
    return nearest(load_table(), shape, rows)


def _packed(inter: int, tensors: ExpertTensors) -> PackedExperts:
    experts, hidden, _ = tensors.down.shape
    return PackedExperts(experts, hidden, inter, tensors.gate_up.dtype, tensors, tensors.nbytes)
