"""Load a model in a fresh process and print its memory: ``python -m tests.checkpoint.measure_load FOLDER``.

Prints bytes before loading, bytes held after it, and the peak in between (the high-water mark of this
process; ``ru_maxrss`` would count what the parent process held when it forked).
"""

from __future__ import annotations

import gc
import json
import re
import sys
from pathlib import Path

from tests.harness import build_model


def status(field: str) -> int:
    """Bytes of a line of /proc/self/status."""
    match = re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert match is not None
    return int(match[1]) * 1024


def main() -> None:
    folder, small, dtype, kernels = sys.argv[1:]
    build_model(small, dtype=dtype, kernels=kernels)
    before = status("VmRSS")
    harness = build_model(folder, dtype=dtype, kernels=kernels, full_pages=1, window_pages=1)
    gc.collect()
    print(json.dumps({"before": before, "after": status("VmRSS"), "peak": status("VmHWM")}))
    del harness


if __name__ == "__main__":
    main()
