"""Rotary embeddings as config.json states them: one of three places, by the age of the file. Pure.

The rules are those of transformers 5: `rope_scaling` wins over `rope_parameters`; `rope_theta` may stand in either,
or beside them; an original length beside them wins.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from common.checkpoint.rope import (
    BETA_FAST,
    BETA_SLOW,
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    Rope,
    RopeScaling,
    YarnScaling,
    magnitude,
)
from common.checkpoint.spec import CheckpointError

Config = Mapping[str, Any]
DEFAULT_THETA = 10000.0
ORIGINAL = "original_max_position_embeddings"
PHI3_ORIGINAL = 4096


def read_rope(config: Config, *, head_dim: int = 0) -> Rope:
    """Raises CheckpointError that names the field which is missing, null or not supported.

    `head_dim`: of a family whose heads may be turned in part; 0 = it has none.
    """
    parameters = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(parameters, Mapping) or any(isinstance(value, Mapping) for value in parameters.values()):
        raise CheckpointError(f"config.json: rope_parameters={parameters!r} per layer type is not supported")
    if (beside := config.get(ORIGINAL)) is not None:
        parameters = {**parameters, ORIGINAL: beside}
    partial = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0) and not head_dim:
        raise CheckpointError(f"config.json: partial_rotary_factor={partial!r} is not supported")
    size = int(head_dim * _number({"partial_rotary_factor": partial}, "partial_rotary_factor")) if partial else 0
    theta = _number(parameters if "rope_theta" in parameters else config, "rope_theta", DEFAULT_THETA)
    scaling = _scaling(parameters, int(_number(config, "max_position_embeddings")))
    return Rope(theta, scaling, 0 if size == head_dim else size)


def read_phi3_rope(config: Config, *, head_dim: int) -> Rope:
    """The original length stands beside, or is the family's; older files call the scaling otherwise."""
    place = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    parameters = dict(config.get(place) or {})
    parameters[ORIGINAL] = PHI3_ORIGINAL
    if parameters.get("rope_type", parameters.get("type")) in ("su", "yarn"):
        parameters["rope_type"] = "longrope"
    return read_rope({**config, place: parameters}, head_dim=head_dim)


def _scaling(parameters: Config, max_position: int) -> RopeScaling | None:
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return None
    if kind not in READERS:
        raise CheckpointError(f"config.json: rope type {kind!r} is not supported, only {', '.join(READERS)}")
    return READERS[kind](parameters, max_position)


def _linear(parameters: Config, max_position: int) -> LinearScaling:
    return LinearScaling(_number(parameters, "factor"))


def _dynamic(parameters: Config, max_position: int) -> DynamicScaling:
    return DynamicScaling(_number(parameters, "factor"), max_position)


def _llama3(parameters: Config, max_position: int) -> Llama3Scaling:
    return Llama3Scaling(
        factor=_number(parameters, "factor"),
        low_freq_factor=_number(parameters, "low_freq_factor"),
        high_freq_factor=_number(parameters, "high_freq_factor"),
        original_max_position=_original(parameters, max_position),
    )


def _yarn(parameters: Config, max_position: int) -> YarnScaling:
    original = _original(parameters, max_position)
    factor = _stated(parameters, "factor") or max_position / original
    amplitude, mscale, of_all = (_stated(parameters, f) for f in ("attention_factor", "mscale", "mscale_all_dim"))
    if amplitude is None and mscale and of_all:
        amplitude = magnitude(factor, mscale) / magnitude(factor, of_all)
    return YarnScaling(
        factor=factor,
        original_max_position=original,
        amplitude=magnitude(factor) if amplitude is None else amplitude,
        beta_fast=_stated(parameters, "beta_fast") or BETA_FAST,
        beta_slow=_stated(parameters, "beta_slow") or BETA_SLOW,
        is_truncated=bool(parameters.get("truncate", True)),
    )


def _longrope(parameters: Config, max_position: int) -> LongRopeScaling:
    original = _original(parameters, max_position)
    factor = _stated(parameters, "factor") or max_position / original
    amplitude = _stated(parameters, "attention_factor")
    derived = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return LongRopeScaling(
        short=_numbers(parameters, "short_factor"),
        long=_numbers(parameters, "long_factor"),
        original_max_position=original,
        amplitude=derived if amplitude is None else amplitude,
    )


READERS: Mapping[str, Callable[[Config, int], RopeScaling]] = {
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}


def _original(parameters: Config, max_position: int) -> int:
    return int(_number(parameters, ORIGINAL, max_position))


def _stated(fields: Config, name: str) -> float | None:
    """None for what is absent, null or 0: derived from other fields, as transformers does."""
    return _number(fields, name) if fields.get(name) else None


def _number(fields: Config, name: str, default: float | None = None) -> float:
    value = fields.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise CheckpointError(f"config.json: {name} should be a positive number, got {value!r}")
    return float(value)


def _numbers(fields: Config, name: str) -> tuple[float, ...]:
    values = fields.get(name)
    if not isinstance(values, list) or not all(
        isinstance(value, int | float) and 0 < value < math.inf for value in values
    ):
        raise CheckpointError(f"config.json: {name} should be a list of positive numbers, got {values!r:.80}")
    return tuple(map(float, values))
