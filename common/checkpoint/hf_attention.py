"""Which layers of a Hugging Face model attend to a window only. Pure.

The rules are transformers': `layer_types` decides where it is given; else every layer of Mistral, Mixtral and Phi-3 has
the window, and the layers of Qwen from `max_window_layers` on when `use_sliding_window` is set, every other of gpt-oss
and Gemma 2, those of Gemma 3 by a pattern.
"""

from collections.abc import Mapping
from typing import Any

from common.checkpoint.spec import CheckpointError

Config = Mapping[str, Any]
_LAYER_TYPES = ("full_attention", "sliding_attention")
_WITH_A_WINDOW_EVERYWHERE = ("Mistral", "Mixtral", "Phi3")


def layer_windows(config: Config, num_layers: int, max_position: int) -> tuple[int, ...]:
    """Per layer the tokens that one sees, 0 = all; () when no layer has a window. Raises CheckpointError by field.

    `max_position`: the tokens of the longest text.
    """
    has_window = _layers_with_window(config, num_layers)
    if not any(has_window):
        return ()
    window = config.get("sliding_window")
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        raise CheckpointError(f"config.json: sliding_window should be a positive integer, got {window!r}")
    if window >= max_position:
        return ()  # no token is ever behind it
    return tuple(window if has else 0 for has in has_window)


def windows_by_pattern(num_layers: int, window: int, pattern: int) -> tuple[int, ...]:
    """The last of every `pattern` layers sees all tokens, the others see `window`."""
    return tuple(window if (idx + 1) % pattern else 0 for idx in range(num_layers))


def _layers_with_window(config: Config, num_layers: int) -> list[bool]:
    layer_types = config.get("layer_types")
    if layer_types is not None:
        if len(layer_types) != num_layers or not set(layer_types) <= set(_LAYER_TYPES):
            raise CheckpointError(f"config.json: layer_types={layer_types!r} is not {num_layers} of {_LAYER_TYPES}")
        return [kind == "sliding_attention" for kind in layer_types]
    architecture = (config.get("architectures") or ["none"])[0]
    if architecture.startswith("Qwen"):
        first = config.get("max_window_layers", 28) if config.get("use_sliding_window") else num_layers
        return [idx >= first for idx in range(num_layers)]
    if architecture.startswith(("GptOss", "Gemma2")):
        return [idx % 2 == 0 for idx in range(num_layers)]
    if architecture.startswith("Gemma3"):
        pattern = config.get("sliding_window_pattern")
        if isinstance(pattern, bool) or not isinstance(pattern, int) or pattern < 1:
            raise CheckpointError(f"config.json: sliding_window_pattern should be a positive integer, got {pattern!r}")
        return [bool(window) for window in windows_by_pattern(num_layers, 1, pattern)]
    if architecture.startswith(_WITH_A_WINDOW_EVERYWHERE):
        return [config.get("sliding_window") is not None] * num_layers
    if config.get("sliding_window"):
        raise CheckpointError(
            f"config.json: sliding_window={config['sliding_window']!r} is not supported for {architecture}"
        )
    return [False] * num_layers
