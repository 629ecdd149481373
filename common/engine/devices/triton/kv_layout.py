"""How one layer of the cache looks to a kernel: where its planes are, and how codes become numbers.

The host's side is `KVLayout`; the device's side decodes and encodes by integer arithmetic, which is exact and compiles
for processors without FP8, too.
"""

from dataclasses import dataclass

import torch
import triton.language as tl

from common.engine.contract.attention import LayerKV
from common.engine.devices.triton.launch import jit
from common.engine.kv.quantized import LIMITS, is_quantized

# What the elements of a cache are: numbers of the model's type, INT8 codes, or FP8 codes (e4m3).
PLAIN = tl.constexpr(0)
INT8 = tl.constexpr(1)
FP8 = tl.constexpr(2)
_KINDS = {torch.int8: 1, torch.float8_e4m3fn: 2}

INT8_LIMIT = tl.constexpr(LIMITS[torch.int8])
FP8_LIMIT = tl.constexpr(LIMITS[torch.float8_e4m3fn])
# An e4m3 code moved into a float16 stands for its value / 2**8: the exponents' biases are 7 and 15.
FP8_SHIFT = tl.constexpr(256.0)
ROUND_INT = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding and taking it away again rounds to an integer, ties to even
ROUND_FP8 = tl.constexpr(8388608.0)  # 2**23: the same for numbers from 0 on


@dataclass(frozen=True, slots=True)
class KVLayout:
    """One layer. Scales are those of a quantized cache, else something that is never read."""

    kind: int
    num_kv_heads: int
    key: torch.Tensor  # [num_blocks, block_size, num_kv_heads, head_dim]
    value: torch.Tensor
    key_scale: torch.Tensor  # [num_blocks, block_size, num_kv_heads] float32
    value_scale: torch.Tensor

    @classmethod
    def of(cls, kv: LayerKV) -> "KVLayout":
        assert all(plane.is_contiguous() for plane in kv)
        dtype, num_kv_heads = kv[0].dtype, kv[0].shape[2]
        if not is_quantized(dtype):
            return cls(0, num_kv_heads, kv[0], kv[1], kv[0], kv[1])
        k, v, k_scale, v_scale = kv
        if dtype != torch.int8:
            k, v = k.view(torch.uint8), v.view(torch.uint8)
        return cls(_KINDS[dtype], num_kv_heads, k, v, k_scale, v_scale)


@jit
def load_codes(
    plane_ptr: tl.tensor,  # [num_slots, NUM_KV_HEADS, HEAD_DIM]: keys or values
    slots: tl.tensor,  # [N] int64
    in_range: tl.tensor,  # [N]
    kv_head: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    ELEMENT: tl.constexpr,
    KIND: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """One head of some slots as numbers of ELEMENT, [N, DIM_TILE]: zero beyond HEAD_DIM, and out of range if MASKED."""
    dim = tl.arange(0, DIM_TILE)
    pointers = plane_ptr + ((slots.to(tl.int64) * NUM_KV_HEADS + kv_head) * HEAD_DIM)[:, None] + dim[None, :]
    if MASKED or DIM_TILE > HEAD_DIM:
        stored = tl.load(pointers, mask=in_range[:, None] & (dim < HEAD_DIM)[None, :], other=0)
    else:
        stored = tl.load(pointers)
    return decoded(stored, ELEMENT, KIND)


@jit
def load_scale(pointers: tl.tensor, in_range: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """What the numbers of `load_codes` of a quantized cache must be multiplied with, [N] float32."""
    scale = tl.load(pointers, mask=in_range, other=0.0)
    if KIND == FP8:
        scale = scale * FP8_SHIFT
    return scale


@jit
def load_tile(
    planes: tl.tuple,  # pointers: keys, values, scales of both
    slots: tl.tensor,  # [N] int64
    in_range: tl.tensor,  # [N]
    kv_head: tl.tensor,
    scale: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    ELEMENT: tl.constexpr,  # of the queries
    KIND: tl.constexpr,
    MASKED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """(keys, values, what scores are multiplied with, what values must be: `scale`, unread, if KIND is PLAIN)."""
    key_ptr, value_ptr, key_scale_ptr, value_scale_ptr = planes
    # The scales of values go into the softmax weights, where float16 would run out of exponents.
    WEIGHTED: tl.constexpr = tl.bfloat16 if KIND != PLAIN and tl.float16 == ELEMENT else ELEMENT
    key = load_codes(key_ptr, slots, in_range, kv_head, NUM_KV_HEADS, HEAD_DIM, DIM_TILE, ELEMENT, KIND, MASKED)
    value = load_codes(value_ptr, slots, in_range, kv_head, NUM_KV_HEADS, HEAD_DIM, DIM_TILE, WEIGHTED, KIND, MASKED)
    scores_scale = scale
    value_scale = scale
    if KIND != PLAIN:
        offsets = slots.to(tl.int64) * NUM_KV_HEADS + kv_head
        scores_scale = scale * load_scale(key_scale_ptr + offsets, in_range, KIND)[None, :]
        value_scale = load_scale(value_scale_ptr + offsets, in_range, KIND)
    return key, value, scores_scale, value_scale


@jit
def decoded(stored: tl.tensor, ELEMENT: tl.constexpr, KIND: tl.constexpr) -> tl.tensor:
    """Codes as numbers of ELEMENT, exactly; FP8 codes stand for 2**8 times what comes out."""
    if KIND == PLAIN:
        numbers = stored
    elif KIND == INT8:
        numbers = stored.to(tl.float32).to(ELEMENT)  # the interpreter cannot make bfloat16 of integers
    else:
        bits = stored.to(tl.int16)
        half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        numbers = half.to(tl.float16, bitcast=True).to(tl.float32).to(ELEMENT)
    return numbers


@jit
def largest_of(x: tl.tensor) -> tl.tensor:
    """Largest magnitude of each row [M, N] float32; infinite where anything is not a number, which max would hide."""
    return tl.max(tl.where(x == x, tl.abs(x), float("inf")), 1)


@jit
def scale_of(largest: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """The scale that is stored."""
    LIMIT: tl.constexpr = INT8_LIMIT if KIND == INT8 else FP8_LIMIT
    return largest / LIMIT


@jit
def encoded(x: tl.tensor, largest: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """Codes of rows [M, N] float32 whose largest magnitudes are known; anything where those are infinite."""
    usable = (largest > 0.0) & (largest < float("inf"))
    divisor = tl.where(usable, largest, 1.0)
    LIMIT: tl.constexpr = INT8_LIMIT if KIND == INT8 else FP8_LIMIT
    factor = tl.full(divisor.shape, LIMIT, tl.float32) / divisor
    scaled = tl.where(usable[:, None], x * factor[:, None], 0.0)
    scaled = tl.minimum(tl.maximum(scaled, -LIMIT), LIMIT)
    if KIND == INT8:
        codes = ((scaled + ROUND_INT) - ROUND_INT).to(tl.int8)
    else:
        bits = scaled.to(tl.int32, bitcast=True)
        size = tl.abs(scaled)
        size_bits = bits & 0x7FFFFFFF
        # 3 of 23 mantissa bits stay, ties to even; 120 is the difference of the exponents' biases
        normal = ((size_bits + 0x7FFFF + ((size_bits >> 20) & 1)) >> 20) - (120 << 3)
        subnormal = ((size * 512.0 + ROUND_FP8) - ROUND_FP8).to(tl.int32)
        codes = (tl.where(size < 0.015625, subnormal, normal) | ((bits >> 24) & 0x80)).to(tl.uint8)
    return codes
