"""The table of RoPE angles, with Llama 3.1's frequency scaling."""

import math

import torch

from common.checkpoint.layers import Rope, RopeScaling


def cos_sin_table(rope: Rope, head_dim: int, max_position: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """[max_position, head_dim] float32: cos in the first half of the last axis, sin in the second."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    frequencies = rope.theta**-exponents  # [head_dim / 2]
    if rope.scaling is not None:
        frequencies = _scale(frequencies, rope.scaling)
    positions = torch.arange(max_position, dtype=torch.float32, device=device)
    angles = torch.outer(positions, frequencies)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def _scale(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Wavelengths that fit `high_freq_factor` times into the original context stay; those that fit fewer than
    `low_freq_factor` times are stretched by `factor`; between the two it is interpolated linearly.
    """
    num_turns = scaling.original_max_position * frequencies / (2 * math.pi)
    kept = (num_turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return frequencies * (kept + (1 - kept) / scaling.factor)
