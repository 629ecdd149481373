"""Reads and writes single tokens of one layer of a cache, quantized or not. In torch operators, on any device."""

import torch

from common.engine.kv.quantized import dequantize, is_quantized, num_kv_heads_of, quantize


def write_rows(kv: torch.Tensor, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Put k and v [num_tokens, num_kv_heads, head_dim] into `slots` [num_tokens] int64 of one layer."""
    for plane, values in zip(_planes(kv), (k, v), strict=True):
        plane.index_copy_(0, slots, quantize(values, kv.dtype) if is_quantized(kv.dtype) else values.flatten(1))


def read_rows(kv: torch.Tensor, slots: torch.Tensor, head_dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """K and V of `slots` [num_tokens] int64, [num_tokens, num_kv_heads, head_dim] each, in `dtype`."""
    num_kv_heads = num_kv_heads_of(kv, head_dim)
    found = [plane.index_select(0, slots) for plane in _planes(kv)]
    if is_quantized(kv.dtype):
        return tuple(dequantize(rows, kv.dtype, num_kv_heads, head_dim).to(dtype) for rows in found)
    return tuple(rows.view(-1, num_kv_heads, head_dim) for rows in found)


def _planes(kv: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Views [num_slots, row] of K and V; of bytes where the cache is quantized."""
    rows = kv.view(torch.uint8) if is_quantized(kv.dtype) else kv
    return tuple(plane.view(kv.shape[1] * kv.shape[2], rows.shape[3] * rows.shape[4]) for plane in rows)
