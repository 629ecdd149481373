"""The table of RoPE angles, for each kind of scaling that `common.checkpoint.rope` names."""

import math
from typing import assert_never

import torch

from common.checkpoint.rope import (
    DivisorScaling,
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    Rope,
    YarnScaling,
)


def cos_sin_table(rope: Rope, head_dim: int, max_position: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """[max_position, head_dim] float32: cos in the first half of the last axis, sin in the second, each times what
    the scaling multiplies q and k with. For heads whose dimensions lie as `Rope.places` has them."""
    size = rope.size or head_dim
    exponents = torch.arange(0, size, 2, dtype=torch.float32, device=device) / size
    positions = torch.arange(max_position, dtype=torch.float32, device=device)
    scaling = rope.scaling
    if isinstance(scaling, LongRopeScaling):
        scaling = scaling.for_length(max_position)
    if isinstance(scaling, DynamicScaling):
        bases = rope.theta * _growth(scaling, positions + 1) ** (size / (size - 2))
        angles = positions[:, None] * bases[:, None] ** -exponents
    else:
        angles = torch.outer(positions, _scaled(rope.theta, exponents, scaling))
    amplitude = scaling.amplitude if isinstance(scaling, YarnScaling | DivisorScaling) else 1.0
    stay = angles.new_zeros((max_position, (head_dim - size) // 2))
    return torch.cat((amplitude * angles.cos(), stay + 1, amplitude * angles.sin(), stay), dim=-1)


def _scaled(
    theta: float,
    exponents: torch.Tensor,
    scaling: Llama3Scaling | LinearScaling | YarnScaling | DivisorScaling | None,
) -> torch.Tensor:
    """The frequency of each pair, [head_dim / 2]."""
    frequencies = theta**-exponents
    match scaling:
        case None:
            return frequencies
        case LinearScaling():
            return frequencies / scaling.factor
        case DivisorScaling():
            return frequencies / torch.tensor(scaling.divisors, device=frequencies.device)
        case Llama3Scaling():
            return _llama3(frequencies, scaling)
        case YarnScaling():
            return _yarn(theta, frequencies, scaling)
        case _:
            assert_never(scaling)


def _llama3(frequencies: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    """Wavelengths that fit `high_freq_factor` times into the original context stay; those that fit fewer than
    `low_freq_factor` times are stretched by `factor`; between the two it is interpolated linearly.
    """
    num_turns = scaling.original_max_position * frequencies / (2 * math.pi)
    kept = (num_turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def _yarn(theta: float, frequencies: torch.Tensor, scaling: YarnScaling) -> torch.Tensor:
    num_pairs = frequencies.shape[0]
    first, last = (
        num_pairs * math.log(scaling.original_max_position / (2 * math.pi * num_turns)) / math.log(theta)
        for num_turns in (scaling.beta_fast, scaling.beta_slow)
    )
    if scaling.is_truncated:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * num_pairs - 1)
    pairs = torch.arange(num_pairs, dtype=torch.float32, device=frequencies.device)
    interpolated = ((pairs - first) / (last - first or 0.001)).clamp(0.0, 1.0)
    return frequencies * (interpolated / scaling.factor + (1 - interpolated))


def _growth(scaling: DynamicScaling, lengths: torch.Tensor) -> torch.Tensor:
    """By what the base is multiplied for texts of so many tokens, but for the exponent."""
    stretched = lengths.clamp(min=scaling.original_max_position) / scaling.original_max_position
    return scaling.factor * stretched - (scaling.factor - 1)
