"""A model of MiMo-V2-Flash's real widths, four layers and few experts, and its logits as a CPU emulates them.

    python -m tests.models.real_width        # writes real_width.npz beside this file (minutes, 5 GiB)

Weights are made up from a seed and are the same on every device, so only the logits need to be carried to a
GPU. The emulation computes what the fp8 kernels compute (block-fp8 weights, activations quantised in groups
of 128) with float32 sums in plain torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from interlock.demo.shapes import shape_folder
from tests.harness import Harness, build_model, run_chunks

FILE = Path(__file__).with_suffix(".npz")
FP8 = "fp8_block"
CHUNKS = (17, 5, 1, 1)
TOKENS = tuple(int(token) for token in np.random.default_rng(7).integers(0, 4096, sum(CHUNKS)))
FORMATS = dict.fromkeys(("attention_weight_format", "mlp_weight_format", "expert_weight_format"), FP8)
EMULATED: dict[str, Any] = {
    "dtype": "bfloat16",
    "kv_cache_dtype": "bfloat16",
    "moe_runner_backend": "torch_fp8",
    **FORMATS,
}


def config() -> dict[str, Any]:
    """Full attention at 0 and 3, the first layer dense; 24 experts, 8 a token; a short vocabulary."""
    folder = shape_folder("shape:mimo-v2-flash")
    assert folder is not None
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found | {
        "num_hidden_layers": 4,
        "hybrid_layer_pattern": [0, 1, 1, 0],
        "moe_layer_freq": [0, 1, 1, 1],
        "n_routed_experts": 24,
        "vocab_size": 4096,
        "sliding_window": 16,
        "sliding_window_size": 16,
        "max_position_embeddings": 512,
    }


def build(folder: Path, **held: Any) -> Harness:
    """The model with dummy weights; ``folder`` is written to."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config()))
    return build_model(folder, load_format="dummy", seed=11, full_pages=8, window_pages=8, **held)


def logits(harness: Harness) -> torch.Tensor:
    """float32 [tokens, vocabulary] of a prefill in two chunks and two decode steps, each row's mean at 0."""
    rows = run_chunks(harness, TOKENS, CHUNKS)
    return (rows - rows.mean(dim=1, keepdim=True)).float().cpu()


def reference() -> torch.Tensor:
    """What ``main`` wrote."""
    rows = torch.from_numpy(np.load(FILE)["logits"]).float()
    return rows - rows.mean(dim=1, keepdim=True)


def main() -> None:
    """Write the emulated logits as float16."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        rows = logits(build(Path(folder), **EMULATED))
    np.savez_compressed(FILE, logits=rows.numpy().astype(np.float16))
    print(f"{FILE}: {tuple(rows.shape)}, standard deviation {float(rows.std()):.3f}")


if __name__ == "__main__":
    main()
