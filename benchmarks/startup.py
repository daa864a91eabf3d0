"""How long a user waits: ``interlock plan`` and the time until ``interlock serve`` is ready.

Runs the real commands; the best of several rounds is kept, since a busy machine only adds. Bars: plan 1 s,
the demo ready 8 s (weights converted and native kernels built before).

  python benchmarks/startup.py [--rounds 3] [--model demo]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
import urllib.error
import urllib.request

from interlock.engine.endpoints import free_ports

INTERLOCK = [sys.executable, "-m", "interlock"]
LIMIT_SECONDS = 120


def plan_seconds(model: str) -> float:
    start = time.perf_counter()
    subprocess.run([*INTERLOCK, "plan", model, "--json"], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def ready_seconds(model: str) -> float:
    """From the command to the first healthy answer."""
    (port,) = free_ports("127.0.0.1", 1)
    start = time.perf_counter()
    server = subprocess.Popen([*INTERLOCK, "serve", model, "--port", str(port)], stderr=subprocess.DEVNULL)
    try:
        while time.perf_counter() - start < LIMIT_SECONDS:
            if is_healthy(port):
                return time.perf_counter() - start
            if server.poll() is not None:
                raise SystemExit(f"the server ended with code {server.returncode}")
            time.sleep(0.02)
        raise SystemExit(f"not ready after {LIMIT_SECONDS} s")
    finally:
        server.terminate()
        server.wait()


def is_healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", default="demo")
    args = parser.parse_args()
    ready_seconds(args.model)
    plan = min(plan_seconds(args.model) for _ in range(args.rounds))
    ready = min(ready_seconds(args.model) for _ in range(args.rounds))
    print(f"plan {args.model}: {plan:.2f} s (bar 1 s); serve {args.model} ready: {ready:.2f} s (bar 8 s)")


if __name__ == "__main__":
    main()
