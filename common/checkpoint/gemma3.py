"""What Gemma 3 has besides the layers of its family: windows, two RoPE bases, scaled embeddings. Pure."""

import math
from collections.abc import Mapping
from typing import Any, NotRequired, TypedDict

from common.checkpoint.hf_attention import windows_by_pattern
from common.checkpoint.hf_rope import read_rope
from common.checkpoint.rope import Rope
from common.checkpoint.spec import CheckpointError

PATTERN = 6
THETA, WINDOW_THETA = 1e6, 10000.0
# The 27B model alone scales by the width that a head would have without head_dim (llama.cpp tells it by its layers).
NUM_LAYERS_27B = 62


class Gemma3Fields(TypedDict):
    """Fields of `ModelSpec`."""

    windows: NotRequired[tuple[int, ...]]  # of GGUF; those of config.json are read as for every family
    window_rope: Rope
    attention_scale: float
    embedding_scale: float


def gemma3_of_config(config: Mapping[str, Any], hidden_size: int) -> tuple[Rope, Gemma3Fields]:
    """The RoPE of layers that see all tokens, and the rest, of a config.json. Raises CheckpointError by field."""
    scalar = config.get("query_pre_attn_scalar")
    if isinstance(scalar, bool) or not isinstance(scalar, int | float) or not 0 < scalar < math.inf:
        raise CheckpointError(f"config.json: query_pre_attn_scalar should be a positive number, got {scalar!r}")
    by_kind = config.get("rope_parameters") or {}
    of_all = dict(by_kind.get("full_attention") or {}) | dict(config.get("rope_scaling") or {})
    of_windows = dict(by_kind.get("sliding_attention") or {})
    of_all.setdefault("rope_theta", config.get("rope_theta", THETA))
    of_windows.setdefault("rope_theta", config.get("rope_local_base_freq", WINDOW_THETA))
    length = config.get("max_position_embeddings")
    fields = Gemma3Fields(
        window_rope=read_rope({"rope_parameters": of_windows, "max_position_embeddings": length}),
        attention_scale=scalar**-0.5,
        embedding_scale=hidden_size**0.5,
    )
    return read_rope({"rope_parameters": of_all, "max_position_embeddings": length}), fields


def gemma3_of_gguf(metadata: Mapping[str, Any], num_layers: int, hidden_size: int, head_width: int) -> Gemma3Fields:
    """`head_width` is what the scores are scaled by. Raises CheckpointError by field."""
    window = metadata.get("gemma3.attention.sliding_window")
    pattern = metadata.get("gemma3.attention.sliding_window_pattern", PATTERN)
    for name, value in (("sliding_window", window), ("sliding_window_pattern", pattern)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CheckpointError(f"gemma3.attention.{name} should be a positive integer, got {value!r:.80}")
    assert isinstance(window, int)
    return Gemma3Fields(
        windows=windows_by_pattern(num_layers, window, pattern),
        window_rope=Rope(float(metadata.get("gemma3.rope.freq_base_swa", WINDOW_THETA))),
        attention_scale=head_width**-0.5,
        embedding_scale=hidden_size**0.5,
    )
