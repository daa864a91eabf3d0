"""Launches of the dense GEMMs: ``linear_gemm``, ``linear_stream``, ``linear_tiles``.

Legend: n rows of x, N result columns, K depth.
"""

from __future__ import annotations

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as BoxDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from interlock.kernels.triton.expert_tensors import GROUP
from interlock.kernels.triton.linear_gemm import linear_fp8_kernel
from interlock.kernels.triton.linear_stream import stream_kernel
from interlock.kernels.triton.linear_tiles import tiles_kernel
from interlock.kernels.triton.tuned_linear import Simple, Stream, Tiles

REGISTERS = 65536
STREAM_THREADS = 256
"""Threads of a program of ``linear_stream``: four warps that multiply, one that feeds, three that idle."""


def launch(
    config: Simple | Stream | Tiles,
    x: torch.Tensor,
    x_scales: torch.Tensor | None,
    weight: torch.Tensor,
    scales: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """x [n, K] @ weight [N, K].T -> [n, N], float32 accumulation, rounded once.

    fp8: x and weight e4m3, x_scales float32 [K / 128, n], scales float32 [ceil(N / 128), K / 128]. bfloat16
    (``Stream`` only): no scales. x is contiguous.
    """
    rows, width = x.shape[0], weight.shape[0]
    splits = 1 if isinstance(config, Tiles) else config.splits
    if splits > 1:
        parts = torch.empty(splits, rows, width, dtype=torch.float32, device=x.device)
    else:
        parts = torch.empty(1, rows, width, dtype=out_dtype, device=x.device)
    if isinstance(config, Stream):
        _stream(config, x, x_scales, weight, scales, parts)
    elif x_scales is None or scales is None:
        raise TypeError(f"{config} computes fp8 only, and got no scales")
    elif isinstance(config, Tiles):
        _tiles(config, x, x_scales, weight, scales, parts[0])
    else:
        _simple(config, x, x_scales, weight, scales, parts)
    return parts[0] if splits == 1 else parts.sum(0).to(out_dtype)


def _simple(
    config: Simple,
    x: torch.Tensor,
    x_scales: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    parts: torch.Tensor,
) -> None:
    (rows, depth), width = x.shape, weight.shape[0]
    tiles = -(-width // config.block_n) * -(-rows // config.block_rows)
    linear_fp8_kernel[(tiles, config.splits)](
        x, x_scales, TensorDescriptor.from_tensor(weight, [config.block_n, GROUP]), scales, parts,
        rows, x_scales.stride(0), width, parts.stride(0), depth=depth, width=width,
        block_rows=config.block_rows, block_n=config.block_n, splits=config.splits, stages=config.stages,
        num_warps=config.warps,
    )  # fmt: skip


def _stream(
    config: Stream,
    x: torch.Tensor,
    x_scales: torch.Tensor | None,
    weight: torch.Tensor,
    scales: torch.Tensor | None,
    parts: torch.Tensor,
) -> None:
    (rows, depth), width = x.shape, weight.shape[0]
    tiles = -(-width // config.block_n) * -(-rows // config.block_rows)
    options: dict[str, object] = {"launch_pdl": config.early}
    if config.resident > 1:
        options["maxnreg"] = REGISTERS // STREAM_THREADS // config.resident
    stream_kernel[(tiles, config.splits)](
        _boxes(x, config.block_rows), x_scales, _boxes(weight, config.block_n), scales, parts,
        rows, 0 if x_scales is None else x_scales.stride(0), parts.stride(1), parts.stride(0),
        depth=depth, width=width, block_rows=config.block_rows, block_n=config.block_n,
        splits=config.splits, boxes=config.boxes, stages=config.stages, fp8=scales is not None,
        weights_first=config.weights_first, early=config.early, num_warps=4, **options,
    )  # fmt: skip


def _tiles(
    config: Tiles,
    x: torch.Tensor,
    x_scales: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    out: torch.Tensor,
) -> None:
    (rows, depth), width = x.shape, weight.shape[0]
    tiles = -(-width // config.columns) * -(-rows // 128)
    programs = torch.cuda.get_device_properties(x.device).multi_processor_count
    tiles_kernel[(min(tiles, programs),)](
        _boxes(x, 64), x_scales, _boxes(weight, 64 if config.from_registers else 128), scales, out,
        rows, x_scales.stride(0), out.stride(0), depth=depth, width=width, columns=config.columns,
        from_registers=config.from_registers, band=config.band, stages=config.stages, num_warps=4,
    )  # fmt: skip


def _boxes(matrix: torch.Tensor, rows: int) -> BoxDescriptor:
    """A descriptor of ``matrix`` in boxes of ``rows`` rows by 128 bytes."""
    fp8 = matrix.dtype == torch.float8_e4m3fn
    block = [rows, 128 if fp8 else 64]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.float8e4nv if fp8 else gl.bfloat16)
    return BoxDescriptor.from_tensor(matrix, block, layout)
