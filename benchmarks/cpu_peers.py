"""Decode speed of Interlock, transformers and llama.cpp on the demo checkpoint, interleaved in one run.

Every arm is a process of its own with the same number of threads and the same weights: transformers reads
its native MiMo-V2 class from the same folder, llama.cpp (wheel xllamacpp) a GGUF written from it. Decode
tokens/s of a batch B is B * (N - 1) / (t(N tokens) - t(1 token)), so prompts do not count; the best of
several rounds is kept.

  python benchmarks/cpu_peers.py [--threads 2] [--tokens 48] [--rounds 3] [--out FILE.json]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ARMS = ("interlock", "transformers", "llama.cpp")
BATCHES = (1, 16)
PROMPT_TOKENS = 44
Generate = Callable[[list[list[int]], int], None]


def prompts(batch: int) -> list[list[int]]:
    """``batch`` different prompts of equal length, plain token ids of the demo's vocabulary."""
    return [
        [(17 * row + 31 * column) % 40000 + 100 for column in range(PROMPT_TOKENS)] for row in range(batch)
    ]


def interlock_arm(model: str, threads: int, dtype: str) -> Generate:
    from interlock import LLM, SamplingParams

    llm = LLM("demo", threads=threads, prefix_cache=False, dtype=dtype)

    def generate(batch: list[list[int]], tokens: int) -> None:
        done = llm.generate(batch, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True))
        assert all(len(each.token_ids) == tokens for each in done)

    return generate


def transformers_arm(model: str, threads: int, dtype: str) -> Generate:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))

    def generate(batch: list[list[int]], tokens: int) -> None:
        ids = torch.tensor(batch)
        out = network.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            pad_token_id=2,
        )
        assert out.shape[1] == PROMPT_TOKENS + tokens

    return generate


def llama_cpp_arm(model: str, threads: int, dtype: str) -> Generate:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.verbosity = 1
    params.model.path = model
    params.n_ctx, params.n_parallel, params.warmup = 256 * max(BATCHES), max(BATCHES), False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(params)

    def generate(batch: list[list[int]], tokens: int) -> None:
        def one(prompt: list[int]) -> None:
            answer = server.handle_completions(
                {
                    "prompt": prompt,
                    "max_tokens": tokens,
                    "temperature": 0,
                    "ignore_eos": True,
                    "cache_prompt": False,
                }
            )
            assert answer["usage"]["completion_tokens"] == tokens, answer["usage"]

        with ThreadPoolExecutor(len(batch)) as pool:
            list(pool.map(one, batch))

    return generate


MAKERS = {"interlock": interlock_arm, "transformers": transformers_arm, "llama.cpp": llama_cpp_arm}


def run_arm(name: str, model: str, threads: int, dtype: str) -> None:
    """Serve measurements: one JSON line ``[batch, tokens]`` in, seconds out."""
    generate = MAKERS[name](model, threads, dtype)
    generate(prompts(1), 2)
    print("ready", flush=True)
    for line in sys.stdin:
        batch, tokens = json.loads(line)
        start = time.perf_counter()
        generate(prompts(batch), tokens)
        print(time.perf_counter() - start, flush=True)


class Arm:
    """A measuring process."""

    def __init__(self, name: str, model: str, threads: int, dtype: str) -> None:
        command = [sys.executable, __file__, "--arm", name, "--model", model, "--threads", str(threads)]
        self._process = subprocess.Popen(
            [*command, "--dtype", dtype], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._answer("ready")

    def seconds(self, batch: int, tokens: int) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([batch, tokens]) + "\n")
        self._process.stdin.flush()
        return float(self._answer())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _answer(self, expected: str | None = None) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            text = line.strip()
            if text == expected or (expected is None and _is_number(text)):
                return text
        raise SystemExit(f"the measuring process ended with code {self._process.wait()}")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def measure(arms: dict[str, Arm], tokens: int, rounds: int) -> dict[str, dict[int, float]]:
    """Best decode tokens/s by arm and batch."""
    best: dict[str, dict[int, float]] = {name: dict.fromkeys(BATCHES, 0.0) for name in arms}
    for _ in range(rounds):
        for batch in BATCHES:
            for name, arm in arms.items():
                first = arm.seconds(batch, 1)
                whole = arm.seconds(batch, tokens)
                best[name][batch] = max(best[name][batch], batch * (tokens - 1) / (whole - first))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.arm:
        run_arm(args.arm, args.model, args.threads, args.dtype)
        return

    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from tests.oracles.gguf_writer import write_gguf

    from interlock.demo import resolve_model
    from interlock.reference.mimo_v2 import MiMoReference

    folder = resolve_model("demo")
    with tempfile.TemporaryDirectory() as scratch:
        gguf = Path(scratch) / "demo.gguf"
        write_gguf(MiMoReference.load(folder), gguf, visible=1)
        models = {"interlock": "demo", "transformers": str(folder), "llama.cpp": str(gguf)}
        arms = {name: Arm(name, models[name], args.threads, args.dtype) for name in ARMS}
        speeds = measure(arms, args.tokens, args.rounds)
        for arm in arms.values():
            arm.close()
    print(f"decode tokens/s, demo in {args.dtype}, {args.threads} threads, best of {args.rounds} rounds")
    for batch in BATCHES:
        ours = speeds["interlock"][batch]
        row = "  ".join(
            f"{name} {speeds[name][batch]:7.1f} (x{ours / speeds[name][batch]:.2f})" for name in ARMS
        )
        print(f"batch {batch:2d}: {row}")
    if args.out:
        args.out.write_text(
            json.dumps({"arguments": vars(args) | {"out": str(args.out)}, "speeds": speeds}, indent=1)
        )


if __name__ == "__main__":
    main()
