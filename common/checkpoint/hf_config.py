"""Turns a Hugging Face config.json into a ModelSpec, and refuses by name what the forward pass does not do. Pure."""

from collections.abc import Mapping
from typing import Any

from common.checkpoint.hf_attention import layer_windows
from common.checkpoint.spec import CheckpointError, ModelSpec, RopeScaling

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
Config = Mapping[str, Any]


def parse_config(config: Config) -> ModelSpec:
    """Raises CheckpointError that names the field when the model needs something that is not offered."""
    _refuse_unsupported(config)
    architecture = _architecture(config)
    num_layers = _required(config, "num_hidden_layers")
    num_heads = _required(config, "num_attention_heads")
    hidden_size = _required(config, "hidden_size")
    rope = config.get("rope_parameters") or config
    return ModelSpec(
        architecture=architecture,
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=config.get("num_key_value_heads") or num_heads,
        head_dim=config.get("head_dim") or hidden_size // num_heads,
        intermediate_size=_required(config, "intermediate_size"),
        vocab_size=_required(config, "vocab_size"),
        max_position=_required(config, "max_position_embeddings"),
        rope_theta=float(rope.get("rope_theta", 10000.0)),
        rope_scaling=_rope_scaling(config.get("rope_parameters") or config.get("rope_scaling")),
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        attention_bias=architecture == "qwen2",
        qk_norm=architecture == "qwen3",
        windows=layer_windows(config, num_layers),
        attention_soft_cap=float(config.get("attn_logit_softcapping") or 0.0),
    )


def _required(config: Config, name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or value < 1:
        raise CheckpointError(f"config.json: {name} should be a positive integer, got {value!r}")
    return value


def _architecture(config: Config) -> str:
    names = config.get("architectures") or ["none"]
    if names[0] not in ARCHITECTURES:
        raise CheckpointError(f"config.json: architecture {names[0]!r} is not one of {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[names[0]]


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


def _rope_scaling(scaling: Config | None) -> RopeScaling | None:
    kind = (scaling or {}).get("rope_type", (scaling or {}).get("type", "default"))
    if scaling is None or kind == "default":
        return None
    if kind != "llama3":
        raise CheckpointError(f"config.json: rope type {kind!r} is not supported, only 'default' and 'llama3'")
    return RopeScaling(
        factor=float(scaling["factor"]),
        low_freq_factor=float(scaling["low_freq_factor"]),
        high_freq_factor=float(scaling["high_freq_factor"]),
        original_max_position=int(scaling["original_max_position_embeddings"]),
    )
