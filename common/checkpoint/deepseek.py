"""DeepSeek V2 and V3: latent attention, and which experts are chosen, as config.json states them. Pure."""

from collections.abc import Mapping
from typing import Any, TypedDict

from common.checkpoint.layers import Latent, Routing
from common.checkpoint.rope import magnitude
from common.checkpoint.spec import CheckpointError

Config = Mapping[str, Any]


class LatentFields(TypedDict, total=False):
    """Fields of `ModelSpec`."""

    latent: Latent
    has_interleaved_rope: bool


def read_latent(architecture: str, config: Config) -> LatentFields:
    """{} for a family without latents. Raises CheckpointError by field."""
    if not is_deepseek(architecture):
        return {}
    names = ("kv_lora_rank", "qk_nope_head_dim", "v_head_dim")
    rank, key_size, value_size = (_count(config, name) for name in names)
    query_rank = _count(config, "q_lora_rank") if config.get("q_lora_rank") is not None else 0
    return {
        "latent": Latent(rank, key_size, value_size, query_rank),
        "has_interleaved_rope": bool(config.get("rope_interleave", True)),
    }


def is_deepseek(architecture: str) -> bool:
    return architecture.startswith("deepseek")


def deepseek_shape(config: Config) -> dict[str, Any]:
    """`config` with the head and the KV heads of its other fields: each head has keys of its own."""
    return {
        **config,
        "head_dim": _count(config, "qk_rope_head_dim"),
        "num_key_value_heads": config.get("num_attention_heads"),
    }


def latent_scale(config: Config) -> float:
    """Of the scores: by the size of a key, and by what YaRN multiplies q and k with, the parts that it does not turn
    too."""
    key_size = _count(config, "qk_nope_head_dim") + _count(config, "qk_rope_head_dim")
    return float(key_size**-0.5 * _yarn_magnitude(config) ** 2)


def _yarn_magnitude(config: Config) -> float:
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    of_all = scaling.get("mscale_all_dim")
    if scaling.get("rope_type", scaling.get("type", "default")) == "default" or not of_all:
        return 1.0
    values = scaling.get("factor"), of_all
    if not all(isinstance(value, int | float) for value in values):
        raise CheckpointError(f"config.json: factor and mscale_all_dim of RoPE should be numbers, got {values!r:.80}")
    return magnitude(*map(float, values))


def check_choice(architecture: str, config: Config, routing: Routing) -> None:
    """Raises CheckpointError where experts are to be chosen in a way that transformers' class does not choose."""
    is_v2 = architecture == "deepseek_v2"
    known: dict[str, tuple[Any, ...]] = {
        "scoring_func": ("softmax" if is_v2 else "sigmoid", None),
        "topk_method": ("greedy", "group_limited_greedy") if is_v2 else ("noaux_tc", None),
        "moe_layer_freq": (1, None),
        "norm_topk_prob": (False, None) if is_v2 else (True, False),
    }
    for name, values in known.items():
        if config.get(name) not in values:
            raise CheckpointError(f"config.json: {name}={config.get(name)!r:.80} is not supported")
    in_groups = routing.num_experts // routing.num_groups * routing.num_active_groups
    if routing.num_active > in_groups:
        raise CheckpointError(f"config.json: num_experts_per_tok={routing.num_active} of {in_groups} in topk_group")


def _count(config: Config, name: str) -> int:
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(f"config.json: {name} should be a positive integer, got {value!r}")
    return value
