"""Build, check and time everything on a GPU in one call; every stage has a limit and failures do not stop it.

    python benchmarks/gpu_session.py --out results
    python benchmarks/gpu_session.py --out results --stages tests layers --limit 300

Stages: ``tests`` (the GPU suite), ``layers`` (every fp8 runner checked and timed, and the table of which is
fastest), ``deep-gemm`` (its products alone), ``profile`` (kernels of one layer), ``bench-flash`` and
``bench-pro`` (the layer tables of ``interlock bench moe``), ``tune`` (launch parameters of our kernels).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from stages import Stage, add_arguments, chosen, run_stages

ALL_TOKENS = "1,8,32,64,128,256,512,1024,2048,4096,8192,16384"
SHARED = ["--expert-width", "2048", "--top-k", "8", "--dtype", "bfloat16"]
FLASH = [*SHARED, "--hidden", "4096", "--experts", "256"]
PRO = [*SHARED, "--hidden", "6144", "--experts", "384", "--local-experts", "24"]
RUNNERS = ["--runner", "triton_fp8", "--runner", "deep_gemm", "--runner", "fastest_fp8"]
TESTS = [
    "tests/kernels", "tests/moe/test_device_routing.py", "tests/moe/test_deep_gemm.py",
    "tests/moe/test_triton_runner_gpu.py", "tests/moe/test_layer_gpu.py",
]  # fmt: skip


def stages(out: Path) -> list[Stage]:
    python, here = sys.executable, Path(__file__).parent
    runners = str(here / "gpu_runners.py")
    bench = [python, "-m", "interlock", "bench", "moe", "--device", "cuda", "--tokens", ALL_TOKENS]
    bench += ["--rounds", "10", "--no-plot", *RUNNERS]
    tests = [python, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
    workers = ["-n", "14"] if has("xdist") else []
    return [
        Stage("tests", 240, [*tests, *workers, *TESTS]),
        Stage(
            "layers",
            240,
            [python, runners, "--out", str(out / "layers.json"), "--table", str(out / "measured_h200.json")],
        ),
        Stage("deep-gemm", 120, [python, str(here / "gpu_deep_gemm.py")]),
        Stage("profile", 100, [python, runners, "--profile", "1", "512", "4096", "16384"]),
        Stage("bench-flash", 150, [*bench, *FLASH, "--out", str(out / "bench_flash")]),
        Stage("bench-pro", 100, [*bench, *PRO, "--out", str(out / "bench_pro")]),
        Stage(
            "tune",
            300,
            [python, str(here / "gpu_tune.py"), "--dtypes", "fp8", "--out", str(out / "tuned_h200.json")],
        ),
    ]


def has(module: str) -> bool:
    from importlib.util import find_spec

    return find_spec(module) is not None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser, default=["tests", "layers", "profile"])
    options = parser.parse_args()
    run_stages(chosen(parser, options.stages, stages(options.out)), options.out, options.limit)


if __name__ == "__main__":
    main()
