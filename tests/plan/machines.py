"""Machines and model cards for planner tests: made up, except the public values of the MiMo-V2 configs."""

from __future__ import annotations

from typing import Any

from interlock.models.card_reader import find_family
from interlock.plan.card import AttentionCard, ExpertsCard, LayerCard, ModelCard
from interlock.plan.facts import Device, MachineFacts
from interlock.plan.nccl import NcclLibrary

GIB = 1 << 30


def machine(**changes: Any) -> MachineFacts:
    """A CPU machine with 64 cores, 256 GiB and a compiler; ``changes`` replace fields."""
    fields: dict[str, Any] = {
        "os": "linux",
        "architecture": "x86_64",
        "python": "3.12.1",
        "cores": 64,
        "memory_total": 256 * GIB,
        "memory_available": 240 * GIB,
        "packages": {"torch": "2.13.0+cpu"},
    }
    return MachineFacts(**(fields | changes))


def gpu_machine(
    gpus: int = 8, memory: int = 139 * GIB, capability: str = "9.0", triton: str | None = "3.6.0"
) -> MachineFacts:
    """A node of H200s, or of GPUs of another compute capability."""
    name = "NVIDIA H200" if capability == "9.0" else "GPU"
    device = Device(kind="cuda", name=name, memory_total=memory, memory_free=memory, capability=capability)
    packages = {"torch": "2.11.0+cu130"} | ({} if triton is None else {"triton": triton})
    nccl = NcclLibrary(path="/torch/nvidia/nccl/lib/libnccl.so.2", version="2.30.7", of_torch=True)
    return machine(devices=(device,) * gpus, packages=packages, cores=128, nccl=(nccl,))


def tiny_card(**changes: Any) -> ModelCard:
    """Four layers (full, window, window, full), the first dense; 8 experts of width 128, 2 chosen."""
    common = {"num_heads": 8, "head_dim": 24, "v_head_dim": 16, "rope_theta": 1e4, "rotary_dim": 8}
    full = AttentionCard(num_kv_heads=2, **common)
    window = AttentionCard(num_kv_heads=4, window=8, has_sink=True, value_scale=0.707, **common)
    fields: dict[str, Any] = {
        "family": "mimo_v2",
        "architecture": "MiMoV2ForCausalLM",
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 512,
        "layers": tuple(
            LayerCard(attention=attention, is_moe=index > 0)
            for index, attention in enumerate((full, window, window, full))
        ),
        "experts": ExpertsCard(
            num_experts=8, top_k=2, intermediate_size=128, scoring="sigmoid", normalise_top_k=True
        ),
        "norm_eps": 1e-5,
        "max_position": 4096,
        "tie_word_embeddings": False,
        "dtype": "float32",
        "weight_format": "float32",
    }
    return ModelCard(**(fields | changes))


def dense_card() -> ModelCard:
    """The tiny card without experts."""
    card = tiny_card()
    layers = tuple(LayerCard(attention=layer.attention, is_moe=False) for layer in card.layers)
    return tiny_card(layers=layers, experts=None)


def mimo_card(**changes: Any) -> ModelCard:
    """MiMo-V2-Flash from its config.json; ``changes`` replace keys."""
    full_layers = changes.pop("full_layers", (0, 5, 11, 17, 23, 29, 35, 41, 47))
    layers = changes.get("num_hidden_layers", 48)
    config: dict[str, Any] = {
        "architectures": ["MiMoV2FlashForCausalLM"],
        "model_type": "mimo_v2_flash",
        "vocab_size": 152576,
        "hidden_size": 4096,
        "num_hidden_layers": layers,
        "num_attention_heads": 64,
        "swa_num_attention_heads": 64,
        "num_key_value_heads": 4,
        "swa_num_key_value_heads": 8,
        "head_dim": 192,
        "v_head_dim": 128,
        "swa_head_dim": 192,
        "swa_v_head_dim": 128,
        "partial_rotary_factor": 0.334,
        "rope_theta": 5000000,
        "swa_rope_theta": 10000,
        "sliding_window": 128,
        "sliding_window_size": 128,
        "attention_value_scale": 0.707,
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "attention_bias": False,
        "hybrid_layer_pattern": [int(index not in full_layers) for index in range(layers)],
        "moe_layer_freq": [0] + [1] * (layers - 1),
        "intermediate_size": 16384,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "n_group": 1,
        "topk_group": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "layernorm_epsilon": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "max_position_embeddings": 262144,
        "torch_dtype": "bfloat16",
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "ignored_layers": [f"model.layers.{index}.self_attn.o_proj" for index in range(layers)],
        },
    }
    config |= changes
    return find_family(config).read_card(config)


def mimo_pro_card() -> ModelCard:
    """MiMo-V2.5-Pro."""
    return mimo_card(
        architectures=["MiMoV2ForCausalLM"],
        model_type="mimo_v2",
        hidden_size=6144,
        num_hidden_layers=70,
        num_attention_heads=128,
        swa_num_attention_heads=128,
        num_key_value_heads=8,
        swa_num_key_value_heads=8,
        rope_theta=10000000,
        attention_value_scale=0.612,
        attention_projection_layout="fused_qkv",
        full_layers=(0, 7, 15, 23, 31, 39, 47, 55, 62, 69),
        n_routed_experts=384,
        max_position_embeddings=1048576,
    )
