"""The checkpoints that a GPU is compared on, made from seeds, and the prompts."""

from __future__ import annotations

from pathlib import Path

from interlock.demo.tiny_spec import TinySpec

REFERENCES = Path(__file__).parent / "references.safetensors"

TINY = TinySpec(moe_intermediate_size=256, intermediate_size=384, qkv="split")
REAL_WIDTH = TinySpec(
    layers=4,
    hidden_size=4096,
    intermediate_size=16384,
    moe_intermediate_size=2048,
    num_heads=64,
    num_kv_heads=4,
    swa_num_kv_heads=8,
    window=128,
    experts=8,
    top_k=2,
    qkv="split",
    shards=4,
)
"""Four layers as wide as MiMo-V2-Flash's: dense with full attention, then experts with sliding windows."""
SPECS = {"tiny": TINY, "real_width": REAL_WIDTH}
PROMPTS = tuple(
    tuple((5 * row + 13 * column + 15) % 480 + 8 for column in range(length))
    for row, length in enumerate((1, 16, 17, 33, 150))
)
