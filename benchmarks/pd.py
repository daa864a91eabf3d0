"""What separate prefill and decode servers are worth (what the transfer delivers: ``kv_transfer.py``).

    python benchmarks/pd.py itl [--model tiny-random] [--seconds 12] [--pin] [--repeats 3] [--out FILE]

``itl``: inter-token latency of running answers on an idle system, and while long prompts arrive, on one
server that does both phases and on a pair, in the same run; idle and loaded times alternate, so that what
else the machine does falls on both. Every server has ``--threads`` threads, so where there are fewer cores
than servers the pair pays for it. ``--pin`` gives the prefill server core 0, and the decode server and the
clients core 1; the one server has both cores, and is measured a second time with a thread on each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import time
from pathlib import Path

from interlock.engine.client import Engine
from interlock.engine.endpoints import free_ports
from interlock.engine.messages import AddRequest, Meeting, SamplingParams
from interlock.launch import plan_launch
from interlock.options import Options

CORES = os.sched_getaffinity(0)
ROUNDS = 4
SETTLE_SECONDS = 0.5


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


class System:
    """One engine, or a prefill and a decode engine, behind one way of asking."""

    def __init__(self, engines: list[Engine], port: int) -> None:
        self._engines = engines
        self._port = port
        self._asked = 0

    async def stream(self, prompt: tuple[int, ...], tokens: int, gaps: list[float] | None) -> None:
        """Ask; the times between tokens after the first go to ``gaps``."""
        self._asked += 1
        pair = len(self._engines) == 2
        meeting = Meeting(host="127.0.0.1", port=self._port, room=self._asked) if pair else None
        sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
        message = AddRequest(
            request_id=f"q{self._asked}", token_ids=prompt, sampling=sampling, meeting=meeting
        )
        first = asyncio.create_task(self._drain(message)) if pair else None
        last = None
        async for delta in self._engines[-1].stream(message):
            if delta.error:
                raise RuntimeError(delta.error)
            now = time.perf_counter()
            if last is not None and delta.token_ids and gaps is not None:
                gaps.append(now - last)
            last = now
        if first is not None:
            await first

    async def _drain(self, message: AddRequest) -> None:
        async for _ in self._engines[0].stream(message):
            pass

    async def close(self) -> None:
        for engine in self._engines:
            await engine.close()


async def start(args: argparse.Namespace, *, pair: bool, threads: int) -> System:
    (port,) = free_ports("127.0.0.1", 1)
    base = {
        "threads": threads,
        "device": "cpu",
        "max_model_len": args.prompt + 2048,
        "kv_memory": args.kv_memory,
        "prefix_cache": False,
    }
    roles: list[dict[str, object]] = [{}]
    if pair:
        roles = [
            {"disaggregation_mode": "prefill", "disaggregation_bootstrap_port": port},
            {"disaggregation_mode": "decode"},
        ]
    pin(os.getpid(), CORES)
    engines = [await Engine.start(plan_launch(args.model, Options.of(**base, **role))) for role in roles]
    if args.pin and pair:
        for core, engine in enumerate(engines):
            for process in engine.process_ids().values():
                pin(process, {core})
        pin(os.getpid(), {1})
    return System(engines, port)


def pin(process: int, cores: set[int]) -> None:
    """Every thread of a process; those that it starts later follow."""
    for thread in os.listdir(f"/proc/{process}/task"):
        os.sched_setaffinity(int(thread), cores)


def prompt_of(length: int, salt: int) -> tuple[int, ...]:
    rng = random.Random(salt)
    return tuple(rng.randrange(8, 400) for _ in range(length))


async def measure(args: argparse.Namespace, system: System) -> dict[str, float | int]:
    """p50 and p99 of the gaps while nothing arrives, and while a long prompt is always being computed."""
    gaps: list[float] = []
    await system.stream(prompt_of(args.prompt, 0), 2, None)
    decodes = [
        asyncio.create_task(system.stream(prompt_of(16, 100 + i), args.tokens, gaps))
        for i in range(args.running)
    ]
    idle: list[float] = []
    loaded: list[float] = []
    prompts = 0
    for _ in range(ROUNDS):
        await asyncio.sleep(SETTLE_SECONDS)
        gaps.clear()
        await asyncio.sleep(args.seconds / ROUNDS)
        idle += gaps
        gaps.clear()
        end = time.perf_counter() + args.seconds / ROUNDS
        while time.perf_counter() < end:
            await system.stream(prompt_of(args.prompt, prompts), 1, None)
            prompts += 1
        loaded += gaps
    if any(task.done() for task in decodes):
        raise SystemExit("the answers ended during the measurement: raise --tokens or lower --seconds")
    for task in decodes:
        task.cancel()
    await asyncio.gather(*decodes, return_exceptions=True)
    return {
        "idle_p50_ms": statistics.median(idle) * 1e3,
        "idle_p99_ms": percentile(idle, 0.99) * 1e3,
        "loaded_p50_ms": statistics.median(loaded) * 1e3,
        "loaded_p99_ms": percentile(loaded, 0.99) * 1e3,
        "p99_ratio": percentile(loaded, 0.99) / percentile(idle, 0.99),
        "prompts": prompts,
        "gaps": len(loaded),
    }


async def itl(args: argparse.Namespace) -> None:
    arms = [("aggregated", False, args.threads), ("pair", True, args.threads)]
    if args.pin:
        arms.insert(1, ("aggregated, 2 threads", False, 2))
    found: list[dict[str, dict[str, float | int]]] = []
    for _ in range(args.repeats):
        found.append({})
        for name, pair, threads in arms:
            system = await start(args, pair=pair, threads=threads)
            try:
                measured = await measure(args, system)
            finally:
                await system.close()
            found[-1][name] = {key: round(value, 3) for key, value in measured.items()}
            print(json.dumps({name: found[-1][name]}), flush=True)
    if args.out:
        asked = {name: value for name, value in vars(args).items() if name not in ("run", "out")}
        record = {"asked": asked, "cores": len(CORES), "load": os.getloadavg(), "runs": found}
        Path(args.out).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    first = verbs.add_parser("itl")
    first.add_argument("--model", default="tiny-random")
    first.add_argument("--threads", type=int, default=1)
    first.add_argument("--seconds", type=float, default=12, help="of each kind")
    first.add_argument("--prompt", type=int, default=2000, help="tokens of each arriving prompt")
    first.add_argument("--tokens", type=int, default=2000, help="longest running answer")
    first.add_argument("--running", type=int, default=4)
    first.add_argument("--kv-memory", default="256MiB")
    first.add_argument("--pin", action="store_true", help="one core for each server of the pair")
    first.add_argument("--repeats", type=int, default=1)
    first.add_argument("--out", default="", help="file for the figures")
    first.set_defaults(run=lambda args: asyncio.run(itl(args)))
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
