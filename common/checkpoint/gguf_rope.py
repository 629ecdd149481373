"""Rotary embeddings as a GGUF file states them, read as llama.cpp reads them."""

import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from common.checkpoint.hf_rope import DEFAULT_THETA
from common.checkpoint.rope import (
    BETA_FAST,
    BETA_SLOW,
    DivisorScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    Rope,
    RopeScaling,
    YarnScaling,
    magnitude,
)
from common.checkpoint.spec import CheckpointError
from common.checkpoint.tensors import StoredTensor

FREQUENCIES, LONG_FACTORS, SHORT_FACTORS = (
    f"rope_{each}.weight" for each in ("freqs", "factors_long", "factors_short")
)
ROPE_TENSORS = (FREQUENCIES, LONG_FACTORS, SHORT_FACTORS)
# Llama 3.1's scaling: the models of that family differ in the factor alone.
LOW_FREQ_FACTOR, HIGH_FREQ_FACTOR, ORIGINAL_MAX_POSITION = 1.0, 4.0, 8192
TOLERANCE = 1e-4


class _Fields:
    """The numbers under `ARCHITECTURE.rope`."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str) -> None:
        self._metadata = metadata
        self._prefix = f"{architecture}.rope."

    def number(self, name: str, absent: float) -> float:
        value = self._metadata.get(self._prefix + name, absent)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise CheckpointError(f"{self._prefix}{name} should be a positive number, got {value!r:.80}")
        return float(value)

    def kind(self) -> str:
        """Absent, it is linear, with a factor of 1 unless the file states one."""
        return str(self._metadata.get(f"{self._prefix}scaling.type", "linear"))

    def refuse(self, reason: str) -> CheckpointError:
        return CheckpointError(f"{self._prefix}scaling.type {self.kind()!r}{reason}")


def read_gguf_rope(
    metadata: Mapping[str, Any], architecture: str, head_dim: int, tensors: Mapping[str, StoredTensor]
) -> Rope:
    """`tensors` may hold those of ROPE_TENSORS, F32 [pairs]. Raises CheckpointError for what is not offered."""
    fields = _Fields(metadata, architecture)
    size = metadata.get(f"{architecture}.rope.dimension_count", head_dim)
    if size != head_dim and architecture != "phi3":
        raise CheckpointError(f"{architecture}.rope.dimension_count differs from the head's size: not supported")
    theta = fields.number("freq_base", DEFAULT_THETA)
    by_type = _of_type(fields, metadata.get(f"{architecture}.context_length", 0))
    values = {name: _values(tensors[name], size) for name in ROPE_TENSORS if name in tensors}
    if by_type is not None and values:
        raise fields.refuse(f" beside {' and '.join(values)} is not supported")
    if fields.kind() == "longrope" and not values:
        raise fields.refuse(f" without {LONG_FACTORS} and {SHORT_FACTORS} is not supported")
    by_pair = _of_tensors(fields, theta, values, metadata.get(f"{architecture}.context_length", 0))
    return Rope(theta, by_type or by_pair, 0 if size == head_dim else size)


def frequency_divisors(theta: float, head_dim: int, scaling: Llama3Scaling) -> list[float]:
    """What each frequency is divided by, as llama.cpp's converter writes it to rope_freqs.weight."""
    longest = scaling.original_max_position / scaling.low_freq_factor
    shortest = scaling.original_max_position / scaling.high_freq_factor
    divisors = []
    for idx in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (idx / head_dim)
        smooth = (scaling.original_max_position / wavelength - scaling.low_freq_factor) / (
            scaling.high_freq_factor - scaling.low_freq_factor
        )
        blended = 1 / ((1 - smooth) / scaling.factor + smooth)
        divisors.append(1.0 if wavelength < shortest else scaling.factor if wavelength > longest else blended)
    return divisors


def _of_type(fields: _Fields, context_length: int) -> LinearScaling | YarnScaling | None:
    """`scale_linear` is the factor's older name; with longrope the factors are tensors."""
    factor = fields.number("scaling.factor", fields.number("scale_linear", 1.0))
    match fields.kind():
        case "none" | "longrope":
            return None
        case "linear":
            return LinearScaling(factor) if factor != 1.0 else None
        case "yarn":
            return _yarn(fields, factor, context_length)
        case _:
            raise fields.refuse(" is not supported, only none, linear, yarn and longrope")


def _yarn(fields: _Fields, factor: float, context_length: int) -> YarnScaling:
    for name in ("yarn_ext_factor", "yarn_attn_factor", "yarn_log_multiplier"):
        if fields.number(f"scaling.{name}", 1.0) != 1.0:
            raise fields.refuse(f" with {name} is not supported")
    return YarnScaling(
        factor=factor,
        original_max_position=int(fields.number("scaling.original_context_length", context_length)),
        amplitude=magnitude(factor) * fields.number("scaling.attn_factor", 1.0),
        beta_fast=fields.number("scaling.yarn_beta_fast", BETA_FAST),
        beta_slow=fields.number("scaling.yarn_beta_slow", BETA_SLOW),
    )


def _of_tensors(
    fields: _Fields, theta: float, values: Mapping[str, Sequence[float]], context_length: int
) -> RopeScaling | None:
    """llama.cpp, too, takes the one tensor before the two."""
    if FREQUENCIES in values:
        return _by_frequencies(theta, values[FREQUENCIES])
    if len(values) == 1:
        raise CheckpointError(f"{next(iter(values))} needs both {LONG_FACTORS} and {SHORT_FACTORS}")
    if not values:
        return None
    original = int(fields.number("scaling.original_context_length", context_length))
    amplitude = fields.number("scaling.attn_factor", 1.0)
    return LongRopeScaling(tuple(values[SHORT_FACTORS]), tuple(values[LONG_FACTORS]), original, amplitude)


def _by_frequencies(theta: float, divisors: Sequence[float]) -> Llama3Scaling | DivisorScaling | None:
    """Llama 3.1's scaling where it is that, so that the model equals the one of its directory."""
    if all(divisor == 1.0 for divisor in divisors):
        return None
    scaling = Llama3Scaling(max(divisors), LOW_FREQ_FACTOR, HIGH_FREQ_FACTOR, ORIGINAL_MAX_POSITION)
    expected = frequency_divisors(theta, 2 * len(divisors), scaling)
    is_llama3 = all(math.isclose(a, b, rel_tol=TOLERANCE) for a, b in zip(divisors, expected, strict=True))
    return scaling if is_llama3 else DivisorScaling(tuple(divisors))


def _values(tensor: StoredTensor, size: int) -> Sequence[float]:
    if tensor.kind != "F32" or tensor.shape != (size // 2,):
        raise CheckpointError(f"{tensor.name}: expected F32 ({size // 2},), got {tensor.kind} {tensor.shape}")
    with tensor.path.open("rb") as file:
        file.seek(tensor.offset)
        return struct.unpack(f"<{size // 2}f", file.read(tensor.size_bytes))
