"""Rotary position embedding of q and k (Su et al. 2021, half-rotation form) fused with the write of k and v."""

import torch
import triton
import triton.language as tl

from common.engine.contract.attention import LayerKV
from common.engine.devices.triton.kv_layout import PLAIN, KVLayout, encoded, largest_of, scale_of
from common.engine.devices.triton.launch import jit, launch
from common.engine.kv.attention_planes import write_rows
from common.engine.kv.quantized import is_quantized

TOKEN_TILE = 16


def rope_and_write_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    kv: LayerKV,
    slot_mapping: torch.Tensor,
) -> torch.Tensor:
    """The same in float64; a quantized cache takes codes of the unrounded rotation."""
    cos, sin = cos_sin[positions][:, None, :].chunk(2, dim=-1)

    def rotate(x: torch.Tensor) -> torch.Tensor:
        first, second = x.double().chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    kept = slot_mapping >= 0
    stored = torch.float32 if is_quantized(kv[0].dtype) else kv[0].dtype
    write_rows(kv, slot_mapping[kept], rotate(k)[kept].to(stored), v[kept].to(stored))
    return rotate(q).to(q.dtype)


@jit
def rotate_rows(
    source_ptr: tl.tensor,
    source_rows: tl.tensor,  # [TOKENS] int64 offsets
    target_ptr: tl.tensor,
    target_rows: tl.tensor,  # [TOKENS] int64 offsets
    cos: tl.tensor,  # [TOKENS, HALF_TILE] float32
    sin: tl.tensor,
    keep: tl.tensor,  # [TOKENS]
    HALF: tl.constexpr,
    HALF_TILE: tl.constexpr,
) -> None:
    """Rotate one head of each token from source to target, where kept."""
    dim = tl.arange(0, HALF_TILE)
    mask = keep[:, None] & (dim < HALF)[None, :]
    source = source_ptr + source_rows[:, None] + dim[None, :]
    target = target_ptr + target_rows[:, None] + dim[None, :]
    first = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)
    element = target_ptr.dtype.element_ty
    tl.store(target, (first * cos - second * sin).to(element), mask=mask)
    tl.store(target + HALF, (second * cos + first * sin).to(element), mask=mask)


@jit
def encode_rotated(
    source_ptr: tl.tensor,
    source_rows: tl.tensor,  # [TOKENS] int64 offsets
    target_ptr: tl.tensor,  # codes
    target_rows: tl.tensor,  # [TOKENS] int64 offsets
    scale_ptrs: tl.tensor,  # [TOKENS]
    cos: tl.tensor,  # [TOKENS, HALF_TILE] float32
    sin: tl.tensor,
    keep: tl.tensor,  # [TOKENS]
    HALF: tl.constexpr,
    HALF_TILE: tl.constexpr,
    KIND: tl.constexpr,
) -> None:
    """`rotate_rows` into codes and their scale."""
    dim = tl.arange(0, HALF_TILE)
    mask = keep[:, None] & (dim < HALF)[None, :]
    source = source_ptr + source_rows[:, None] + dim[None, :]
    target = target_ptr + target_rows[:, None] + dim[None, :]
    low = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)
    first = low * cos - high * sin
    second = high * cos + low * sin
    largest = tl.maximum(largest_of(first), largest_of(second))
    tl.store(target, encoded(first, largest, KIND), mask=mask)
    tl.store(target + HALF, encoded(second, largest, KIND), mask=mask)
    tl.store(scale_ptrs, scale_of(largest, KIND), mask=keep)


@jit
def rope_and_write_kernel(
    q_out_ptr: tl.tensor,  # [num_tokens, NUM_KV_HEADS * GROUP, HEAD_DIM], contiguous
    q_ptr: tl.tensor,  # [num_tokens, NUM_KV_HEADS * GROUP, HEAD_DIM], token stride given
    k_ptr: tl.tensor,  # [num_tokens, NUM_KV_HEADS, HEAD_DIM], token stride given
    v_ptr: tl.tensor,  # the same
    cos_sin_ptr: tl.tensor,  # [max_position, HEAD_DIM] float32
    positions_ptr: tl.tensor,  # [num_tokens] int64
    key_ptr: tl.tensor,  # [num_blocks * block_size, NUM_KV_HEADS, HEAD_DIM]
    value_ptr: tl.tensor,  # the same
    key_scale_ptr: tl.tensor,  # [num_blocks, BLOCK_SIZE, NUM_KV_HEADS] float32; written only if KIND is not PLAIN
    value_scale_ptr: tl.tensor,
    slot_mapping_ptr: tl.tensor,  # [num_tokens] int64
    num_tokens: tl.tensor,
    q_token_stride: tl.tensor,
    k_token_stride: tl.tensor,
    v_token_stride: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    TOKENS: tl.constexpr,
    KIND: tl.constexpr,
) -> None:
    """grid: (cdiv(num_tokens, TOKENS), NUM_KV_HEADS). A slot below 0 is not written."""
    HALF: tl.constexpr = HEAD_DIM // 2
    HALF_TILE: tl.constexpr = DIM_TILE // 2
    kv_head = tl.program_id(1)
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    exists = token < num_tokens
    slot = tl.load(slot_mapping_ptr + token, mask=exists, other=-1).to(tl.int64)
    position = tl.load(positions_ptr + token, mask=exists, other=0).to(tl.int64)
    half = tl.arange(0, HALF_TILE)
    angle_ptr = cos_sin_ptr + (position * HEAD_DIM)[:, None] + half[None, :]
    angle_mask = exists[:, None] & (half < HALF)[None, :]
    cos = tl.load(angle_ptr, mask=angle_mask, other=0.0)
    sin = tl.load(angle_ptr + HALF, mask=angle_mask, other=0.0)

    for member in tl.static_range(GROUP):
        head = kv_head * GROUP + member
        source = token * q_token_stride + head * HEAD_DIM
        target = (token * (NUM_KV_HEADS * GROUP) + head) * HEAD_DIM
        rotate_rows(q_ptr, source, q_out_ptr, target, cos, sin, exists, HALF, HALF_TILE)

    is_written = slot >= 0
    target = (slot * NUM_KV_HEADS + kv_head) * HEAD_DIM
    source = token * k_token_stride + kv_head * HEAD_DIM
    dim = tl.arange(0, DIM_TILE)
    mask = is_written[:, None] & (dim < HEAD_DIM)[None, :]
    value_source = token * v_token_stride + kv_head * HEAD_DIM
    value = tl.load(v_ptr + value_source[:, None] + dim[None, :], mask=mask, other=0.0)
    value_target = value_ptr + target[:, None] + dim[None, :]
    if KIND == PLAIN:
        rotate_rows(k_ptr, source, key_ptr, target, cos, sin, is_written, HALF, HALF_TILE)
        tl.store(value_target, value.to(value_ptr.dtype.element_ty), mask=mask)
    else:
        scale_at = slot * NUM_KV_HEADS + kv_head
        scales = key_scale_ptr + scale_at
        encode_rotated(k_ptr, source, key_ptr, target, scales, cos, sin, is_written, HALF, HALF_TILE, KIND)
        largest = largest_of(value.to(tl.float32))
        tl.store(value_target, encoded(value.to(tl.float32), largest, KIND), mask=mask)
        tl.store(value_scale_ptr + scale_at, scale_of(largest, KIND), mask=is_written)


def rope_and_write(
    q: torch.Tensor,  # [num_tokens, num_heads, head_dim]; q, k and v may be slices of one fused projection
    k: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
    v: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
    cos_sin: torch.Tensor,  # [max_position, head_dim] float32
    positions: torch.Tensor,  # [num_tokens] int64
    kv: LayerKV,
    slot_mapping: torch.Tensor,  # [num_tokens] int64; below 0: not written
) -> torch.Tensor:
    """Rotate q into a new tensor, and k into the cache together with v, in codes and scales if that is quantized.

    Within 2 * 2**-p of the reference for inputs in [-1, 1] (p = 21 in float32, 7 in bfloat16, 10 in float16); codes are
    at most one apart.
    """
    layout = KVLayout.of(kv)
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    assert all(x[:1].is_contiguous() for x in (q, k, v))
    assert head_dim % 2 == 0
    dim_tile = triton.next_power_of_2(head_dim)
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    launch(
        rope_and_write_kernel, (triton.cdiv(num_tokens, TOKEN_TILE), num_kv_heads), q.device,
        q_out, q, k, v, cos_sin, positions, layout.key, layout.value, layout.key_scale, layout.value_scale,
        slot_mapping, num_tokens,
        q.stride(0), k.stride(0), v.stride(0),
        NUM_KV_HEADS=num_kv_heads, GROUP=num_heads // num_kv_heads, HEAD_DIM=head_dim,
        DIM_TILE=dim_tile, TOKENS=TOKEN_TILE, KIND=layout.kind,
        num_warps=max(1, dim_tile // 64),  # 8 elements per thread and load also where a warp has 64 threads
    )  # fmt: skip
    return q_out
