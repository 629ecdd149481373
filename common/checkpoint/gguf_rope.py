"""Rotary embeddings as a GGUF file states them."""

import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from common.checkpoint.layers import Rope, RopeScaling
from common.checkpoint.spec import CheckpointError
from common.checkpoint.tensors import StoredTensor

# Llama 3.1's scaling: the models of that family differ in the factor alone.
LOW_FREQ_FACTOR, HIGH_FREQ_FACTOR, ORIGINAL_MAX_POSITION = 1.0, 4.0, 8192
TOLERANCE = 1e-4


def read_gguf_rope(
    metadata: Mapping[str, Any], architecture: str, head_dim: int, frequencies: StoredTensor | None
) -> Rope:
    """`frequencies` is rope_freqs.weight, F32 [head_dim / 2]. Raises CheckpointError for what is not supported."""
    if metadata.get(f"{architecture}.rope.dimension_count", head_dim) != head_dim:
        raise CheckpointError(f"{architecture}.rope.dimension_count differs from the head's size: not supported")
    kind = metadata.get(f"{architecture}.rope.scaling.type", "none")
    has_factor = metadata.get(f"{architecture}.rope.scaling.factor", 1.0) != 1.0
    if kind not in ("none", "linear") or (kind == "linear" and has_factor):
        raise CheckpointError(f"{architecture}.rope.scaling.type {kind!r}: RoPE scaling is not supported in GGUF")
    theta = float(metadata.get(f"{architecture}.rope.freq_base", 10000.0))
    if frequencies is None:
        return Rope(theta, None)
    return Rope(theta, _scaling(theta, head_dim, _values(frequencies, head_dim)))


def frequency_divisors(theta: float, head_dim: int, scaling: RopeScaling) -> list[float]:
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


def _scaling(theta: float, head_dim: int, divisors: Sequence[float]) -> RopeScaling | None:
    if all(divisor == 1.0 for divisor in divisors):
        return None
    scaling = RopeScaling(max(divisors), LOW_FREQ_FACTOR, HIGH_FREQ_FACTOR, ORIGINAL_MAX_POSITION)
    expected = frequency_divisors(theta, head_dim, scaling)
    if not all(math.isclose(a, b, rel_tol=TOLERANCE) for a, b in zip(divisors, expected, strict=True)):
        raise CheckpointError("rope_freqs.weight is not Llama 3.1's scaling, the only one that is supported in GGUF")
    return scaling


def _values(tensor: StoredTensor, head_dim: int) -> Sequence[float]:
    if tensor.kind != "F32" or tensor.shape != (head_dim // 2,):
        raise CheckpointError(f"{tensor.name}: expected F32 ({head_dim // 2},), got {tensor.kind} {tensor.shape}")
    with tensor.path.open("rb") as file:
        file.seek(tensor.offset)
        return struct.unpack(f"<{head_dim // 2}f", file.read(tensor.size_bytes))
