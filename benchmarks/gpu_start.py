"""How long an engine takes from nothing to ready on a GPU, with empty caches and then with full ones.

    python benchmarks/gpu_start.py
    python benchmarks/gpu_start.py --layers 12 --requests 512 --only-cold

Kernels are cached in a fresh folder (``TRITON_CACHE_DIR``, ``DG_JIT_CACHE_DIR``). Each start is a process of
its own; its time begins before the first import.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time

START = "--one-start"


def start_once(model: str, layers: int, requests: int) -> None:
    """Start, print the time and the rank's own report, and end."""
    from interlock.bench.session import EngineSession
    from interlock.launch import plan_launch
    from interlock.options import Options

    options = Options.of(
        load_format="dummy",
        num_hidden_layers=layers,
        max_model_len=1024,
        max_running_requests=requests,
        log_level="debug",
    )
    plan = plan_launch(model, options)
    session = EngineSession(plan)
    seconds = time.time() - float(os.environ["START_BEGUN"])
    print(f"ready after {seconds:.1f} s: {json.dumps(session.receipts[0]['start'])}", flush=True)
    session.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="shape:mimo-v2-flash")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--only-cold", action="store_true", help="one start, with empty caches")
    parser.add_argument(START, action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one_start:
        start_once(given.model, given.layers, given.requests)
        return
    with tempfile.TemporaryDirectory() as folder:
        caches = {"TRITON_CACHE_DIR": f"{folder}/triton", "DG_JIT_CACHE_DIR": f"{folder}/deep_gemm"}
        for name in ("cold", "warm")[: 1 if given.only_cold else 2]:
            print(f"{name}:", flush=True)
            environment = {**os.environ, **caches, "START_BEGUN": str(time.time())}
            subprocess.run([sys.executable, __file__, START, *sys.argv[1:]], env=environment, check=True)


if __name__ == "__main__":
    main()
