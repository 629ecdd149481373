"""Turns a Hugging Face config.json into a ModelSpec, and refuses by name what the forward pass does not do. Pure."""

from collections.abc import Mapping
from typing import Any

from common.checkpoint.families import FAMILIES
from common.checkpoint.hf_attention import layer_windows
from common.checkpoint.hf_rope import read_rope
from common.checkpoint.spec import CheckpointError, ModelSpec

ARCHITECTURES = {name: architecture for architecture, family in FAMILIES.items() for name in family.hf_classes}
# What transformers takes for a field that is absent, where that is not derived from other fields.
ABSENT_KV_HEADS = {"MistralForCausalLM": 8, "Qwen2ForCausalLM": 32, "Qwen3ForCausalLM": 32}
ABSENT_HEAD_DIM = {"Qwen3ForCausalLM": 128}
Config = Mapping[str, Any]


def parse_config(config: Config) -> ModelSpec:
    """Raises CheckpointError that names the field when the model needs something that is not offered."""
    _refuse_unsupported(config)
    architecture = _architecture(config)
    num_layers = _required(config, "num_hidden_layers")
    num_heads = _required(config, "num_attention_heads")
    hidden_size = _required(config, "hidden_size")
    rope = read_rope(config)
    name = config["architectures"][0]
    return ModelSpec(
        architecture=architecture,
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=_optional(config, "num_key_value_heads", ABSENT_KV_HEADS.get(name)) or num_heads,
        head_dim=_optional(config, "head_dim", ABSENT_HEAD_DIM.get(name)) or hidden_size // num_heads,
        intermediate_size=_required(config, "intermediate_size"),
        vocab_size=_required(config, "vocab_size"),
        max_position=_required(config, "max_position_embeddings"),
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        rms_norm_eps=_epsilon(config),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        windows=layer_windows(config, num_layers),
        attention_soft_cap=float(config.get("attn_logit_softcapping") or 0.0),
    )


def _required(config: Config, name: str) -> int:
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(f"config.json: {name} should be a positive integer, got {value!r}")
    return value


def _optional(config: Config, name: str, absent: int | None) -> int | None:
    """None for a null: derived from other fields."""
    if name not in config:
        return absent
    return None if config[name] is None else _required(config, name)


def _epsilon(config: Config) -> float:
    value = config.get("rms_norm_eps", 1e-6)
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise CheckpointError(f"config.json: rms_norm_eps should be a number, got {value!r}")
    return float(value)


def _architecture(config: Config) -> str:
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if name not in ARCHITECTURES:
        raise CheckpointError(f"config.json: architecture {name!r} is not one of {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[name]


def _refuse_unsupported(config: Config) -> None:
    found = {
        "quantization_config": config.get("quantization_config") is not None,
        "final_logit_softcapping": bool(config.get("final_logit_softcapping")),
        "attention_bias": bool(config.get("attention_bias", False)),
        "mlp_bias": bool(config.get("mlp_bias", False)),
        "hidden_act": config.get("hidden_act", "silu") != "silu",
    }
    for name, is_unsupported in found.items():
        if is_unsupported:
            raise CheckpointError(f"config.json: {name}={config[name]!r} is not supported")
