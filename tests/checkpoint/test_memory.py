"""How much memory loading takes on top of the weights it leaves."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from interlock.demo.tiny import TinySpec
from interlock.models.card_reader import read_model_card
from tests.tiny import flash, tiny_folder, v25

ROOT = Path(__file__).parents[2]
WIDE = {"hidden_size": 512, "experts": 24, "moe_intermediate_size": 512, "layers": 4, "num_heads": 16}
BYTES = {"float32": 4, "bfloat16": 2}
MIB = 1 << 20


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="needs /proc to read the peak of a process"
)
@pytest.mark.parametrize(
    ("spec", "dtype"),
    [
        pytest.param(v25(**WIDE), "bfloat16", id="fp8 to bfloat16"),
        pytest.param(v25(**WIDE), "float32", id="fp8 to float32", marks=pytest.mark.slow),
        pytest.param(flash(**WIDE), "float32", id="float32", marks=pytest.mark.slow),
    ],
)
def test_loading_peaks_near_the_weights_it_leaves(spec: TinySpec, dtype: str) -> None:
    """Far below 1.2 x weights + 1 GiB: no second copy of the file or of the model is ever held."""
    folder = tiny_folder(spec)
    weights = read_model_card(folder).parameters * BYTES[dtype]
    assert weights > 100 * MIB
    small = tiny_folder(flash(layers=2))
    command = [sys.executable, "-m", "tests.checkpoint.measure_load", str(folder), str(small), dtype, "torch"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={"OMP_NUM_THREADS": "1", "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    memory = json.loads(done.stdout)
    held, peak = (memory[name] - memory["before"] for name in ("after", "peak"))
    assert held >= 0.85 * weights  # some of it in memory that the small model gave back
    assert peak <= 1.2 * weights + 32 * MIB
