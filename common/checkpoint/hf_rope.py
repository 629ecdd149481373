"""Rotary embeddings as config.json states them: one of three places, by the age of the file. Pure.

The rules are those of transformers 5: `rope_scaling` wins over `rope_parameters`; `rope_theta` may stand in either,
or beside them.
"""

from collections.abc import Mapping
from typing import Any

from common.checkpoint.layers import Rope, RopeScaling
from common.checkpoint.spec import CheckpointError

Config = Mapping[str, Any]
DEFAULT_THETA = 10000.0


def read_rope(config: Config) -> Rope:
    """Raises CheckpointError that names the field which is missing, null or not supported."""
    parameters = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(parameters, Mapping) or any(isinstance(value, Mapping) for value in parameters.values()):
        raise CheckpointError(f"config.json: rope_parameters={parameters!r} per layer type is not supported")
    partial = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise CheckpointError(f"config.json: partial_rotary_factor={partial!r} is not supported")
    theta = _number(parameters if "rope_theta" in parameters else config, "rope_theta", DEFAULT_THETA)
    return Rope(theta, _scaling(parameters, _number(config, "max_position_embeddings")))


def _scaling(parameters: Config, max_position: float) -> RopeScaling | None:
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise CheckpointError(f"config.json: rope type {kind!r} is not supported, only 'default' and 'llama3'")
    return RopeScaling(
        factor=_number(parameters, "factor"),
        low_freq_factor=_number(parameters, "low_freq_factor"),
        high_freq_factor=_number(parameters, "high_freq_factor"),
        original_max_position=int(_number(parameters, "original_max_position_embeddings", max_position)),
    )


def _number(fields: Config, name: str, default: float | None = None) -> float:
    value = fields.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise CheckpointError(f"config.json: {name} should be a positive number, got {value!r}")
    return float(value)
