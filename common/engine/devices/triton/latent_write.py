"""Rotary position embedding of the parts of queries and latents that turn, fused with the write of the latents."""

import torch
import triton
import triton.language as tl

from common.engine.contract.attention import LayerKV
from common.engine.devices.triton.launch import jit, launch
from common.engine.devices.triton.rope_write import TOKEN_TILE, rotate_rows


def rope_and_write_latent_reference(
    q: torch.Tensor,
    latent: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    kv: LayerKV,
    slot_mapping: torch.Tensor,
) -> torch.Tensor:
    """The same in float64."""
    size = q.shape[2]
    cos, sin = cos_sin[positions][:, None, :].chunk(2, dim=-1)

    def rotate(x: torch.Tensor) -> torch.Tensor:
        first, second = x.double().chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)

    kept = slot_mapping >= 0
    rows = torch.cat((latent[:, :-size], rotate(latent[:, None, -size:])[:, 0]), dim=1)
    kv[0].flatten(0, 1)[slot_mapping[kept]] = rows[kept]
    return rotate(q)


@jit
def rope_and_write_latent_kernel(
    q_out_ptr: tl.tensor,  # [num_tokens, NUM_HEADS, TAIL], contiguous
    q_ptr: tl.tensor,  # [num_tokens, NUM_HEADS, TAIL], strides given
    latent_ptr: tl.tensor,  # [num_tokens, RANK + TAIL], contiguous
    cos_sin_ptr: tl.tensor,  # [max_position, TAIL] float32
    positions_ptr: tl.tensor,  # [num_tokens] int64
    plane_ptr: tl.tensor,  # [num_blocks * block_size, RANK + TAIL]
    slot_mapping_ptr: tl.tensor,  # [num_tokens] int64
    num_tokens: tl.tensor,
    q_token_stride: tl.tensor,
    q_head_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    RANK: tl.constexpr,
    RANK_TILE: tl.constexpr,
    TAIL: tl.constexpr,
    TAIL_TILE: tl.constexpr,
    TOKENS: tl.constexpr,
) -> None:
    """grid: (cdiv(num_tokens, TOKENS), NUM_HEADS + 1), the last for the latents. A slot below 0 is not written."""
    HALF: tl.constexpr = TAIL // 2
    HALF_TILE: tl.constexpr = TAIL_TILE // 2
    head = tl.program_id(1)
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    exists = token < num_tokens
    position = tl.load(positions_ptr + token, mask=exists, other=0).to(tl.int64)
    half = tl.arange(0, HALF_TILE)
    angle_ptr = cos_sin_ptr + (position * TAIL)[:, None] + half[None, :]
    angle_mask = exists[:, None] & (half < HALF)[None, :]
    cos = tl.load(angle_ptr, mask=angle_mask, other=0.0)
    sin = tl.load(angle_ptr + HALF, mask=angle_mask, other=0.0)
    if head < NUM_HEADS:
        source = token * q_token_stride + head * q_head_stride
        target = (token * NUM_HEADS + head) * TAIL
        rotate_rows(q_ptr, source, q_out_ptr, target, cos, sin, exists, HALF, HALF_TILE)
    else:
        slot = tl.load(slot_mapping_ptr + token, mask=exists, other=-1).to(tl.int64)
        is_written = slot >= 0
        source = token * (RANK + TAIL)
        target = slot * (RANK + TAIL)
        dim = tl.arange(0, RANK_TILE)
        mask = is_written[:, None] & (dim < RANK)[None, :]
        rows = tl.load(latent_ptr + source[:, None] + dim[None, :], mask=mask, other=0.0)
        tl.store(plane_ptr + target[:, None] + dim[None, :], rows, mask=mask)
        rotate_rows(latent_ptr, source + RANK, plane_ptr, target + RANK, cos, sin, is_written, HALF, HALF_TILE)


def rope_and_write_latent(
    q: torch.Tensor,  # [num_tokens, num_heads, tail]; may be a slice
    latent: torch.Tensor,  # [num_tokens, rank + tail], contiguous
    cos_sin: torch.Tensor,  # [max_position, tail] float32
    positions: torch.Tensor,  # [num_tokens] int64
    kv: LayerKV,
    slot_mapping: torch.Tensor,  # [num_tokens] int64; below 0: not written
) -> torch.Tensor:
    """Rotate q into a new tensor, and the last `tail` of the latents into the cache, together with what stays.

    Bounds are those of `rope_and_write`.
    """
    (plane,) = kv
    assert plane.is_contiguous()
    assert latent.is_contiguous()
    assert q.stride(2) == 1
    num_tokens, num_heads, tail = q.shape
    rank = latent.shape[1] - tail
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    launch(
        rope_and_write_latent_kernel, (triton.cdiv(num_tokens, TOKEN_TILE), num_heads + 1), q.device,
        q_out, q, latent, cos_sin, positions, plane, slot_mapping, num_tokens, q.stride(0), q.stride(1),
        NUM_HEADS=num_heads, RANK=rank, RANK_TILE=triton.next_power_of_2(rank),
        TAIL=tail, TAIL_TILE=triton.next_power_of_2(tail), TOKENS=TOKEN_TILE, num_warps=2,
    )  # fmt: skip
    return q_out
