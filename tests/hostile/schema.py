"""schemathesis on our OpenAPI document: no answer of 5xx. Needs the package schemathesis.

python -m tests.hostile.schema --examples 500 [-- server options]
"""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

from tests.e2e.processes import Served
from tests.hostile.watch import finish, free, is_alive, parser, seconds_until_free, started

CHECKS = "not_a_server_error"


def run(served: Served, examples: int, seed: int) -> subprocess.CompletedProcess[str]:
    """Generated and deliberately wrong requests for every endpoint of ``/openapi.json``."""
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{served.url}/openapi.json"]
    command += ["--checks", CHECKS, "--max-examples", str(examples), "--seed", str(seed), "--mode", "all"]
    command += ["--phases", "examples,coverage,fuzzing", "--request-timeout", "60", "--no-color"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--examples", type=int, default=500)
    given = options.parse_args()
    if find_spec("schemathesis") is None:
        print("schemathesis is not installed: pip install schemathesis")
        return 2
    with started(given.flags) as served:
        done = run(served, given.examples, given.seed)
        settled = seconds_until_free(served)
        alive, held = is_alive(served), not free(served)
    missed = [done.stdout[-4000:] + done.stderr[-2000:]] * (done.returncode != 0)
    missed += ["the server is not healthy"] * (not alive) + ["pages or slots are held"] * held
    summary = [line for line in done.stdout.splitlines() if line.strip()][-12:]
    return finish("schemathesis", {"free_after_seconds": round(settled, 3), "summary": summary}, missed)


if __name__ == "__main__":
    sys.exit(main())
