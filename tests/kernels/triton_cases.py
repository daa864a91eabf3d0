"""Inputs and float64 references for the tests of the GPU kernels. No Triton here."""

from __future__ import annotations

import torch

from interlock.kernels.triton.expert_tensors import ExpertTensors
from interlock.kernels.triton.row_blocks import reference_quantise


def relative(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Norm of the difference over the norm of what is wanted; NaN and infinity never pass a bound."""
    return float((got.double() - wanted.double()).norm() / wanted.double().norm().clamp_min(1e-30))


def random_routes(
    tokens: int, k: int, experts: int, *, device: str, seed: int = 0, unused: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """ids int64 [n, k] distinct and ascending, some -1; weights float32 [n, k]."""
    rng = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, experts, generator=rng)
    ids = scores.topk(k, dim=1).indices.sort(dim=1).values
    ids = torch.where(torch.rand(tokens, k, generator=rng) < unused, -1, ids)
    return ids.to(device), torch.rand(tokens, k, generator=rng).to(device)


def wide_expert(tensors: ExpertTensors, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
    """gate_up [2i, h] and down [h, i] of one expert in float64."""
    parts = []
    for weight, scales in (
        (tensors.gate_up, tensors.gate_up_scales),
        (tensors.down, tensors.down_scales),
    ):
        wide = weight[expert].double()
        if scales is not None:
            wide = wide * scales[expert].double().repeat_interleave(128, 0).repeat_interleave(128, 1)
        parts.append(wide)
    return parts[0], parts[1]


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x as the GEMMs see it, in float64: in the dtype of the weights, with a scale for 128 channels for
    e4m3."""
    if dtype != torch.float8_e4m3fn:
        return x.to(dtype).double()
    values, scale = reference_quantise(x.float())
    return (values.double().unflatten(1, (-1, 128)) * scale.T[:, :, None].double()).flatten(1)


def reference_lanes(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    tensors: ExpertTensors,
    *,
    rounds_gate_up: bool = False,
) -> torch.Tensor:
    """Float64 [n, k, h]: weight * down(act) of each lane, zeros for -1; activations rounded as the GEMMs
    do.

    ``rounds_gate_up``: to bfloat16, as GEMMs do that store them. It matters with fp8: one in about 20 values
    of act falls on the neighbouring e4m3 number, 6 % away, which moves the result by 1.0e-2 to 2.4e-2.
    """
    dtype = tensors.down.dtype
    out = torch.zeros(*ids.shape, x.shape[1], dtype=torch.float64, device=x.device)
    seen = rounded(x, dtype)
    for expert in range(tensors.down.shape[0]):
        rows, lanes = (ids == expert).nonzero(as_tuple=True)
        if len(rows) == 0:
            continue
        gate_up, down = wide_expert(tensors, expert)
        product = seen[rows] @ gate_up.T
        if rounds_gate_up:
            product = product.to(torch.bfloat16).double()
        gate, up = product.chunk(2, dim=1)
        act = rounded(torch.nn.functional.silu(gate) * up, dtype)
        out[rows, lanes] = act @ down.T * weights[rows, lanes, None].double()
    return out
