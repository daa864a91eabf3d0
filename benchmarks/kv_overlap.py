"""How much of a transfer passes while the prompt is still being computed.

    python benchmarks/kv_overlap.py [--backends shared_memory,mooncake,nixl] [--chunks 256,2048]

A prefill and a decode engine on this machine, prompts one after another, each alone. Pages leave after each
chunk, so with one chunk a prompt nothing can be hidden: that is the row to compare with. Of each prompt, the
medians of: ``copying_ms``, the time that the prefill rank spent in copies; ``exposed_ms``, for which the
computed prompt waited for its last pages (metric ``interlock:kv_transfer_exposed_seconds``); ``first_ms``,
until the decode server's first token. ``hidden`` is the share of the copying that was not exposed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from pathlib import Path

from interlock.demo.tiny import write_tiny
from interlock.demo.tiny_spec import TinySpec
from interlock.engine.client import Engine
from interlock.engine.endpoints import free_ports
from interlock.engine.messages import AddRequest, Meeting, SamplingParams, TransferStats
from interlock.launch import plan_launch
from interlock.options import Options

SPEC = TinySpec(pattern=(0,) * 7)
"""Full attention in every layer: 35 KiB of keys and values a token in float32."""


async def start(model: Path, backend: str, chunk: int, args: argparse.Namespace) -> tuple[list[Engine], int]:
    (port,) = free_ports("127.0.0.1", 1)
    base: dict[str, object] = {
        "device": "cpu",
        "dtype": "float32",
        "threads": 1,
        "max_model_len": args.prompt + 64,
        "kv_memory": "512MiB",
        "prefix_cache": False,
        "chunked_prefill_size": chunk,
        "disaggregation_transfer_backend": backend,
    }
    roles: list[dict[str, object]] = [
        {"disaggregation_mode": "prefill", "disaggregation_bootstrap_port": port},
        {"disaggregation_mode": "decode"},
    ]
    engines = [await Engine.start(plan_launch(str(model), Options.of(**base, **role))) for role in roles]
    return engines, port


async def ask(engines: list[Engine], port: int, number: int, prompt: tuple[int, ...]) -> float:
    """Seconds until the decode engine's first token."""
    sampling = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
    meeting = Meeting(host="127.0.0.1", port=port, room=number)
    message = AddRequest(request_id=f"q{number}", token_ids=prompt, sampling=sampling, meeting=meeting)
    begun, first = time.perf_counter(), 0.0

    async def drain(engine: Engine) -> None:
        nonlocal first
        async for delta in engine.stream(message):
            if delta.error:
                raise RuntimeError(delta.error)
            if engine is engines[1] and not first:
                first = time.perf_counter() - begun

    await asyncio.gather(*(drain(engine) for engine in engines))
    return first


async def transfer_of(engine: Engine, handed_over: int) -> TransferStats:
    """The prefill engine's counters once it has handed over so many prompts."""
    while True:
        stats = engine.stats()[0].transfer
        if stats is not None and stats.handed_over_total >= handed_over:
            return stats
        await asyncio.sleep(0.01)


async def measure(model: Path, backend: str, chunk: int, args: argparse.Namespace) -> dict[str, object]:
    engines, port = await start(model, backend, chunk, args)
    rng = random.Random(0)
    firsts, copying, exposed, nbytes = [], [], [], 0
    try:
        before = TransferStats()
        for number in range(1, args.prompts + 2):
            prompt = tuple(rng.randrange(8, 400) for _ in range(args.prompt))
            first = await ask(engines, port, number, prompt)
            after = await transfer_of(engines[0], number)
            if number > 1:  # the first one maps and connects
                firsts.append(first)
                copying.append(after.seconds_total - before.seconds_total)
                exposed.append(after.exposed_seconds_total - before.exposed_seconds_total)
                nbytes = after.bytes_total - before.bytes_total
            before = after
    finally:
        for engine in engines:
            await engine.close()
    spent, waited = statistics.median(copying), statistics.median(exposed)
    return {
        "backend": backend,
        "prompt": args.prompt,
        "chunk": chunk,
        "mib": round(nbytes / (1 << 20), 1),
        "copying_ms": round(spent * 1e3, 2),
        "exposed_ms": round(waited * 1e3, 2),
        "hidden": round(max(0.0, 1 - waited / spent), 3),
        "first_ms": round(statistics.median(firsts) * 1e3, 1),
    }


async def run(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny(Path(folder) / "model", SPEC)
        for backend in args.backends.split(","):
            for chunk in map(int, args.chunks.split(",")):
                print(json.dumps(await measure(model, backend, chunk, args)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--backends", default="shared_memory")
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--chunks", default="256,2048")
    parser.add_argument("--prompts", type=int, default=5)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
