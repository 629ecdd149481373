"""Rows of an INT8 or FP8 cache: how K or V of one token is stored in fewer bits. Owns the layout, keeps no state.

    row: codes [num_kv_heads, head_dim] | scales [num_kv_heads] float32 | 0 up to a multiple of 16 bytes

A value is code * scale. Inside a block each head of each token has a scale of its own. With one scale for all tokens
of a block, a token that joins the block could raise it: what lies there would be rounded again, and the cache would
depend on how a prompt was cut into chunks. So a row is the same whoever computed it, whatever its block size, and the
wire carries it as it is. The price is 4 bytes per head: 3 % at head_dim 128.
"""

import torch

SCALE_BYTES = 4
ROW_ALIGNMENT = 16  # so that heads start where 16 bytes can be loaded at once
MIN_HEAD_DIM = 16
# Largest code. FP8 is e4m3 without infinities (Micikevicius et al. 2022).
LIMITS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def is_quantized(dtype: torch.dtype) -> bool:
    """Whether a cache of this dtype has such rows."""
    return dtype in LIMITS


def row_bytes(num_kv_heads: int, head_dim: int) -> int:
    """Bytes of K or V of one token."""
    if head_dim % 4 or head_dim < MIN_HEAD_DIM:
        raise ValueError(
            f"a quantized KV cache needs a multiple of 4 from {MIN_HEAD_DIM} on as head_dim, got {head_dim}"
        )
    used = num_kv_heads * (head_dim + SCALE_BYTES)
    return -(-used // ROW_ALIGNMENT) * ROW_ALIGNMENT


def num_kv_heads_of(kv: torch.Tensor, head_dim: int) -> int:
    """KV heads of one layer of a cache, quantized ([2, num_blocks, block_size, 1, row_bytes]) or not."""
    # The padding of a row is smaller than a head and its scale.
    return kv.shape[4] // (head_dim + SCALE_BYTES) if is_quantized(kv.dtype) else kv.shape[3]


def quantize(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[num_tokens, num_kv_heads, head_dim] to rows [num_tokens, row_bytes] uint8. What is not finite comes back as NaN.

    Off by at most scale / 2 (INT8) and 1/16 of the value or scale / 1024 (FP8); scale = largest of the head / limit.
    """
    num_tokens, num_kv_heads, head_dim = rows.shape
    rows = rows.float()
    largest = rows.abs().amax(-1)
    inverse = torch.where(largest > 0, LIMITS[dtype] / largest, 0.0)
    scaled = (rows * inverse.unsqueeze(-1)).clamp_(-LIMITS[dtype], LIMITS[dtype])
    codes = (scaled.round_().nan_to_num_() if dtype == torch.int8 else scaled).to(dtype)
    stored = torch.zeros((num_tokens, row_bytes(num_kv_heads, head_dim)), dtype=torch.uint8, device=rows.device)
    code_bytes = num_kv_heads * head_dim
    stored[:, :code_bytes] = codes.view(torch.uint8).flatten(1)
    scales = (largest / LIMITS[dtype]).flatten().view(torch.uint8).view(num_tokens, SCALE_BYTES * num_kv_heads)
    stored[:, code_bytes : code_bytes + SCALE_BYTES * num_kv_heads] = scales
    return stored


def dequantize(stored: torch.Tensor, dtype: torch.dtype, num_kv_heads: int, head_dim: int) -> torch.Tensor:
    """Rows [num_tokens, row_bytes] uint8 back to [num_tokens, num_kv_heads, head_dim] float32."""
    code_bytes = num_kv_heads * head_dim
    codes = stored[:, :code_bytes].flatten().view(dtype).view(-1, num_kv_heads, head_dim)
    scales = stored[:, code_bytes : code_bytes + SCALE_BYTES * num_kv_heads].flatten().view(torch.float32)
    return codes.float() * scales.view(-1, num_kv_heads, 1)
