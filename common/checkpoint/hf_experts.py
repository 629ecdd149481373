"""Mixtures of experts as config.json states them, by the fields of each family. Pure."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypedDict

from common.checkpoint.deepseek import check_choice
from common.checkpoint.gpt_oss import gpt_oss_experts
from common.checkpoint.layers import Experts, Routing
from common.checkpoint.spec import CheckpointError

Config = Mapping[str, Any]


class ExpertFields(TypedDict, total=False):
    """Fields of `ModelSpec`."""

    experts: Experts
    dense_layers: frozenset[int]


def read_experts(architecture: str, config: Config, num_layers: int) -> ExpertFields:
    """{} for a family without experts. Raises CheckpointError by field."""
    read = READERS.get(architecture)
    return {} if read is None else read(config, num_layers)


def _mixtral(config: Config, num_layers: int) -> ExpertFields:
    routing = _routing(config, "num_local_experts", is_normalized=True)
    return {"experts": Experts(routing, _count(config, "intermediate_size"))}


def _olmoe(config: Config, num_layers: int) -> ExpertFields:
    if config.get("clip_qkv") is not None:
        raise CheckpointError(f"config.json: clip_qkv={config['clip_qkv']!r} is not supported")
    routing = _routing(config, "num_experts", is_normalized=bool(config.get("norm_topk_prob")))
    return {"experts": Experts(routing, _count(config, "intermediate_size"))}


def _qwen3_moe(config: Config, num_layers: int) -> ExpertFields:
    routing = _routing(config, "num_experts", is_normalized=bool(config.get("norm_topk_prob")))
    experts = Experts(routing, _count(config, "moe_intermediate_size"))
    return {"experts": experts, "dense_layers": _dense_layers(config, num_layers)}


def _qwen2_moe(config: Config, num_layers: int) -> ExpertFields:
    if not config.get("qkv_bias", True):
        raise CheckpointError("config.json: qkv_bias=False is not supported")
    routing = _routing(config, "num_experts", is_normalized=bool(config.get("norm_topk_prob")))
    inner, shared = (_count(config, f"{name}_intermediate_size") for name in ("moe", "shared_expert"))
    experts = Experts(routing, inner, shared, has_shared_gate=True)
    return {"experts": experts, "dense_layers": _dense_layers(config, num_layers)}


def _glm4_moe(config: Config, num_layers: int) -> ExpertFields:
    plain = _routing(config, "n_routed_experts", is_normalized=bool(config.get("norm_topk_prob")))
    routing = replace(_in_groups(config, plain, num_best=2), scores="sigmoid", has_choice_bias=True)
    return _behind_dense_layers(config, routing, num_layers)


def _deepseek_v2(config: Config, num_layers: int) -> ExpertFields:
    routing = _routing(config, "n_routed_experts", is_normalized=False)
    if config.get("topk_method") == "group_limited_greedy":
        routing = _in_groups(config, routing, num_best=1)
    else:
        routing = replace(routing, scale=float(config["routed_scaling_factor"]))
    check_choice("deepseek_v2", config, routing)
    return _behind_dense_layers(config, routing, num_layers)


def _deepseek_v3(config: Config, num_layers: int) -> ExpertFields:
    fields = _glm4_moe(config, num_layers)
    check_choice("deepseek_v3", config, fields["experts"].routing)
    return fields


def _in_groups(config: Config, routing: Routing, *, num_best: int) -> Routing:
    num_groups, num_active_groups = _count(config, "n_group"), _count(config, "topk_group")
    size, rest = divmod(routing.num_experts, num_groups)
    if num_active_groups > num_groups or rest or size < num_best:
        raise CheckpointError(
            f"config.json: n_group={num_groups}, topk_group={num_active_groups} do not fit the experts"
        )
    return replace(
        routing,
        scale=float(config["routed_scaling_factor"]),
        num_groups=num_groups,
        num_active_groups=num_active_groups,
        num_best_of_group=num_best,
    )


def _behind_dense_layers(config: Config, routing: Routing, num_layers: int) -> ExpertFields:
    inner = _count(config, "moe_intermediate_size")
    first = config.get("first_k_dense_replace") or 0
    experts = Experts(routing, inner, inner * _count(config, "n_shared_experts"))
    return {"experts": experts, "dense_layers": frozenset(range(min(first, num_layers)))}


def _gpt_oss(config: Config, num_layers: int) -> ExpertFields:
    routing = _routing(config, "num_local_experts", is_normalized=True)
    return {"experts": gpt_oss_experts(config, routing, _count(config, "intermediate_size"))}


READERS: Mapping[str, Callable[[Config, int], ExpertFields]] = {
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "glm4moe": _glm4_moe,
    "gpt_oss": _gpt_oss,
    "mixtral": _mixtral,
    "olmoe": _olmoe,
    "qwen2moe": _qwen2_moe,
    "qwen3moe": _qwen3_moe,
}


def _routing(config: Config, name_of_count: str, *, is_normalized: bool) -> Routing:
    num_experts, num_active = _count(config, name_of_count), _count(config, "num_experts_per_tok")
    if num_active > num_experts:
        raise CheckpointError(
            f"config.json: num_experts_per_tok={num_active} is more than {name_of_count}={num_experts}"
        )
    return Routing(num_experts, num_active, is_normalized=is_normalized)


def _dense_layers(config: Config, num_layers: int) -> frozenset[int]:
    """Those of `mlp_only_layers`, and all but every `decoder_sparse_step`-th."""
    if config.get("use_sliding_window"):
        raise CheckpointError("config.json: use_sliding_window=True is not supported beside experts")
    step, listed = _count(config, "decoder_sparse_step"), config.get("mlp_only_layers") or []
    if not isinstance(listed, list) or not all(isinstance(idx, int) for idx in listed):
        raise CheckpointError(f"config.json: mlp_only_layers should be a list of integers, got {listed!r:.80}")
    return frozenset(idx for idx in range(num_layers) if idx in listed or (idx + 1) % step)


def _count(config: Config, name: str) -> int:
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(f"config.json: {name} should be a positive integer, got {value!r}")
    return value
