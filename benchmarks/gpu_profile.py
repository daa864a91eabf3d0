"""What binds a step on a GPU: kernel time by name in decode steps or a prefill chunk, and the idle gaps.

Runs the scheduler, the model runner and the sampler of one process as the server does, profiles steps with
torch's profiler (kernels inside CUDA graphs included) and prints, for each batch: wall-clock ms of a step
without the profiler, busy and idle share of the device, and the kernels by time.

    python benchmarks/gpu_profile.py shape:mimo-v2-flash --layers 12 --batch 1 32 256 [--prefill 1x8192]
"""

from __future__ import annotations

import argparse
import logging
import time
from collections import defaultdict
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

from interlock.engine.batch import Batch
from interlock.engine.execution import StepExecutor
from interlock.engine.launched import Launched
from interlock.engine.messages import AddRequest, SamplingParams
from interlock.engine.model_runner import ModelRunner
from interlock.engine.scheduler import Scheduler
from interlock.launch import plan_launch
from interlock.moe.terms import Phase
from interlock.options import Options
from interlock.parallel.topology import Groups

CONTEXT = 128
GAPS = 5
"""Largest gaps between kernels that are shown."""


@dataclass
class Pipeline:
    """A scheduler whose decode steps are launched one ahead, as the rank's loop does."""

    scheduler: Scheduler
    executor: StepExecutor
    batch: Batch | None = None
    step: Launched | None = None

    def turn(self) -> Batch | None:
        """Take in one step; returns its batch."""
        if self.batch is None:
            self.batch = self.scheduler.schedule()
            if self.batch is None:
                return None
            self.step = self.executor.launch(self.batch)
        batch, step = self.batch, self.step
        assert step is not None
        ahead = self.scheduler.schedule_ahead()
        self.batch = ahead
        self.step = None if ahead is None else self.executor.launch(ahead, step)
        self.scheduler.commit(batch, step.result())
        return batch

    def drain(self) -> None:
        while self.turn() is not None:
            pass


def requests(count: int, prompt: int, answer: int, vocab: int) -> list[AddRequest]:
    generator = torch.Generator().manual_seed(count)
    sampling = SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True)
    return [
        AddRequest(
            request_id=f"{count}-{index}",
            token_ids=tuple(torch.randint(0, vocab, (prompt,), generator=generator).tolist()),
            sampling=sampling,
        )
        for index in range(count)
    ]


def report(name: str, wall_ms: float, prof: profile, steps: int, top: int) -> None:
    """Kernels by time; gaps are the time between kernels from the first to the last."""
    spans, by_name, calls = [], defaultdict(float), defaultdict(int)
    for event in prof.events():
        if event.device_type.name == "CUDA" and event.time_range.elapsed_us() > 0:
            spans.append((event.time_range.start, event.time_range.end, event.name))
            by_name[event.name] += event.time_range.elapsed_us()
            calls[event.name] += 1
    spans.sort()
    busy, end, before = 0.0, spans[0][0], ""
    gaps = []
    for start, stop, kernel in spans:
        gaps.append((start - end, before, kernel))
        busy += max(0.0, stop - max(start, end))
        end, before = max(end, stop), kernel
    total = end - spans[0][0]
    print(f"== {name}: {wall_ms:.3f} ms a step; profiled {total / steps / 1e3:.3f} ms, "
          f"idle {1 - busy / total:.1%}, {len(spans) / steps:.0f} kernels a step")  # fmt: skip
    for kernel, spent in sorted(by_name.items(), key=lambda item: -item[1])[:top]:
        print(f"{spent / steps:9.1f} us {calls[kernel] / steps:6.1f} x  {kernel[:100]}")
    largest = sorted(gaps, reverse=True)[:GAPS]
    print("gaps: " + "; ".join(f"{gap:.0f} us {a[:28]} -> {b[:28]}" for gap, a, b in largest))


def decode(pipeline: Pipeline, batch: int, vocab: int, *, steps: int, top: int) -> None:
    warm = 8
    for request in requests(batch, CONTEXT, 3 * steps + 4 * warm, vocab):
        assert pipeline.scheduler.add(request) == []
    full = 0
    while full < warm:
        done = pipeline.turn()
        assert done is not None
        full += done.phase is Phase.DECODE and len(done.requests) == batch
    begun = time.perf_counter()
    for _ in range(steps):
        pipeline.turn()
    wall = (time.perf_counter() - begun) / steps * 1e3
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        for _ in range(steps):
            pipeline.turn()
        torch.cuda.synchronize()
    report(f"decode, batch {batch}", wall, prof, steps, top)
    pipeline.drain()


def prefill(pipeline: Pipeline, count: int, tokens: int, vocab: int, *, top: int) -> None:
    walls = []
    for round_ in range(3):
        for request in requests(count, tokens, 1, vocab):
            assert pipeline.scheduler.add(request) == []
        torch.cuda.synchronize()
        if round_ == 2:
            break
        begun = time.perf_counter()
        pipeline.drain()
        walls.append(time.perf_counter() - begun)
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        pipeline.drain()
        torch.cuda.synchronize()
    rate = count * tokens / min(walls)
    report(f"prefill {count} x {tokens}: {rate:,.0f} tok/s", min(walls) * 1e3, prof, 1, top)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 32, 256])
    parser.add_argument("--prefill", nargs="*", default=[], metavar="COUNTxTOKENS")
    parser.add_argument("--chunk", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--top", type=int, default=25)
    given = parser.parse_args()
    logging.basicConfig(format="%(message)s")
    logging.getLogger("interlock").setLevel(logging.DEBUG)
    options = {
        "load_format": "dummy",
        "prefix_cache": False,
        "chunked_prefill_size": given.chunk,
        "max_running_requests": max([*given.batch, 32]),
        "max_model_len": 9216,
    }
    if given.layers:
        options["num_hidden_layers"] = given.layers
    launch = plan_launch(given.model, Options.of(**options))
    plan = getattr(launch, "plan", launch)
    torch.set_num_threads(1)
    with torch.inference_mode():
        begun = time.perf_counter()
        runner = ModelRunner(plan, Groups.single())
        runner.load()
        torch.cuda.synchronize()
        loaded = time.perf_counter()
        runner.warm_up()
        torch.cuda.synchronize()
        print(f"loaded in {loaded - begun:.1f} s, warmed up in {time.perf_counter() - loaded:.1f} s")
        pipeline = Pipeline(Scheduler(plan), StepExecutor(runner))
        for batch in given.batch:
            decode(pipeline, batch, plan.card.vocab_size, steps=given.steps, top=given.top)
        for shape in given.prefill:
            count, tokens = map(int, shape.split("x"))
            prefill(pipeline, count, tokens, plan.card.vocab_size, top=given.top)


if __name__ == "__main__":
    main()
