"""config.json -> ModelCard: the releases' values, both spellings, and what is refused by which name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from interlock.checkpoint.specs import count_parameters
from interlock.errors import CheckpointError
from interlock.models.card_reader import find_family, read_model_card
from interlock.models.decoder_weights import decoder_specs
from interlock.models.mimo_v2.card import read_card as read_mimo
from interlock.models.qwen3_moe.card import read_card as read_qwen
from interlock.plan.card import AttentionCard, ExpertsCard, ModelCard

FULL_LAYERS = {48: (0, 5, 11, 17, 23, 29, 35, 41, 47), 70: (0, 7, 15, 23, 31, 39, 47, 55, 62, 69)}
FP8: dict[str, Any] = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}


def mimo_config(layers: int = 48, **changes: Any) -> dict[str, Any]:
    """config.json of MiMo-V2.5 in the hub's spelling (70 layers: V2.5-Pro); None removes a key."""
    config = {
        "architectures": ["MiMoV2ForCausalLM"],
        "vocab_size": 152576,
        "hidden_size": 4096,
        "intermediate_size": 16384,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": layers,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 192,
        "v_head_dim": 128,
        "swa_num_attention_heads": 64,
        "swa_num_key_value_heads": 8,
        "swa_head_dim": 192,
        "swa_v_head_dim": 128,
        "sliding_window": 128,
        "sliding_window_size": 128,
        "attention_chunk_size": 128,
        "hybrid_layer_pattern": [int(i not in FULL_LAYERS[layers]) for i in range(layers)],
        "moe_layer_freq": [0] + [1] * (layers - 1),
        "n_routed_experts": 256,
        "n_shared_experts": None,
        "num_experts_per_tok": 8,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "routed_scaling_factor": None,
        "attention_bias": False,
        "attention_value_scale": 0.707,
        "attention_projection_layout": "fused_qkv",
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "partial_rotary_factor": 0.334,
        "rope_theta": 10_000_000,
        "swa_rope_theta": 10_000,
        "rope_scaling": {"rope_type": "default", "type": "default"},
        "layernorm_epsilon": 1e-5,
        "hidden_act": "silu",
        "max_position_embeddings": 1048576,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "eos_token_id": 151645,
        "pad_token_id": 151643,
        "quantization_config": {**FP8, "store_dtype": "fp8"},
        "vision_config": {"anything": 1},
    }
    config.update(changes)
    return {key: value for key, value in config.items() if value is not None}


def native_config(**changes: Any) -> dict[str, Any]:
    """What transformers writes for its own mimo_v2_flash class."""
    kinds = ["full_attention" if i in FULL_LAYERS[48] else "sliding_attention" for i in range(48)]
    rope = {
        kind: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 0.334}
        for kind, theta in (("full_attention", 5e6), ("sliding_attention", 1e4))
    }
    config = {
        "architectures": ["MiMoV2FlashForCausalLM"],
        "attention_bias": False,
        "attention_value_scale": 0.707,
        "dtype": "bfloat16",
        "eos_token_id": 2,
        "head_dim": 192,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 16384,
        "layer_types": kinds,
        "max_position_embeddings": 262144,
        "mlp_layer_types": ["dense"] + ["sparse"] * 47,
        "moe_intermediate_size": 2048,
        "n_group": 1,
        "n_routed_experts": 256,
        "norm_topk_prob": True,
        "num_attention_heads": 64,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5,
        "rope_parameters": rope,
        "routed_scaling_factor": 1.0,
        "sliding_window": 129,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "v_head_dim": 128,
        "vocab_size": 152576,
    }
    return {**config, **changes}


def qwen_config(**changes: Any) -> dict[str, Any]:
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "rope_theta": 1e6,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "use_sliding_window": False,
        "max_window_layers": 48,
        "torch_dtype": "bfloat16",
        "bos_token_id": 151643,
        "eos_token_id": 151645,
    }
    config.update(changes)
    return {key: value for key, value in config.items() if value is not None}


FULL = AttentionCard(
    num_heads=64,
    num_kv_heads=4,
    head_dim=192,
    v_head_dim=128,
    rope_theta=1e7,
    rotary_dim=64,
    value_scale=0.707,
)
SLIDING = msgspec.structs.replace(FULL, num_kv_heads=8, rope_theta=1e4, window=128, has_sink=True)
EXPERTS = ExpertsCard(
    num_experts=256,
    top_k=8,
    intermediate_size=2048,
    scoring="sigmoid",
    normalise_top_k=True,
    has_selection_bias=True,
)


def test_v25() -> None:
    card = read_mimo(mimo_config())
    assert card.layers[0].attention == FULL
    assert card.layers[1].attention == SLIDING
    assert [i for i, layer in enumerate(card.layers) if layer.attention.window is None] == list(
        FULL_LAYERS[48]
    )
    assert [layer.is_moe for layer in card.layers] == [False] + [True] * 47
    assert card.experts == EXPERTS
    assert (card.weight_format, card.weight_block, card.fused_qkv) == ("fp8_block", (128, 128), True)
    assert (card.dtype, card.norm_eps, card.max_position) == ("bfloat16", 1e-5, 1048576)
    assert (card.bos_token_id, card.eos_token_ids, card.pad_token_id) == (None, (151645,), 151643)
    assert len(card.config_hash) == 64
    assert card.parameters == pytest.approx(309e9, rel=0.005)


def test_v25_pro() -> None:
    card = read_mimo(
        mimo_config(
            70,
            hidden_size=6144,
            num_attention_heads=128,
            swa_num_attention_heads=128,
            num_key_value_heads=8,
            n_routed_experts=384,
            attention_value_scale=0.612,
            rope_scaling=None,
        )
    )
    assert card.num_layers == 70
    assert card.layers[1].attention.num_kv_heads == card.layers[0].attention.num_kv_heads == 8
    assert card.layers[62].attention.value_scale == 0.612
    assert card.parameters == pytest.approx(1.02e12, rel=0.005)


def test_flash_in_both_spellings() -> None:
    """A09: the hub's keys and those that transformers writes give the same card."""
    hub = read_mimo(
        mimo_config(
            architectures=["MiMoV2FlashForCausalLM"],
            attention_projection_layout=None,
            rope_theta=5_000_000,
            max_position_embeddings=262144,
            eos_token_id=2,
            pad_token_id=None,
            quantization_config=None,
        )
    )
    # transformers counts the token itself on top of the release's 128
    native = read_mimo(native_config(sliding_window=128))
    assert msgspec.structs.replace(native, config_hash=hub.config_hash) == hub
    assert native.layers[1].attention.window == 128
    assert not native.fused_qkv
    assert read_mimo(native_config()).layers[1].attention.window == 129
    assert read_mimo(native_config(sliding_window_size=128)).layers[1].attention.window == 128


def test_qwen3_moe() -> None:
    """A09: 30B-A3B by hand, in the spelling of the hub and of transformers 5."""
    card = read_qwen(qwen_config())
    assert card.layers[0].attention == AttentionCard(
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        v_head_dim=128,
        rope_theta=1e6,
        rotary_dim=128,
        has_qk_norm=True,
    )
    assert card.experts == ExpertsCard(
        num_experts=128, top_k=8, intermediate_size=768, scoring="softmax", normalise_top_k=True
    )
    assert all(layer.is_moe for layer in card.layers)
    assert card.parameters == pytest.approx(30.5e9, rel=0.005)
    rope = {"rope_theta": 1e6, "rope_type": "default"}
    other = read_qwen(
        qwen_config(num_experts=None, num_local_experts=128, rope_theta=None, rope_parameters=rope)
    )
    assert msgspec.structs.replace(other, config_hash=card.config_hash) == card


def test_qwen3_moe_renormalises_only_when_the_file_says_so() -> None:
    """A09: the family's default for an absent norm_topk_prob is False."""
    card = read_qwen(qwen_config(norm_topk_prob=None))
    assert card.experts is not None
    assert card.experts.normalise_top_k is False


def test_sparse_step_and_dense_layers() -> None:
    card = read_qwen(qwen_config(num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3]))
    assert [layer.is_moe for layer in card.layers] == [False, True, False, False, False, True]


@pytest.mark.parametrize("name", ["moe_topk", "num_experts_per_token", "num_expert_per_tok"])
def test_other_spellings_of_a_required_key_are_named(name: str) -> None:
    """A09: a default is never taken for a key that is spelt like another family's."""
    with pytest.raises(CheckpointError) as caught:
        read_mimo(mimo_config(num_experts_per_tok=None, **{name: 8}))
    assert "'num_experts_per_tok'" in str(caught.value)
    assert name in str(caught.value)
    with pytest.raises(CheckpointError, match=rf"'num_experts_per_tok' is missing .*{name} = 8"):
        read_qwen(qwen_config(num_experts_per_tok=None, **{name: 8}))


def test_all_missing_keys_are_listed() -> None:
    """A09: an almost empty file names everything it lacks."""
    with pytest.raises(CheckpointError) as caught:
        read_mimo({"architectures": ["MiMoV2ForCausalLM"], "vocab_size": 5})
    for key in ("hidden_size", "head_dim", "hybrid_layer_pattern", "partial_rotary_factor", "rope_theta"):
        assert f"'{key}'" in str(caught.value)


def test_a_misspelt_optional_key_is_an_error() -> None:
    """A09: ``atention_value_scale`` must not silently mean no scale."""
    with pytest.raises(CheckpointError, match="'atention_value_scale': did you mean 'attention_value_scale'"):
        read_mimo(mimo_config(attention_value_scale=None, atention_value_scale=0.707))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"quantization_config": {**FP8, "store_dtype": "mxfp4"}}, "store_dtype = 'mxfp4' is not supported"),
        ({"quantization_config": {**FP8, "quant_method": "awq"}}, "quant_method = 'awq'"),
        ({"quantization_config": {**FP8, "fmt": "e5m2"}}, "fmt = 'e5m2'"),
        ({"quantization_config": {**FP8, "activation_scheme": "static"}}, "activation_scheme = 'static'"),
        ({"quantization_config": {**FP8, "weight_block_size": [128]}}, r"weight_block_size = \[128\]"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "rope scaling 'yarn'"),
        (
            {"scoring_func": "sqrtsoftplus"},
            "scoring_func = 'sqrtsoftplus' is not supported; supported: 'sigmoid'",
        ),
        ({"topk_method": "greedy"}, "topk_method = 'greedy'"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"n_shared_experts": 1}, "n_shared_experts = 1"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"attention_projection_layout": "interleaved"}, "attention_projection_layout = 'interleaved'"),
        ({"moe_router_dtype": "float16"}, "moe_router_dtype = 'float16'"),
        ({"dtype": "float16"}, "dtype = 'float16'"),
        ({"hybrid_layer_pattern": [0, 1]}, "hybrid_layer_pattern is a list of 2"),
        ({"hybrid_layer_pattern": [2] * 48}, "hybrid_layer_pattern holds 2"),
        ({"layer_types": ["full_attention"] * 48}, "describe different layers"),
        ({"num_key_value_heads": 5}, "not a multiple of num_key_value_heads = 5"),
        ({"swa_num_key_value_heads": None}, "'swa_num_key_value_heads' is missing"),
        ({"sliding_window": 100}, "sliding_window = 100 and sliding_window_size = 128"),
        ({"sliding_window": 0, "sliding_window_size": None}, "sliding_window is 0"),
        ({"num_experts_per_tok": 300}, "300 of 256 experts"),
        ({"hidden_size": "4096"}, "hidden_size is '4096'; expected an integer"),
        ({"vocab_size": True}, "vocab_size is True"),
        ({"rope_theta": -1}, "rope_theta is -1"),
        ({"eos_token_id": "2"}, "eos_token_id is '2'"),
        ({"add_swa_attention_sink_bias": None}, "'add_swa_attention_sink_bias' is missing"),
        ({"swa_rope_theta": None}, "'swa_rope_theta' is missing"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        read_mimo(mimo_config(**changes))


def test_bf16_router_and_two_end_tokens_are_read() -> None:
    card = read_mimo(mimo_config(moe_router_dtype="bfloat16", eos_token_id=[2, 5]))
    assert card.experts is not None
    assert card.experts.router_dtype == "bfloat16"
    assert card.eos_token_ids == (2, 5)


@pytest.mark.parametrize(
    "rope",
    [
        {"partial_rotary_factor": 0.334},
        {
            "partial_rotary_factor": None,
            "rope_parameters": {"partial_rotary_factor": 0.334, "rope_theta": 1e7},
        },
    ],
)
def test_the_rotary_factor_is_found_where_releases_put_it(rope: dict[str, Any]) -> None:
    """E13: int(192 * 0.334) = 64 channels, from the top level or from rope_parameters."""
    assert read_mimo(mimo_config(**rope)).layers[0].attention.rotary_dim == 64


def test_no_rotary_factor_is_an_error() -> None:
    """E13: this family has no default."""
    parameters = {"rope_theta": 1e7}
    with pytest.raises(CheckpointError, match="'partial_rotary_factor' is missing"):
        read_mimo(mimo_config(partial_rotary_factor=None, rope_parameters=parameters))
    with pytest.raises(CheckpointError, match=r"rotates 32|disagree"):
        read_mimo(mimo_config(rope_parameters={"partial_rotary_factor": 0.5, "rope_theta": 1e7}))


def test_an_unknown_architecture_is_refused_with_the_list() -> None:
    """A10: no match by prefix; the served architectures are listed."""
    for name in ("MiMoV2FlashForCausalLMX", "MiMoForCausalLM", "Qwen3ForCausalLM"):
        with pytest.raises(CheckpointError) as caught:
            find_family({"architectures": [name]})
        assert f"architecture {name!r} is not supported" in str(caught.value)
        assert "MiMoV2ForCausalLM (mimo_v2)" in str(caught.value)
        assert "Qwen3MoeForCausalLM (qwen3_moe)" in str(caught.value)
    with pytest.raises(CheckpointError, match="'architectures' is None"):
        find_family({})


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a folder"):
        read_model_card(tmp_path / "absent")
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        read_model_card(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        read_model_card(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="holds a list"):
        read_model_card(tmp_path)


def test_reading_a_card_does_not_import_torch(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(mimo_config()))
    code = (
        "import sys; from interlock.models.card_reader import read_model_card; "
        f"read_model_card({str(tmp_path)!r}); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_card_survives_serialisation() -> None:
    card = read_mimo(mimo_config())
    assert msgspec.json.decode(msgspec.json.encode(card), type=ModelCard) == card


@pytest.mark.parametrize("config", [mimo_config(), native_config(), qwen_config(mlp_only_layers=[0, 7])])
def test_parameters_are_the_sum_over_all_tensors(config: dict[str, Any]) -> None:
    """The count multiplies layers of a kind; the specs name every tensor."""
    card = find_family(config).read_card(config)
    assert card.parameters == count_parameters(decoder_specs(card))
