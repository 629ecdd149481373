"""INT8 and FP8 codes of keys and values: each head of each token with a scale of its own. Keeps no state."""

import torch

# Largest code. FP8 is e4m3 without infinities (Micikevicius et al. 2022).
LIMITS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def is_quantized(dtype: torch.dtype) -> bool:
    """Whether keys and values of this dtype are codes, with scales beside them."""
    return dtype in LIMITS


def quantize(rows: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """[num_tokens, num_kv_heads, head_dim] to codes of the same shape and scales [num_tokens, num_kv_heads] float32.

    Off by at most scale / 2 (INT8) and 1/16 of the value or scale / 1024 (FP8); scale = largest of the head / limit.
    What is not finite comes back as NaN.
    """
    rows = rows.float()
    largest = rows.abs().amax(-1)
    inverse = torch.where(largest > 0, LIMITS[dtype] / largest, 0.0)
    scaled = (rows * inverse.unsqueeze(-1)).clamp_(-LIMITS[dtype], LIMITS[dtype])
    codes = (scaled.round_().nan_to_num_() if dtype == torch.int8 else scaled).to(dtype)
    return codes, largest / LIMITS[dtype]


def dequantize(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Back to float32."""
    return codes.float() * scales.unsqueeze(-1)
