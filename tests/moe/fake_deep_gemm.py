"""DeepGEMM's grouped products and its dense one in float64, with its checks of shapes and strides.

Like the library it stores whole blocks of rows: what lies in a block beyond the count is overwritten (NaN).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

BLOCK_ROWS = 128


@dataclass
class FakeModule:
    """Stands in for the package; remembers the calls."""

    calls: list[tuple[str, dict[str, object]]] = field(default_factory=list)

    def m_grouped_fp8_gemm_nt_contiguous(self, a, b, d, grouped_layout, **options) -> None:
        (values, scales), (weight, weight_scales) = a, b
        assert options["use_psum_layout"] is True
        self.calls.append(("contiguous", dict(options)))
        rows = values.shape[0]
        check_operands(values, scales, weight, weight_scales, rows)
        assert scales.stride() == (1, (rows + 3) // 4 * 4)
        assert grouped_layout.dtype == torch.int32
        assert grouped_layout.shape == (weight.shape[0],)
        assert d.shape == (rows, weight.shape[1])
        assert d.dtype == torch.bfloat16
        start = 0
        for expert, end in enumerate(grouped_layout.tolist()):
            start = -(-start // BLOCK_ROWS) * BLOCK_ROWS
            d[start : start - (start - end) // BLOCK_ROWS * BLOCK_ROWS] = float("nan")
            d[start:end] = product(
                values[start:end], scales[start:end], weight[expert], weight_scales[expert]
            )
            start = end

    def fp8_gemm_nt(self, a, b, d, *, compiled_dims: str) -> None:
        (values, scales), (weight, weight_scales) = a, b
        self.calls.append(("dense", {"compiled_dims": compiled_dims, "shape": tuple(d.shape)}))
        rows = values.shape[0]
        check_operands(values, scales, weight[None], weight_scales[None], rows)
        assert scales.stride() == (1, (rows + 3) // 4 * 4)
        assert d.shape == (rows, weight.shape[0])
        assert d.dtype == torch.bfloat16
        d.copy_(product(values, scales, weight, weight_scales))

    def fp8_m_grouped_gemm_nt_masked(self, a, b, d, masked_m, expected_m, **options) -> None:
        (values, scales), (weight, weight_scales) = a, b
        self.calls.append(("masked", {"expected_m": expected_m, **options}))
        experts, slab_rows, depth = values.shape
        assert expected_m > 0
        for expert in range(experts):
            check_operands(values[expert], scales[expert], weight, weight_scales, slab_rows)
        padded = (slab_rows + 3) // 4 * 4
        flat = d.view(experts * slab_rows, -1)
        assert scales.stride() == (padded * (depth // 128), 1, padded)
        assert masked_m.dtype == torch.int32
        assert d.shape == (experts, slab_rows, weight.shape[1])
        for expert, count in enumerate(masked_m.tolist()):
            d[expert, :count] = product(
                values[expert, :count], scales[expert, :count], weight[expert], weight_scales[expert]
            )
        for expert, count in enumerate(masked_m.tolist()):
            first = expert * slab_rows
            flat[first + count : first - (-count // BLOCK_ROWS) * BLOCK_ROWS] = float("nan")


def check_operands(values, scales, weight, weight_scales, rows: int) -> None:
    depth = values.shape[1]
    assert values.dtype == weight.dtype == torch.float8_e4m3fn
    assert values.stride() == (depth, 1)
    assert weight.is_contiguous()
    assert weight_scales.is_contiguous()
    assert scales.dtype == weight_scales.dtype == torch.float32
    assert scales.shape == (rows, depth // 128)
    assert weight_scales.shape == (weight.shape[0], -(-weight.shape[1] // 128), depth // 128)


def product(values, scales, weight, weight_scales) -> torch.Tensor:
    left = (values.double().unflatten(1, (-1, 128)) * scales.double()[:, :, None]).flatten(1)
    spread = weight_scales.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    return (left @ (weight.double() * spread[: weight.shape[0]]).T).to(torch.bfloat16)
