"""The model card: what a checkpoint's config says, in our own typed fields; all a planner knows of it."""

from __future__ import annotations

import msgspec


class AttentionCard(msgspec.Struct, frozen=True, kw_only=True):
    """One layer's attention. ``window``: visible keys including the token itself, None for full attention.

    ``rotary_dim`` channels of each head are rotated; ``value_scale`` multiplies v before it is cached.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    rope_theta: float
    rotary_dim: int
    window: int | None = None
    value_scale: float = 1.0
    has_sink: bool = False
    has_qk_norm: bool = False


class ExpertsCard(msgspec.Struct, frozen=True, kw_only=True):
    """The routed experts of an MoE layer (the same in every MoE layer of a model)."""

    num_experts: int
    top_k: int
    intermediate_size: int
    scoring: str
    normalise_top_k: bool
    routed_scaling_factor: float = 1.0
    has_selection_bias: bool = False
    router_dtype: str = "float32"
    num_groups: int = 1
    top_k_groups: int = 1


class LayerCard(msgspec.Struct, frozen=True, kw_only=True):
    """One decoder layer; ``is_moe`` tells experts from a dense MLP of ``ModelCard.intermediate_size``."""

    attention: AttentionCard
    is_moe: bool


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint, as its ``config.json`` describes it.

    Attributes:
        family: registry name of the model family (``mimo_v2``, ``qwen3_moe``).
        dtype: "float32" or "bfloat16", the checkpoint's own.
        weight_format: "float32", "bfloat16" or "fp8_block" (e4m3 with float32 scales for 128x128 blocks).
        fp8_except: modules of a layer that an fp8 checkpoint keeps in ``dtype``, by last name ("o_proj").
        config_hash: sha256 of the canonical config, for evidence.
        parameters: total number of weights of the text model.
    """

    family: str
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: tuple[LayerCard, ...]
    experts: ExpertsCard | None
    norm_eps: float
    max_position: int
    tie_word_embeddings: bool
    dtype: str
    weight_format: str
    weight_block: tuple[int, int] = (128, 128)
    fp8_except: tuple[str, ...] = ()
    fused_qkv: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    config_hash: str = ""
    parameters: int = 0

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_moe_layers(self) -> int:
        return sum(layer.is_moe for layer in self.layers)
