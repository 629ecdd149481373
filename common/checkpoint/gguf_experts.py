"""Mixtures of experts as a GGUF file states them, read as llama.cpp reads them. Pure."""

from collections.abc import Mapping
from typing import Any

from common.checkpoint.layers import Experts, Routing
from common.checkpoint.spec import CheckpointError

# The architectures whose chosen weights llama.cpp divides by their sum; no field of the file says so.
NORMALIZED = {"mixtral": True, "qwen3moe": True, "qwen2moe": False, "olmoe": False}


def family_of_gguf(metadata: Mapping[str, Any]) -> str:
    """The key of FAMILIES: `general.architecture`, but for Mixtral, which is called llama with experts."""
    architecture = str(metadata.get("general.architecture", "none"))
    return "mixtral" if architecture == "llama" and metadata.get("llama.expert_count") else architecture


def read_gguf_experts(metadata: Mapping[str, Any], family: str) -> Experts | None:
    """None for a family without experts. Raises CheckpointError by field."""
    if family not in NORMALIZED:
        return None
    prefix = metadata["general.architecture"]

    def integer(name: str, absent: str | None = None) -> int:
        value = metadata.get(f"{prefix}.{name}", metadata.get(f"{prefix}.{absent}"))
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CheckpointError(f"{prefix}.{name} should be a positive integer, got {value!r:.80}")
        return value

    if metadata.get(f"{prefix}.expert_gating_func", 1) != 1:
        raise CheckpointError(f"{prefix}.expert_gating_func should be 1 (softmax) for this architecture")
    if metadata.get(f"{prefix}.expert_weights_scale", 1.0) not in (0.0, 1.0):
        raise CheckpointError(f"{prefix}.expert_weights_scale is not supported for this architecture")
    routing = Routing(integer("expert_count"), integer("expert_used_count"), is_normalized=NORMALIZED[family])
    inner = integer("expert_feed_forward_length", "feed_forward_length")
    has_shared = family == "qwen2moe"
    shared = integer("expert_shared_feed_forward_length", "feed_forward_length") if has_shared else 0
    return Experts(routing, inner, shared, has_shared_gate=has_shared)
