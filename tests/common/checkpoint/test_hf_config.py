"""config.json to ModelSpec."""

import math
from typing import Any

import pytest

from common.checkpoint import CheckpointError
from common.checkpoint.families import layers_of
from common.checkpoint.hf_config import parse_config
from common.checkpoint.rope import Llama3Scaling

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 3,
    "hidden_size": 48,
    "num_attention_heads": 6,
    "intermediate_size": 96,
    "vocab_size": 100,
    "max_position_embeddings": 256,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_absent_fields_take_hugging_faces_defaults() -> None:
    spec = parse_config(CONFIG)
    assert (spec.num_kv_heads, spec.head_dim) == (6, 8)
    assert (spec.rope_theta, spec.rope_scaling, spec.rms_norm_eps) == (10000.0, None, 1e-6)
    assert not spec.tie_embeddings


@pytest.mark.parametrize("where", ["rope_scaling", "rope_parameters"])
def test_llama3_scaling_is_read_from_old_and_new_configs(where: str) -> None:
    spec = parse_config(CONFIG | {where: LLAMA3 | {"rope_theta": 500000.0}, "rope_theta": 500000.0})
    assert spec.rope_theta == 500000.0
    assert spec.rope_scaling == Llama3Scaling(8.0, 1.0, 4.0, 8192)


def test_plain_rope_parameters_carry_theta() -> None:
    spec = parse_config(CONFIG | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}})
    assert (spec.rope_theta, spec.rope_scaling) == (1e6, None)


@pytest.mark.parametrize(
    ("architecture", "has_bias", "qk_norm"),
    [
        ("LlamaForCausalLM", False, "none"),
        ("Qwen2ForCausalLM", True, "none"),
        ("Qwen3ForCausalLM", False, "head"),
        ("Olmo2ForCausalLM", False, "full"),
    ],
)
def test_architectures_differ_in_bias_and_head_norm(architecture: str, has_bias: bool, qk_norm: str) -> None:
    layers = layers_of(parse_config(CONFIG | {"architectures": [architecture], "num_key_value_heads": 3}))
    assert [(layer.qkv_bias, layer.qk_norm) for layer in layers] == [(has_bias, qk_norm)] * 3


@pytest.mark.parametrize(
    "change",
    [
        {"architectures": ["MambaForCausalLM"]},
        {"architectures": None},
        {"quantization_config": {"bits": 4}},
        {"sliding_window": 64},
        {"sliding_window": 64, "architectures": ["GraniteForCausalLM"]},
        {"architectures": ["MistralForCausalLM"], "sliding_window": -1},
        {"layer_types": ["chunked_attention"] * 3, "sliding_window": 64},
        {"layer_types": ["sliding_attention"] * 2, "sliding_window": 64},
        {"final_logit_softcapping": 30.0},
        {"attention_bias": True, "architectures": ["MistralForCausalLM"], "num_key_value_heads": 6},
        {"mlp_bias": True, "architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 6},
        {"hidden_act": "gelu"},
        {"rope_scaling": {"rope_type": "xpos", "factor": 4.0}},
        {"num_hidden_layers": "3"},
        {"num_hidden_layers": 10**9},
        {"rms_norm_eps": math.nan},
        {"rms_norm_eps": math.inf},
        {"rope_theta": math.inf},
        {"rope_theta": math.nan},
        {"vocab_size": None},
        {"num_key_value_heads": 4},
        {"head_dim": 7},
    ],
    ids=str,
)
def test_what_the_forward_pass_does_not_do_is_refused_by_name(change: dict[str, Any]) -> None:
    name = {"architectures": "architecture|sliding_window", "rope_scaling": "rope type"}
    name["num_key_value_heads"] = "KV heads"
    with pytest.raises(CheckpointError, match=name.get(next(iter(change)), next(iter(change)))):
        parse_config(CONFIG | change)


@pytest.mark.parametrize(
    ("change", "windows"),
    [
        ({"architectures": ["MistralForCausalLM"]}, ()),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, ()),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 64}, (64, 64, 64)),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 64}, ()),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 64, "use_sliding_window": True}, ()),
        (
            {"architectures": ["Qwen3ForCausalLM"], "sliding_window": 64, "use_sliding_window": True}
            | {"max_window_layers": 1},
            (0, 64, 64),
        ),
        (
            {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
            (64, 0, 64),
        ),
        (
            {"architectures": ["MistralForCausalLM"], "sliding_window": 2048, "max_position_embeddings": 1024}
            | {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
            (2048, 2048, 2048),
        ),
    ],
    ids=str,
)
def test_windows_are_per_layer_as_hugging_face_reads_them(change: dict[str, Any], windows: tuple[int, ...]) -> None:
    spec = parse_config(CONFIG | {"num_key_value_heads": 6} | change)
    assert spec.windows == windows
    assert tuple(layer.attention.window for layer in layers_of(spec)) == (windows or (0, 0, 0))


def test_soft_cap_of_attention_is_read() -> None:
    assert parse_config(CONFIG | {"attn_logit_softcapping": 50.0}).attention_soft_cap == 50.0
    assert parse_config(CONFIG | {"attn_logit_softcapping": None}).attention_soft_cap == 0.0
