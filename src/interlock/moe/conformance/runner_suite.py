"""The suite of an expert runner, in one process: integer-valued experts exactly, random ones closely.

An exact expert permutes the channels and multiplies them by a power of two: channel 0 of every row is 32, the
gate picks it, and silu(32) is 32 in float32; up picks channel p(j), down divides by 32. So every value
is exact in float32 and a row given to the wrong expert shows.

A runner that keeps fp8 blocks gets random experts whose weights are such blocks, and is compared with
products of the quantised rows and of the quantised intermediate activation.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

import torch

from interlock.kernels.base import Kernels
from interlock.kernels.fp8_blocks import Fp8Blocks
from interlock.moe.a2a.rows import ContiguousRows, ExpertInput, MaskedRows, ReplicatedRows
from interlock.moe.conformance.backend_suite import MAX_FAILURES, RankFindings
from interlock.moe.conformance.received import Mismatch
from interlock.moe.experts.base import ExpertRunner, LoadsFp8, Runner, RunnerSpec
from interlock.moe.fp8_rows import dequantise_rows, quantise_rows
from interlock.moe.layouts import aligned_segments, count_lanes, positions, slab_segments
from interlock.moe.terms import Layout
from interlock.plugins import load_symbol

GATE_VALUE = 32.0
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TOLERANCE = {"float32": 2e-6, "bfloat16": 2e-2}
FP8_TOLERANCE = 3e-2
"""An intermediate value may be rounded to the next e4m3 value where sums differ in their last bit."""


@dataclass(frozen=True, slots=True)
class Experts:
    """gate, up [E, i, h], down [E, h, i] in float32; ``exact`` tells the kind, ``fp8`` that they are values
    of fp8 blocks and that activations are quantised, ``rounds`` that gate and up results become bfloat16."""

    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    exact: bool
    fp8: bool = False
    rounds: bool = False

    def reference(self, expert: int, row: torch.Tensor) -> torch.Tensor:
        """One expert on one row [h], in float64."""
        x = self._seen(row.double())
        gate, up = self.gate[expert].double() @ x, self.up[expert].double() @ x
        if self.rounds:
            gate, up = gate.to(torch.bfloat16).double(), up.to(torch.bfloat16).double()
        hidden = gate * torch.sigmoid(gate) * up
        result: torch.Tensor = self.down[expert].double() @ self._seen(hidden)
        return result

    def _seen(self, values: torch.Tensor) -> torch.Tensor:
        """Activations as the products see them."""
        return dequantise_rows(*quantise_rows(values), torch.float64) if self.fp8 else values


def run_runner_suite(
    runner: ExpertRunner, kernels: Kernels, *, device: str, cases: int, seed: int
) -> RankFindings:
    """``cases`` random cases over the layouts, dtypes and row dtypes that ``runner`` declares."""
    found = RankFindings()
    started = time.monotonic()
    pick = random.Random(seed)
    dtypes = sorted(runner.activation_dtypes & DTYPES.keys())
    while found.cases < cases and len(found.failures) < MAX_FAILURES:
        dtype = pick.choice(dtypes)
        setting = _RunnerSetting(runner, kernels, device, dtype, pick, found.cases)
        for _ in range(min(8, cases - found.cases)):
            try:
                found.coverage.update(setting.run_case())
            except Mismatch as mismatch:
                found.failures.append(f"{mismatch} [case {found.cases}, seed {seed}]")
            found.cases += 1
            found.checks += 1
    found.seconds = time.monotonic() - started
    return found


class _RunnerSetting:
    """One loaded runner and the cases it is given."""

    def __init__(
        self,
        declaration: ExpertRunner,
        kernels: Kernels,
        device: str,
        dtype: str,
        pick: random.Random,
        number: int,
    ) -> None:
        self._declaration = declaration
        self._pick = pick
        self._dtype = dtype
        self._device = torch.device(device)
        self._count = pick.choice((1, 2, 5, 8))
        multiple = declaration.hidden_multiple
        fitting = [size for size in (32, 64, 96, 128) if size % multiple == 0]
        self._hidden = pick.choice(fitting or [multiple]) * (1 if multiple < 128 else pick.choice((1, 2)))
        self._generator = torch.Generator().manual_seed(pick.randrange(2**62))
        exact = number % 16 < 8 and declaration.dequantises
        self._experts = self._exact_experts() if exact else self._random_experts(not declaration.dequantises)
        self._runner: Runner = load_symbol(declaration.runner)(
            RunnerSpec(
                num_experts=self._count,
                hidden_size=self._hidden,
                intermediate_size=self._experts.gate.shape[1],
                dtype=DTYPES[dtype],
                device=self._device,
                kernels=kernels,
            )
        )
        self._load()
        self._row_invariant = declaration.row_invariant and kernels.row_invariant

    def _load(self) -> None:
        """Every expert, as blocks where the runner keeps them."""
        runner = self._runner
        for expert in range(self._count):
            parts = [part[expert] for part in (self._experts.gate, self._experts.up, self._experts.down)]
            if isinstance(runner, LoadsFp8):
                gate, up, down = (Fp8Blocks.quantised(part) for part in parts)
                runner.load_expert_fp8(expert, gate, up, down)
            else:
                runner.load_expert(expert, *parts)
        runner.finish_loading()

    def run_case(self) -> list[str]:
        """One input in one layout; returns what it covered."""
        layout = self._pick.choice(sorted(self._declaration.layouts))
        lanes = self._pick.choice((0, 1, 3, 17, 40))
        row_dtype = self._pick.choice(sorted(self._declaration.row_dtypes & {"fp8", self._dtype}))
        pattern = self._pick.choice(("uniform", "one expert", "unused slots"))
        x, scales = self._rows(lanes, row_dtype)
        experts = torch.randint(0, self._count, (lanes,), generator=self._generator)
        if pattern == "one expert":
            experts[:] = self._count - 1
        if pattern == "unused slots" and layout is Layout.REPLICATED:
            experts[torch.rand(lanes, generator=self._generator) < 0.5] = -1
        weights = 2.0 ** torch.randint(-2, 3, (lanes,), generator=self._generator)
        rows, at = self._lay_out(layout, x, scales, experts, weights)
        what = f"{layout.value}, {lanes} lanes, {row_dtype} rows, {self._dtype}, {pattern}"
        out = self._runner.run(rows)
        self._compare(out, at, x, scales, experts, weights, what)
        if self._row_invariant and lanes > 1:
            self._compare_alone(out, at, x, scales, experts, weights, what)
        kind = "exact experts" if self._experts.exact else "random experts"
        if self._experts.fp8:
            kind = "fp8 experts"
        return [layout.value, row_dtype, self._dtype, pattern, kind]

    def _rows(self, lanes: int, row_dtype: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self._experts.exact:
            x = torch.randint(-7, 8, (lanes, self._hidden), generator=self._generator).float()
            x[:, 0] = GATE_VALUE
        else:
            x = torch.randn(lanes, self._hidden, generator=self._generator)
        if row_dtype != "fp8":
            return x.to(DTYPES[row_dtype]), None
        if self._experts.exact:
            return x.to(torch.float8_e4m3fn), torch.ones(lanes, -(-self._hidden // 128))
        return quantise_rows(x)

    def _lay_out(
        self,
        layout: Layout,
        x: torch.Tensor,
        scales: torch.Tensor | None,
        experts: torch.Tensor,
        weights: torch.Tensor,
    ) -> tuple[ExpertInput, torch.Tensor]:
        """The layout with NaN wherever no lane lies, and the flat row of each lane."""
        device = self._device
        if layout is Layout.REPLICATED:
            ids = torch.stack([experts, torch.full_like(experts, -1)], dim=1)
            both = torch.stack([weights, torch.full_like(weights, torch.nan)], dim=1)
            rows: ExpertInput = ReplicatedRows(
                x.to(device), ids.to(device), both.to(device), None if scales is None else scales.to(device)
            )
            return rows, torch.arange(len(experts)) * 2
        counts = count_lanes(experts, self._count)
        masked = layout is Layout.MASKED
        most = max(1, int(counts.max())) + self._pick.choice((0, 3))
        alignment = self._declaration.alignment * self._pick.choice((1, 4))
        segments = slab_segments(counts, most) if masked else aligned_segments(counts, alignment)
        at = positions(experts, segments)
        data = torch.full((segments.rows, self._hidden), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
        if scales is None:
            data = torch.full((segments.rows, self._hidden), torch.nan, dtype=x.dtype)
        data.view(torch.uint8)[at] = x.view(torch.uint8)
        spread = torch.full((segments.rows,), torch.nan)
        spread[at] = weights
        row_scales = None
        if scales is not None:
            row_scales = torch.full((segments.rows, scales.shape[1]), torch.nan)
            row_scales[at] = scales
            row_scales = row_scales.to(device)
        data, spread, counts32 = data.to(device), spread.to(device), counts.int().to(device)
        if masked:
            slab = (self._count, most)
            shaped = None if row_scales is None else row_scales.view(*slab, -1)
            results = torch.full((*slab, self._hidden), torch.nan, dtype=DTYPES[self._dtype], device=device)
            offered = self._pick.choice((None, results))
            return MaskedRows(data.view(*slab, -1), counts32, spread.view(slab), shaped, offered), at
        psum = segments.psum.int().to(device)
        return ContiguousRows(data, psum, counts32, alignment, spread, row_scales), at

    def _compare(
        self,
        out: torch.Tensor,
        at: torch.Tensor,
        x: torch.Tensor,
        scales: torch.Tensor | None,
        experts: torch.Tensor,
        weights: torch.Tensor,
        what: str,
    ) -> None:
        dtype = DTYPES[self._dtype]
        if out.dtype != dtype:
            raise Mismatch(f"results are {out.dtype}, should be {dtype}: {what}")
        seen = torch.float32 if self._experts.fp8 else dtype
        plain = x if scales is None else dequantise_rows(x, scales, seen)
        flat = out.cpu().reshape(-1, self._hidden)
        for lane in range(len(experts)):
            expert = int(experts[lane])
            if expert < 0:
                continue
            wanted = self._experts.reference(expert, plain[lane]) * float(weights[lane])
            got = flat[at[lane]].double()
            if self._experts.exact:
                if not torch.equal(got.float(), wanted.float()):
                    raise Mismatch(f"row of lane {lane} is not what expert {expert} gives: {what}")
            else:
                near = FP8_TOLERANCE if self._experts.fp8 else TOLERANCE[self._dtype]
                limit = near * float(wanted.abs().max())
                if not bool(((got - wanted).abs() <= limit).all()):
                    worst = float((got - wanted).abs().max())
                    raise Mismatch(f"lane {lane} of expert {expert} differs by {worst:.3g}: {what}")

    def _compare_alone(
        self,
        out: torch.Tensor,
        at: torch.Tensor,
        x: torch.Tensor,
        scales: torch.Tensor | None,
        experts: torch.Tensor,
        weights: torch.Tensor,
        what: str,
    ) -> None:
        """A declared row-invariant runner gives one lane the same bits alone."""
        lane = self._pick.randrange(len(experts))
        if int(experts[lane]) < 0:
            return
        one = slice(lane, lane + 1)
        part = None if scales is None else scales[one]
        rows, alone_at = self._lay_out(Layout.REPLICATED, x[one], part, experts[one], weights[one])
        alone = self._runner.run(rows).reshape(-1, self._hidden)[alone_at[0]]
        if not torch.equal(alone, out.reshape(-1, self._hidden)[at[lane]]):
            raise Mismatch(f"lane {lane} has other bits alone than beside others: {what}")

    def _exact_experts(self) -> Experts:
        width = self._hidden - 1
        gate = torch.zeros(self._count, width, self._hidden)
        gate[:, :, 0] = 1.0
        up, down = torch.zeros_like(gate), torch.zeros(self._count, self._hidden, width)
        for expert in range(self._count):
            order = torch.randperm(self._hidden, generator=self._generator)
            up[expert, torch.arange(width), order[:width]] = 1.0
            targets = torch.randperm(self._hidden, generator=self._generator)[:width]
            down[expert, targets, torch.arange(width)] = 2.0 ** (expert % 3 - 1) / GATE_VALUE
        return Experts(gate, up, down, exact=True)

    def _random_experts(self, fp8: bool) -> Experts:
        width, dtype = self._pick.choice((16, 48)), DTYPES[self._dtype]

        def random_weights(*shape: int) -> torch.Tensor:
            scale = 1.0 / float(shape[-1]) ** 0.5
            values: torch.Tensor = torch.randn(*shape, generator=self._generator) * scale
            if fp8:
                return torch.stack([Fp8Blocks.quantised(each).dequantised(torch.float32) for each in values])
            return values.to(dtype).float()

        return Experts(
            random_weights(self._count, width, self._hidden),
            random_weights(self._count, width, self._hidden),
            random_weights(self._count, self._hidden, width),
            exact=False,
            fp8=fp8,
            rounds=self._declaration.rounds_gate_up,
        )
