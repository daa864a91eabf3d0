"""Rows are quantised where they are made, for linears that hold fp8 blocks, and the numbers stay the same."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from interlock.kernels.base import PackedWeight, QuantisedRows, QuantisingKernels
from interlock.kernels.torch_reference import TorchKernels
from interlock.kernels.triton.row_blocks import reference_quantise
from tests import harness
from tests.harness import build_model, run_chunks
from tests.models.prompts import PROMPT
from tests.tiny import flash, tiny_folder

FP8 = "fp8_block"
SPEC = flash(fp8=True, layers=3, intermediate_size=384, moe_intermediate_size=128)


class Quantising(TorchKernels):
    """Quantises in steps of its own, and counts what it is asked for."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def add_rms_norm_quantised(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[QuantisedRows, torch.Tensor]:
        self.calls["norm"] += 1
        if residual is None:
            return self._quantised(self.rms_norm(x, weight, eps)), x
        normed, total = self.add_rms_norm(x, residual, weight, eps)
        return self._quantised(normed), total

    def silu_and_mul_quantised(self, gate_up: torch.Tensor) -> QuantisedRows:
        self.calls["silu"] += 1
        return self._quantised(self.silu_and_mul(gate_up))

    def linear_quantised(
        self, rows: QuantisedRows, weight: PackedWeight, *, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        self.calls["linear"] += 1
        wide = rows.values.float() * rows.scales.T.repeat_interleave(128, 1)
        return (wide @ weight.data.dequantised(torch.float32).T).to(out_dtype or rows.dtype)

    @staticmethod
    def _quantised(x: torch.Tensor) -> QuantisedRows:
        return QuantisedRows(*reference_quantise(x), x.dtype)


@pytest.fixture
def quantising(monkeypatch) -> Quantising:
    kernels = Quantising()
    assert isinstance(kernels, QuantisingKernels)
    monkeypatch.setattr(harness, "get_kernels", lambda name, threads: kernels)
    return kernels


HELD = {
    "attention only": ({"attention_weight_format": FP8}, {"norm": 3, "linear": 3}),
    "both": (
        {"attention_weight_format": FP8, "mlp_weight_format": FP8},
        {"norm": 4, "silu": 1, "linear": 5},
    ),
    "neither": ({}, {}),
}


@pytest.mark.parametrize("name", HELD)
def test_each_linear_with_blocks_reads_quantised_rows(quantising: Quantising, name: str) -> None:
    """Three layers, the first dense; the other layers' experts read rows in the model's dtype."""
    held, wanted = HELD[name]
    run_chunks(build_model(tiny_folder(SPEC), kernels="torch", **held), PROMPT)
    assert quantising.calls == wanted


def test_the_numbers_are_those_of_separate_steps(monkeypatch) -> None:
    folder = tiny_folder(SPEC)
    held = {"kernels": "torch", "attention_weight_format": FP8, "mlp_weight_format": FP8}
    want = run_chunks(build_model(folder, **held), PROMPT)
    monkeypatch.setattr(harness, "get_kernels", lambda name, threads: Quantising())
    got = run_chunks(build_model(folder, **held), PROMPT)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_plain_kernels_quantise_for_themselves() -> None:
    assert not isinstance(TorchKernels(), QuantisingKernels)
