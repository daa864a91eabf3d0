"""What an expert runner declares, and what it does. No torch at import time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from interlock.moe.terms import Layout

if TYPE_CHECKING:
    import torch

    from interlock.kernels.base import Kernels
    from interlock.kernels.fp8_blocks import Fp8Blocks
    from interlock.moe.a2a.rows import ExpertInput, ReplicatedRows


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRunner:
    """Capabilities of one runner, joined by the planner with those of the a2a backends.

    Attributes:
        layouts: layouts of rows it can compute.
        weight_formats: checkpoint formats it can load: "float32", "bfloat16", "fp8_block".
        dequantises: fp8 weights are turned into the activation dtype while loading (memory!). A runner that
            does not implements ``LoadsFp8`` and is given the checkpoint's blocks as they are.
        min_capability, max_capability: compute capabilities of NVIDIA GPUs it is written for, both included.
        hidden_multiple: what the hidden size must be a multiple of.
        activation_dtypes: dtypes of rows and results: "float32", "bfloat16".
        row_dtypes: what rows may arrive as: those, or "fp8" with scales.
        devices: "cpu", "cuda".
        kernels: kernel sets it works with; empty for any.
        packages: distributions that must be installed.
        row_invariant: with row-invariant kernels, a row's bits do not depend on the rows beside it.
        rounds_gate_up: gate and up are rounded to the activation dtype before SwiGLU, for any number of rows.
        missing: what this version lacks to run it on any machine; "" when it lacks nothing.
        capturable: it never waits for the device, and its launches follow from shapes alone, so a CUDA graph
            can capture it.
        alignment: multiple at which it needs expert segments of the contiguous layout to start.
        priority: among the runners that fit, ``auto`` takes the highest (emulation -10, reference 0,
            portable 10, fast 20, specialised 30).
        runner: "module:Class", constructed with a ``RunnerSpec``.
    """

    name: str
    summary: str
    layouts: frozenset[Layout]
    weight_formats: frozenset[str]
    activation_dtypes: frozenset[str]
    devices: frozenset[str]
    runner: str
    dequantises: bool = True
    row_dtypes: frozenset[str] = frozenset({"float32", "bfloat16"})
    kernels: frozenset[str] = frozenset()
    packages: tuple[str, ...] = ()
    row_invariant: bool = False
    capturable: bool = False
    rounds_gate_up: bool = False
    alignment: int = 1
    min_capability: tuple[int, int] = (0, 0)
    max_capability: tuple[int, int] | None = None
    hidden_multiple: int = 1
    missing: str = ""
    priority: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerSpec:
    """Everything the runner of one layer is built from.

    Attributes:
        num_experts: L, experts held by this rank.
        intermediate_size: i, the slice of the expert width that this rank holds.
        routed_experts: E of the model, of which this rank holds ``num_experts``; None for the same.
        dtype: of activations and, unless the runner keeps a quantised format, of weights.
    """

    num_experts: int
    hidden_size: int
    intermediate_size: int
    dtype: torch.dtype
    device: torch.device
    kernels: Kernels
    routed_experts: int | None = None

    def local_rows(self, lanes: int) -> int:
        """How many of ``lanes`` of replicated rows this rank computes when routing is uniform; at least 1."""
        return max(1, lanes * self.num_experts // (self.routed_experts or self.num_experts))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerReceipt:
    """What a live runner observed of itself. ``calls`` counts ``run``; ``rows`` the rows it computed."""

    name: str
    runner: str
    weight_format: str
    dtype: str
    weight_bytes: int
    calls: int
    rows: int
    extra: Mapping[str, object] = field(default_factory=dict)


class ExpertFill(Protocol):
    """Made-up weights for all experts of a rank at once, written where the runner keeps them.

    ``values`` float [E, N, K], or e4m3 with ``scales`` float32 [E, N / 128, K / 128]; contiguous.
    """

    def gate_up(self, values: torch.Tensor, scales: torch.Tensor | None) -> None:
        """Fill [E, 2i, h], gate rows first."""
        ...

    def down(self, values: torch.Tensor, scales: torch.Tensor | None) -> None:
        """Fill [E, h, i]."""
        ...


@runtime_checkable
class LoadsFp8(Protocol):
    """A runner that keeps block-fp8 weights (``ExpertRunner.dequantises`` is False)."""

    def load_expert_fp8(self, local_id: int, gate: Fp8Blocks, up: Fp8Blocks, down: Fp8Blocks) -> None:
        """As ``Runner.load_expert``, from the checkpoint's blocks; copied as they are."""
        ...


@runtime_checkable
class FillsExperts(Protocol):
    """A runner that can have all its weights made up at once, in place of ``load_expert``."""

    def fill_experts(self, fill: ExpertFill) -> None:
        """Let ``fill`` write the weights of all experts where they are kept."""
        ...


@runtime_checkable
class SumsLanes(Protocol):
    """A runner that can add up a token's lanes itself, sparing a pass over [N, k, h]."""

    def run_summed(self, rows: ReplicatedRows, dtype: torch.dtype) -> torch.Tensor:
        """``Runner.run`` of replicated rows, then the sum over each token's lanes -> [N, h].

        Lanes are added in ascending order in float32 and rounded once to ``dtype``; -1 lanes add nothing.
        """
        ...


class Runner(Protocol):
    """The experts of one layer on one rank."""

    def load_expert(self, local_id: int, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> None:
        """gate, up [i, h], down [h, i] of local expert ``local_id``, any float dtype; copied."""
        ...

    def finish_loading(self) -> None:
        """Pack for speed. Raises CheckpointError when an expert was not loaded."""
        ...

    def run(self, rows: ExpertInput) -> torch.Tensor:
        """weight * down(silu(gate x) * up x) for every filled row, in the layout of ``rows``.

        The intermediate activation and the result are rounded to the activation dtype; sums are float32.
        Rows that are not filled (see the layouts) are neither read nor defined in the result.
        """
        ...

    def observed(self) -> RunnerReceipt: ...
