"""Both Triton runners but for their weights: row lists of each layout, launch parameters, results in place.

Nothing synchronises with the host, and all sizes follow from the shapes of the input, so ``run`` can be
captured in a CUDA graph.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from interlock.kernels.triton import moe, row_lists
from interlock.kernels.triton.expert_tensors import ExpertTensors, pad_width
from interlock.kernels.triton.row_blocks import RowLists
from interlock.kernels.triton.tuned import MoeConfig, MoeShape, load_table, nearest
from interlock.moe.a2a.rows import ContiguousRows, ExpertInput, MaskedRows, ReplicatedRows
from interlock.moe.experts.base import ExpertFill, RunnerReceipt, RunnerSpec
from interlock.moe.experts.triton import RUNNER
from interlock.moe.experts.weights import ExpertWeights
from interlock.moe.fp8_rows import dequantise_rows

SLAB_FILL = 32
"""A slab has room for every token at every expert; launch parameters suit one row in so many being filled
(E / k of MiMo-V2 and DeepSeek-V3 with uniform routing)."""


class GroupedRunner(ABC):
    """What the Triton runners share; a subclass holds the weights."""

    name: str
    weight_format: str

    def __init__(self, spec: RunnerSpec) -> None:
        self._spec = spec
        self._tensors: ExpertTensors | None = None
        self._configs: dict[int, MoeConfig] = {}
        self._calls = 0
        self._rows = 0

    @abstractmethod
    def load_expert(self, local_id: int, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> None:
        """See ``Runner.load_expert``."""

    @abstractmethod
    def finish_loading(self) -> None:
        """See ``Runner.finish_loading``."""

    def run(self, rows: ExpertInput) -> torch.Tensor:
        """See ``Runner.run``."""
        if self._tensors is None:
            raise RuntimeError("run was called before finish_loading")
        hidden = self._spec.hidden_size
        lead = rows.ids.shape if isinstance(rows, ReplicatedRows) else rows.rows.shape[:-1]
        out = rows.results if isinstance(rows, MaskedRows) else None
        if out is None:
            out = torch.empty(*lead, hidden, dtype=self._spec.dtype, device=rows.rows.device)
        places = out.numel() // hidden
        if places:
            x = rows.rows.reshape(-1, hidden)
            scales = None if rows.scales is None else rows.scales.reshape(len(x), -1)
            if scales is not None and not self._tensors.fp8:
                x, scales = dequantise_rows(x, scales, self._spec.dtype), None
            config = self._config(self._filled(rows, places))
            if self._tensors.fp8 and isinstance(rows, ReplicatedRows) and scales is None:
                lists, x, scales = self._lists_and_rows(rows, config)
            else:
                lists = self._row_lists(rows, places, config.block_rows)
            moe.compute(x, scales, self._tensors, lists, out.view(-1, hidden), config)
        self._calls += 1
        self._rows += places
        return out

    def observed(self) -> RunnerReceipt:
        """See ``Runner.observed``. ``rows`` counts places: lanes without an expert are among them."""
        return RunnerReceipt(
            name=self.name,
            runner=f"{type(self).__module__}:{type(self).__qualname__}",
            weight_format=self.weight_format,
            dtype="bfloat16",
            weight_bytes=0 if self._tensors is None else self._tensors.nbytes,
            calls=self._calls,
            rows=self._rows,
        )

    def _filled(self, rows: ExpertInput, places: int) -> int:
        """How many of the places hold a row when routing is uniform; launch parameters go by it."""
        if isinstance(rows, ReplicatedRows):
            return self._spec.local_rows(places)
        return max(1, places // SLAB_FILL) if isinstance(rows, MaskedRows) else places

    def _lists_and_rows(
        self, rows: ReplicatedRows, config: MoeConfig
    ) -> tuple[RowLists, torch.Tensor, torch.Tensor | None]:
        """Lists, and rows quantised beside them (scales [n, h / 128]) where the GEMMs gather them."""
        if config.pipelined:
            return self._row_lists(rows, rows.ids.numel(), config.block_rows), rows.rows, None
        held, lanes = self._spec.num_experts, rows.ids.numel()
        lists, values, scales = row_lists.lists_and_rows(
            rows.rows,
            rows.ids,
            rows.weights,
            held,
            config.block_rows,
            sparse=self._spec.local_rows(lanes) < lanes,
        )
        return lists, values, scales.T

    def _row_lists(self, rows: ExpertInput, places: int, block_rows: int) -> RowLists:
        if isinstance(rows, ReplicatedRows):
            held = self._spec.num_experts
            sparse = self._spec.local_rows(places) < places
            return row_lists.token_lists(rows.ids, rows.weights, held, block_rows, sparse=sparse)
        weights = None if rows.weights is None else rows.weights.reshape(-1)
        if isinstance(rows, ContiguousRows):
            return row_lists.segment_lists(rows.counts, rows.psum, 0, places, weights, block_rows)
        return row_lists.segment_lists(rows.counts, None, rows.rows.shape[1], places, weights, block_rows)

    def _config(self, rows: int) -> MoeConfig:
        if rows not in self._configs:
            spec = self._spec
            kind = "fp8" if self.weight_format == "fp8_block" else "bfloat16"
            shape = MoeShape(spec.num_experts, spec.hidden_size, spec.intermediate_size, kind)
            self._configs[rows] = nearest(load_table(), shape, rows)
        return self._configs[rows]


class TritonRunner(GroupedRunner):
    """Runner ``triton``."""

    name = RUNNER.name
    weight_format = "bfloat16"

    def __init__(self, spec: RunnerSpec) -> None:
        super().__init__(spec)
        if spec.hidden_size % 8:
            raise ValueError(f"runner triton needs a hidden size in multiples of 8, got {spec.hidden_size}")
        self._loading: ExpertWeights | None = None

    def load_expert(self, local_id: int, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> None:
        """See ``Runner.load_expert``."""
        if self._loading is None:
            self._loading = ExpertWeights(self._spec)
        self._loading.load(local_id, gate, up, down)

    def fill_experts(self, fill: ExpertFill) -> None:
        """See ``FillsExperts.fill_experts``."""
        self._loading = ExpertWeights(self._spec)
        self._loading.fill(fill)

    def finish_loading(self) -> None:
        """See ``Runner.finish_loading``."""
        loading = self._loading or ExpertWeights(self._spec)
        loading.require_all()
        gate_up, down = pad_width(loading.gate_up, loading.down)
        self._tensors = ExpertTensors(gate_up.contiguous(), down.contiguous())
        self._loading = None
