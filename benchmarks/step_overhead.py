"""How long a step takes besides the model's forward and the passes over [rows, vocabulary] logits.

Measures decode steps of a scheduler with a fake forward: schedule, building the Step, the sampler's
bookkeeping (on a vocabulary of 64 tokens, so that the arithmetic over logits hardly counts), commit, and
encoding the messages for the front end. Budget: 0.3 ms at batch 1 and 2 ms at batch 256.

The parts and "cpu" are means of this thread's CPU time, which other load on the machine changes little; "p50"
and "p99" are wall-clock times of whole steps. The verdict compares "cpu" with the budget, for every kind.

    python benchmarks/step_overhead.py [--steps 400]
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import torch

from interlock.engine.batch import Batch, to_step
from interlock.engine.messages import AddRequest, EngineOutputs, SamplingParams
from interlock.engine.sampler import Sampler
from interlock.engine.scheduler import Scheduler
from interlock.launch import plan_launch
from interlock.moe.terms import Phase
from interlock.options import Options
from interlock.plan.card import AttentionCard, LayerCard, ModelCard
from interlock.plan.launch_plan import LaunchPlan

VOCAB = 64
BUDGET_MS = {1: 0.3, 256: 2.0}


def make_plan(batch: int, context: int, steps: int, window: int | None) -> LaunchPlan:
    """A plan with room for ``batch`` sequences of ``context`` tokens and ``steps`` more."""

    def layer(width: int | None) -> LayerCard:
        return LayerCard(
            attention=AttentionCard(
                num_heads=1,
                num_kv_heads=1,
                head_dim=8,
                v_head_dim=8,
                rope_theta=1e4,
                rotary_dim=8,
                window=width,
            ),
            is_moe=False,
        )

    card = ModelCard(
        family="fake",
        architecture="Fake",
        vocab_size=VOCAB,
        hidden_size=8,
        intermediate_size=8,
        layers=(layer(None),) if window is None else (layer(None), layer(window)),
        experts=None,
        norm_eps=1e-5,
        max_position=1 << 20,
        tie_word_embeddings=False,
        dtype="float32",
        weight_format="float32",
        eos_token_ids=(0,),
    )
    length = context + steps + 8
    pages = batch * (length // 16 + 2)
    plan = plan_launch(
        "shape:qwen3-30b-a3b",
        Options.of(device="cpu", load_format="dummy", num_hidden_layers=1, max_model_len=2048),
    )
    return msgspec.structs.replace(
        plan,
        card=card,
        max_model_len=length,
        max_running_requests=batch,
        chunked_prefill_size=8192,
        page_size=16,
        full_pages=pages,
        window_pages=pages,
        sliding_window_extra=0,
    )


@dataclass
class Clock:
    """Seconds spent in each part, one entry a step: CPU time of the thread, and wall-clock time."""

    cpu: dict[str, list[float]] = field(default_factory=dict)
    wall: dict[str, list[float]] = field(default_factory=dict)

    def time(self, name: str, call: Callable[[], Any]) -> Any:
        wall, cpu = time.perf_counter(), time.thread_time()
        result = call()
        self.cpu.setdefault(name, []).append(time.thread_time() - cpu)
        self.wall.setdefault(name, []).append(time.perf_counter() - wall)
        return result

    def cpu_ms(self, name: str) -> float:
        return 1e3 * float(np.mean(self.cpu[name]))

    def wall_ms(self) -> np.ndarray:
        """Wall-clock time of each step."""
        return 1e3 * np.sum(list(self.wall.values()), axis=0)


def measure(batch: int, context: int, steps: int, window: int | None, sampling: SamplingParams) -> Clock:
    """Decode ``steps`` steps of ``batch`` requests with prompts of ``context`` tokens."""
    scheduler, sampler = Scheduler(make_plan(batch, context, steps, window)), Sampler()
    rng = np.random.default_rng(0)
    for index in range(batch):
        prompt = tuple(rng.integers(1, VOCAB, size=context).tolist())
        assert not scheduler.add(
            AddRequest(request_id=f"cmpl-{index:032x}", token_ids=prompt, sampling=sampling)
        )
    clock = Clock()
    logits = torch.randn(batch, VOCAB)
    logits[:, 0] = -50.0
    encoder = msgspec.msgpack.Encoder()
    while scheduler.stats().running < batch or scheduler.wanted().prefill_tokens:
        fill = scheduler.schedule(Phase.PREFILL)
        assert fill is not None
        scheduler.commit(fill, sampler.sample(logits[: len(fill.requests)], fill))
    for _ in range(steps):
        step_batch = clock.time("schedule", scheduler.schedule)
        assert isinstance(step_batch, Batch)
        assert len(step_batch.requests) == batch
        clock.time("to_step", lambda b=step_batch: to_step(b.arrays))
        sampled = clock.time("sample", lambda b=step_batch: sampler.sample(logits, b))
        deltas = clock.time("commit", lambda b=step_batch, s=sampled: scheduler.commit(b, s))
        clock.time(
            "messages",
            lambda d=deltas: encoder.encode(EngineOutputs(deltas=tuple(d), stats=scheduler.stats())),
        )
    return clock


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=400)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    greedy = SamplingParams(temperature=0.0, max_tokens=steps + 4, ignore_eos=True)
    sampled = SamplingParams(temperature=0.8, top_p=0.9, seed=1, max_tokens=steps + 4, ignore_eos=True)
    scored = SamplingParams(temperature=0.0, logprobs=5, max_tokens=steps + 4, ignore_eos=True)
    parts = ("schedule", "to_step", "sample", "commit", "messages")
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs; times in ms")
    titles = " ".join(f"{part:>8}" for part in parts)
    print(f"batch context window     kind | {titles} |     cpu     p50     p99")
    for batch in (1, 16, 64, 256):
        for context, window, kind, params in (
            (512, None, "greedy", greedy),
            (4096, 128, "greedy", greedy),
            (512, 128, "sampled", sampled),
            (512, None, "logprobs", scored),
        ):
            clock = measure(batch, context, steps, window, params)
            wall = clock.wall_ms()
            cells = " ".join(f"{clock.cpu_ms(part):8.3f}" for part in parts)
            cpu = sum(clock.cpu_ms(part) for part in parts)
            verdict = ""
            if batch in BUDGET_MS:
                verdict = "within budget" if cpu <= BUDGET_MS[batch] else "over budget"
            print(
                f"{batch:5d} {context:7d} {window or '-':>6} {kind:>8} | {cells} |"
                f" {cpu:7.3f} {np.median(wall):7.3f} {np.quantile(wall, 0.99):7.3f}  {verdict}",
                flush=True,
            )


if __name__ == "__main__":
    main()
