"""What a tiny random checkpoint looks like: one frozen description that the generator and the tests share."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from interlock.errors import InterlockError

FAMILIES = ("mimo_v2", "qwen3_moe")
QKV_LAYOUTS = ("split", "plain", "chunked")
DTYPES = ("float32", "bfloat16")
MIN_VOCAB = 259


@dataclass(frozen=True, kw_only=True)
class TinySpec:
    """Sizes and features of a tiny random checkpoint; the defaults show every MiMo-V2 feature at once.

    Attributes:
        family: "mimo_v2" or "qwen3_moe" (start from ``TinySpec.qwen3_moe()`` for the latter).
        qkv: "split" (q_proj, k_proj, v_proj; MiMo-V2-Flash names), "plain" (one qkv_proj, rows [Q;K;V]) or
            "chunked" (MiMo-V2.5: ``num_kv_heads`` chunks, each [Q_c|K_c|V_c]).
        fp8: linears as e4m3 with float32 scales of 128x128 blocks; in the chunked layout the block grid
            restarts in every chunk. Never quantised: MiMo's o_proj, router, norms, embeddings, head.
        dtype: dtype of what is not quantised ("float32", "bfloat16"); MiMo's router stays float32.
        layers: decoder layers; the attention of each comes from ``pattern``.
        pattern: 1 for a sliding-window layer, 0 for full attention; None: full at 0, 5, 11, ... (MiMo-V2).
        window: visible keys of a sliding-window layer, including the token itself.
        swa_num_kv_heads: key/value heads of sliding-window layers.
        dense_layers: leading layers with a dense MLP in place of experts.
        intermediate_size, moe_intermediate_size: width of the dense MLP and of one expert; the defaults are
            no multiples of 128, so that block scales have partial edge blocks.
        value_scale: factor on v, None for none. sinks: sink biases in sliding-window layers.
        tie_word_embeddings: no lm_head tensor; the head shares the embedding.
        shards: number of safetensors files; more than one adds an index.
    """

    family: str = "mimo_v2"
    qkv: str = "chunked"
    fp8: bool = True
    dtype: str = "bfloat16"
    seed: int = 0
    vocab_size: int = 512
    hidden_size: int = 256
    intermediate_size: int = 320
    layers: int = 7
    pattern: tuple[int, ...] | None = None
    window: int = 16
    num_heads: int = 16
    num_kv_heads: int = 4
    swa_num_kv_heads: int = 8
    head_dim: int = 192
    v_head_dim: int = 128
    partial_rotary_factor: float = 0.334
    rope_theta: float = 1e7
    swa_rope_theta: float = 1e4
    value_scale: float | None = 0.707
    sinks: bool = True
    experts: int = 8
    top_k: int = 2
    moe_intermediate_size: int = 160
    routed_scaling_factor: float | None = None
    dense_layers: int = 1
    norm_eps: float = 1e-5
    max_position: int = 4096
    tie_word_embeddings: bool = False
    shards: int = 1

    @classmethod
    def qwen3_moe(cls, **changes: Any) -> Self:
        """A tiny Qwen3-MoE: softmax router, q/k norm, full attention and full rotary in every layer."""
        base: dict[str, Any] = {
            "family": "qwen3_moe",
            "qkv": "split",
            "fp8": False,
            "dtype": "float32",
            "layers": 4,
            "num_heads": 8,
            "num_kv_heads": 4,
            "head_dim": 64,
            "v_head_dim": 64,
            "partial_rotary_factor": 1.0,
            "rope_theta": 1e6,
            "value_scale": None,
            "sinks": False,
            "dense_layers": 0,
            "norm_eps": 1e-6,
        }
        return cls(**{**base, **changes})

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed."""
        return replace(self, **changes)

    def layer_pattern(self) -> tuple[int, ...]:
        """One entry for each layer: 1 for a sliding-window layer, 0 for full attention."""
        if self.pattern is not None:
            return self.pattern
        if self.family == "qwen3_moe":
            return (0,) * self.layers
        return tuple(int(layer % 6 != 5 and layer > 0) for layer in range(self.layers))

    def kv_heads(self, layer: int) -> int:
        """Key/value heads of one layer."""
        return self.swa_num_kv_heads if self.layer_pattern()[layer] else self.num_kv_heads

    def as_dict(self) -> dict[str, Any]:
        """All fields, for a cache key."""
        return asdict(self)

    def __post_init__(self) -> None:
        for problem in self._problems():
            raise InterlockError(f"tiny checkpoint: {problem}")

    def _problems(self) -> list[str]:
        pattern = self.layer_pattern()
        kv_counts = {self.kv_heads(layer) for layer in range(min(self.layers, len(pattern)))}
        checks = [
            (self.family in FAMILIES, f"family {self.family!r} is not one of {', '.join(FAMILIES)}"),
            (self.qkv in QKV_LAYOUTS, f"qkv {self.qkv!r} is not one of {', '.join(QKV_LAYOUTS)}"),
            (self.dtype in DTYPES, f"dtype {self.dtype!r} is not one of {', '.join(DTYPES)}"),
            (
                self.layers >= 1 and len(pattern) == self.layers,
                f"pattern {pattern} needs {self.layers} entries",
            ),
            (1 <= self.top_k <= self.experts, f"top_k {self.top_k} is not within 1..{self.experts} experts"),
            (
                all(self.num_heads % kv == 0 for kv in kv_counts),
                f"{self.num_heads} heads are no multiple of the key/value heads {sorted(kv_counts)}",
            ),
            (
                self.qkv != "chunked" or all(kv % self.num_kv_heads == 0 for kv in kv_counts),
                f"chunked qkv: {sorted(kv_counts)} kv heads are no multiples of {self.num_kv_heads} chunks",
            ),
            (
                self.vocab_size >= MIN_VOCAB,
                f"vocab_size {self.vocab_size} is below {MIN_VOCAB} (256 bytes and 3 special tokens)",
            ),
            (self.shards >= 1, f"shards {self.shards} is below 1"),
            (
                self.family != "qwen3_moe"
                or (self.qkv == "split" and self.head_dim == self.v_head_dim and not any(pattern)),
                "qwen3_moe has split qkv, one head width and full attention; start from TinySpec.qwen3_moe()",
            ),
        ]
        return [message for fine, message in checks if not fine]
