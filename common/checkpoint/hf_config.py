"""Turns a Hugging Face config.json into a ModelSpec, and refuses by name what the forward pass does not do. Pure."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypedDict

from common.checkpoint.deepseek import deepseek_shape, is_deepseek, latent_scale, read_latent
from common.checkpoint.families import FAMILIES
from common.checkpoint.gemma3 import gemma3_of_config
from common.checkpoint.hf_attention import layer_windows
from common.checkpoint.hf_experts import read_experts
from common.checkpoint.hf_rope import read_phi3_rope, read_rope
from common.checkpoint.quantization import read_quantization
from common.checkpoint.rope import DynamicScaling, Rope
from common.checkpoint.spec import CheckpointError, ModelSpec, within_layers


class ScaleFields(TypedDict, total=False):
    """Fields of `ModelSpec`."""

    embedding_scale: float
    attention_scale: float
    residual_scale: float
    logit_scale: float


ARCHITECTURES = {name: architecture for architecture, family in FAMILIES.items() for name in family.hf_classes}
Config = Mapping[str, Any]
# What transformers takes for a field that is absent, where that is not derived from other fields.
_QWEN: Config = {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}
ABSENT: Mapping[str, Config] = {
    "MistralForCausalLM": {"num_key_value_heads": 8, "sliding_window": 4096},
    "Qwen2ForCausalLM": _QWEN,
    "Qwen3ForCausalLM": {**_QWEN, "head_dim": 128},
    "MixtralForCausalLM": {
        **{"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "sliding_window": None},
        **{"num_local_experts": 8, "num_experts_per_tok": 2, "rope_theta": 1e6},
    },
    "Qwen2MoeForCausalLM": {
        **{"num_key_value_heads": 16, "sliding_window": 4096, "max_window_layers": 28, "decoder_sparse_step": 1},
        **{"moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632},
        **{"num_experts_per_tok": 4, "num_experts": 60},
    },
    "Qwen3MoeForCausalLM": {
        **{"num_key_value_heads": 4, "sliding_window": 4096, "decoder_sparse_step": 1},
        **{"moe_intermediate_size": 768, "num_experts_per_tok": 8, "num_experts": 128},
    },
    "OlmoeForCausalLM": {"rms_norm_eps": 1e-5, "num_experts_per_tok": 8, "num_experts": 64},
    "Glm4MoeForCausalLM": {
        **{"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "norm_topk_prob": True},
        **{"moe_intermediate_size": 1408, "num_experts_per_tok": 8, "n_shared_experts": 1, "n_routed_experts": 128},
        **{"routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    },
    "DeepseekV2ForCausalLM": {
        **{"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64},
        **{"v_head_dim": 128, "moe_intermediate_size": 1407, "n_routed_experts": 64, "n_shared_experts": 2},
        **{"routed_scaling_factor": 1.0, "topk_method": "greedy", "norm_topk_prob": False},
    },
    "DeepseekV3ForCausalLM": {
        **{"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64},
        **{"v_head_dim": 128, "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1},
        **{"routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8},
        **{"first_k_dense_replace": 3, "norm_topk_prob": True},
    },
    "GptOssForCausalLM": {
        **{"num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5, "sliding_window": 128},
        **{"attention_bias": True, "num_local_experts": 128, "num_experts_per_tok": 4, "rope_theta": 150000.0},
        "rope_parameters": {
            **{"rope_type": "yarn", "factor": 32.0, "truncate": False},
            "original_max_position_embeddings": 4096,
        },
    },
    "Phi3ForCausalLM": {"rms_norm_eps": 1e-5, "sliding_window": None},
    "Olmo2ForCausalLM": {"rms_norm_eps": 1e-5},
    "Gemma2ForCausalLM": {
        **{"num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True, "sliding_window": 4096},
        **{"query_pre_attn_scalar": 256, "hidden_activation": "gelu_pytorch_tanh"},
        **{"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    },
    "Gemma3ForCausalLM": {
        **{"num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True, "sliding_window": 4096},
        **{"sliding_window_pattern": 6, "query_pre_attn_scalar": 256, "hidden_activation": "gelu_pytorch_tanh"},
    },
}
# The families whose classes in transformers have such biases.
_WITH_BIAS = ("Llama", "Qwen3", "Qwen3Moe", "Olmo2", "Olmoe", "Granite", "GptOss", "Glm4Moe")
BIASES: Mapping[str, tuple[str, ...]] = {
    "attention_bias": tuple(f"{name}ForCausalLM" for name in _WITH_BIAS),
    "mlp_bias": ("LlamaForCausalLM", "GraniteForCausalLM"),
}
DRAFTING = ("glm4moe", "deepseek_v3")  # their files may have layers that only draft
ACTIVATIONS = {
    "silu": ("hidden_act", "silu"),
    "clamped": ("hidden_act", "silu"),
    "gelu_tanh": ("hidden_activation", "gelu_pytorch_tanh"),
}


def parse_config(config: Config) -> ModelSpec:
    """Raises CheckpointError that names the field when the model needs something that is not offered."""
    architecture = _architecture(config)
    config = {**ABSENT.get(config["architectures"][0], {}), **config}
    if is_deepseek(architecture):
        config = deepseek_shape(config)
    _refuse_unsupported(config, architecture)
    read_quantization(config)
    num_layers = within_layers("config.json: num_hidden_layers", _required(config, "num_hidden_layers"))
    num_heads = _required(config, "num_attention_heads")
    hidden_size = _required(config, "hidden_size")
    gemma3 = gemma3_of_config(config, hidden_size) if architecture == "gemma3" else None
    head_dim = _optional(config, "head_dim") or hidden_size // num_heads
    rope = gemma3[0] if gemma3 is not None else _rope(config, architecture, head_dim)
    max_position = _max_position(config, rope)
    spec = ModelSpec(
        architecture=architecture,
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=_optional(config, "num_key_value_heads") or num_heads,
        head_dim=head_dim,
        intermediate_size=_required(config, "intermediate_size"),
        vocab_size=_required(config, "vocab_size"),
        max_position=max_position,
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        rms_norm_eps=_epsilon(config),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        windows=layer_windows(config, num_layers, max_position),
        attention_soft_cap=float(config.get("attn_logit_softcapping") or 0.0),
        logit_soft_cap=float(config.get("final_logit_softcapping") or 0.0),
        attention_bias=_has_bias(config, "attention_bias"),
        mlp_bias=_has_bias(config, "mlp_bias"),
        rotary_size=rope.size,
        num_drafting_layers=int(config.get("num_nextn_predict_layers") or 0) if architecture in DRAFTING else 0,
        has_head_norms=architecture == "glm4moe" and bool(config.get("use_qk_norm")),
        **read_experts(architecture, config, num_layers),
        **read_latent(architecture, config),
        **_scales(config, architecture),
    )
    return spec if gemma3 is None else replace(spec, **gemma3[1])


def _rope(config: Config, architecture: str, head_dim: int) -> Rope:
    if architecture == "phi3":
        return read_phi3_rope(config, head_dim=head_dim)
    return read_rope(config, head_dim=head_dim if architecture == "glm4moe" else 0)


def _has_bias(config: Config, name: str) -> bool:
    return config["architectures"][0] in BIASES[name] and bool(config.get(name, False))


def _scales(config: Config, architecture: str) -> ScaleFields:
    """{} for a family that has none of its own."""
    if is_deepseek(architecture):
        return {"attention_scale": latent_scale(config)}
    if architecture == "gemma_2":
        scale = _factor(config, "query_pre_attn_scalar") ** -0.5
        return {"attention_scale": scale, "embedding_scale": config["hidden_size"] ** 0.5}
    if architecture != "granite":
        return {}
    names = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
    embedding, attention, residual, logits = (_factor(config, name) for name in names)
    return {
        "embedding_scale": embedding,
        "attention_scale": attention,
        "residual_scale": residual,
        "logit_scale": 1 / logits,
    }


def _factor(config: Config, name: str) -> float:
    value = config.get(name, 1.0)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise CheckpointError(f"config.json: {name} should be a positive number, got {value!r}")
    return float(value)


def _max_position(config: Config, rope: Rope) -> int:
    """The tokens of the longest text. With dynamic scaling config.json states those that the model was trained on."""
    stated = _required(config, "max_position_embeddings")
    return int(stated * rope.scaling.factor) if isinstance(rope.scaling, DynamicScaling) else stated


def _required(config: Config, name: str) -> int:
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(f"config.json: {name} should be a positive integer, got {value!r}")
    return value


def _optional(config: Config, name: str) -> int | None:
    """None for what is absent or null: derived from other fields."""
    return None if config.get(name) is None else _required(config, name)


def _epsilon(config: Config) -> float:
    value = config.get("rms_norm_eps", 1e-6)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise CheckpointError(f"config.json: rms_norm_eps should be a number, got {value!r}")
    return float(value)


def _architecture(config: Config) -> str:
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if name not in ARCHITECTURES:
        raise CheckpointError(f"config.json: architecture {name!r} is not one of {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[name]


def _refuse_unsupported(config: Config, architecture: str) -> None:
    field, activation = ACTIVATIONS[FAMILIES[architecture].activation]
    found = {
        "final_logit_softcapping": bool(config.get("final_logit_softcapping")) and architecture != "gemma_2",
        "use_bidirectional_attention": bool(config.get("use_bidirectional_attention")),
        **{name: bool(config.get(name)) for name in BIASES if not _has_bias(config, name)},
        field: config.get(field, activation) != activation,
    }
    for name, is_unsupported in found.items():
        if is_unsupported:
            raise CheckpointError(f"config.json: {name}={config[name]!r} is not supported")
