"""The planes of K/V attention: keys and values, and their scales where they are stored as codes.

    k, v              [num_kv_heads, head_dim]   numbers of the model's type, or codes
    k_scale, v_scale  [num_kv_heads] float32     only beside codes: a value is code * scale

Inside a block each head of each token has a scale of its own. With one scale for all tokens of a block, a token that
joins the block could raise it: what lies there would be rounded again, and the cache would depend on how a prompt was
cut into chunks. So a row is the same on every worker, whatever its block size, and the wire carries it as it is.
The price is 4 bytes per head: 3 % at head_dim 128. Reads and writes here are torch operators, on any device.
"""

import torch

from common.engine.contract.attention import LayerKV
from common.engine.contract.kv_spec import Plane
from common.engine.kv.quantized import dequantize, is_quantized, quantize

MIN_QUANTIZED_HEAD_DIM = 16


def attention_planes(num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> tuple[Plane, ...]:
    """What one token leaves in one layer. Raises ValueError where heads of codes would not be aligned."""
    name = str(dtype).removeprefix("torch.")
    planes = tuple(Plane(plane, (num_kv_heads, head_dim), name, is_sharded=True) for plane in ("k", "v"))
    if not is_quantized(dtype):
        return planes
    if head_dim % 4 or head_dim < MIN_QUANTIZED_HEAD_DIM:
        raise ValueError(
            f"a quantized KV cache needs a multiple of 4 from {MIN_QUANTIZED_HEAD_DIM} on as head_dim, got {head_dim}"
        )
    scales = tuple(Plane(f"{plane.name}_scale", (num_kv_heads,), "float32", is_sharded=True) for plane in planes)
    return planes + scales


def write_rows(kv: LayerKV, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Put k and v [num_tokens, num_kv_heads, head_dim] into `slots` [num_tokens] int64 of one layer."""
    dtype = kv[0].dtype
    if not slots.shape[0]:
        return  # the scales of no token have no stride to be viewed by
    if not is_quantized(dtype):
        for plane, values in zip(kv, (k, v), strict=True):
            _slots(plane).index_copy_(0, slots, values.flatten(1))
        return
    (k_codes, k_scales), (v_codes, v_scales) = (quantize(values, dtype) for values in (k, v))
    for plane, values in zip(kv, (k_codes, v_codes, k_scales, v_scales), strict=True):
        _slots(plane.view(torch.uint8)).index_copy_(0, slots, values.view(torch.uint8).flatten(1))


def read_rows(kv: LayerKV, slots: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of `slots` [num_tokens] int64, [num_tokens, num_kv_heads, head_dim] each; codes as numbers of `dtype`."""
    if not is_quantized(kv[0].dtype):
        k, v = (_slots(plane).index_select(0, slots).view(-1, *plane.shape[2:]) for plane in kv)
        return k, v
    k_codes, v_codes, k_scales, v_scales = (_read_bytes(plane, slots) for plane in kv)
    return dequantize(k_codes, k_scales).to(dtype), dequantize(v_codes, v_scales).to(dtype)


def _read_bytes(plane: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Rows of a plane of any type: torch selects no float8."""
    return _slots(plane.view(torch.uint8)).index_select(0, slots).view(plane.dtype).view(-1, *plane.shape[2:])


def _slots(plane: torch.Tensor) -> torch.Tensor:
    """[num_slots, row]"""
    return plane.view(plane.shape[0] * plane.shape[1], -1)
