"""Causal attention of many new tokens over paged KV, in one launch for all sequences.

FlashAttention-2 (Dao 2023) over a paged cache (Kwon et al. 2023): a program owns a tile of rows, streams the keys
and values it may see, and keeps a running softmax. The rows of a tile are (query, head) pairs of one KV head, so
the heads that share a KV head share its loads.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from common.kernels.attention_reference import paged_attention_reference
from common.kernels.launch import jit, launch, nvidia_arch
from common.kernels.tiles import is_visible, normalized, online_softmax, paged_rows, scaled_scores
from common.model.backend import AttentionBatch

prefill_attention_reference = paged_attention_reference


@dataclass(frozen=True, slots=True)
class PrefillTiles:
    """Rows and keys of a tile, and how a program runs."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def prefill_tiles(num_rows: int, head_dim: int, dtype: torch.dtype) -> PrefillTiles:
    """Sized so that nothing spills on any target of tests/tools/kernel_table.py."""
    if dtype == torch.float32:
        block_m, block_n = (32, 32) if head_dim <= 64 else (32, 16) if head_dim <= 128 else (16, 16)
        return PrefillTiles(block_m, block_n, num_warps=8, num_stages=1)
    if head_dim > 128:
        return PrefillTiles(block_m=64, block_n=32, num_warps=8, num_stages=2)
    # sm_80 and gfx942 hold the products in registers, where sm_90 reads them from shared memory
    block_n = 64 if head_dim <= 64 or nvidia_arch() >= 90 else 32
    if num_rows <= 64:
        return PrefillTiles(block_m=64, block_n=block_n if head_dim <= 64 else 32, num_warps=4, num_stages=2)
    return PrefillTiles(block_m=128, block_n=block_n, num_warps=8, num_stages=3)


@jit
def find_sequence(
    cu_seqlens_q_ptr: tl.tensor, tile: tl.tensor, num_seqs: tl.tensor, BLOCK_Q: tl.constexpr
) -> tl.tensor:
    """The sequence that owns a tile: sequence i has tiles from cu_seqlens_q[i] // BLOCK_Q + i on."""
    low = tl.zeros_like(tile)
    high = low + num_seqs
    while low < high:
        middle = (low + high) // 2
        if tl.load(cu_seqlens_q_ptr + middle) // BLOCK_Q + middle <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@jit
def attend_keys(
    query: tl.tensor,  # [BLOCK_M, DIM_TILE]
    query_pos: tl.tensor,  # [BLOCK_M]
    state: tl.tuple,  # acc [BLOCK_M, DIM_TILE] float32, row_max [BLOCK_M], row_sum [BLOCK_M]
    start: tl.tensor,
    end: tl.tensor,
    key_ptr: tl.tensor,  # [num_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM]
    value_ptr: tl.tensor,  # the same
    block_table_ptr: tl.tensor,  # [max_blocks] int32
    kv_head: tl.tensor,
    scale: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tuple:
    """Stream keys [start, end) through the running softmax. Not MASKED: every row sees every key."""
    acc, row_max, row_sum = state
    dim = tl.arange(0, DIM_TILE)
    for first_key in range(start, end, BLOCK_N):
        key_pos = first_key + tl.arange(0, BLOCK_N)
        in_range = key_pos < end
        rows = paged_rows(block_table_ptr, key_pos, in_range, kv_head, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
        offsets = rows[:, None] + dim[None, :]
        if MASKED or DIM_TILE > HEAD_DIM:
            mask = in_range[:, None] & (dim < HEAD_DIM)[None, :]
            key = tl.load(key_ptr + offsets, mask=mask, other=0.0)
            value = tl.load(value_ptr + offsets, mask=mask, other=0.0)
        else:
            key = tl.load(key_ptr + offsets)
            value = tl.load(value_ptr + offsets)
        scores = scaled_scores(query, key, scale, SOFT_CAP)
        if MASKED:
            visible = is_visible(query_pos, key_pos, WINDOW) & in_range[None, :]
            scores = tl.where(visible, scores, float("-inf"))
        acc, row_max, row_sum = online_softmax(scores, value, acc, row_max, row_sum)
    return acc, row_max, row_sum


@jit
def prefill_attention_kernel(
    out_ptr: tl.tensor,  # [num_tokens, num_heads, HEAD_DIM], contiguous
    q_ptr: tl.tensor,  # [num_tokens, num_heads, HEAD_DIM], strides given
    key_ptr: tl.tensor,  # [num_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM]
    value_ptr: tl.tensor,  # the same
    block_tables_ptr: tl.tensor,  # [num_seqs, max_blocks] int32
    cu_seqlens_q_ptr: tl.tensor,  # [num_seqs + 1] int32
    seq_lens_ptr: tl.tensor,  # [num_seqs] int32
    num_seqs: tl.tensor,
    scale: tl.tensor,
    q_token_stride: tl.tensor,
    q_head_stride: tl.tensor,
    block_table_stride: tl.tensor,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
) -> None:
    """grid: (upper bound of query tiles over all sequences, NUM_KV_HEADS)."""
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    # The last tile of a sequence sees the most keys: start with it, so that no long program starts last.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    seq = find_sequence(cu_seqlens_q_ptr, tile, num_seqs, BLOCK_Q)
    first_token = tl.load(cu_seqlens_q_ptr + seq)
    query_len = tl.load(cu_seqlens_q_ptr + seq + 1) - first_token
    first_query = (tile - first_token // BLOCK_Q - seq) * BLOCK_Q
    if first_query >= query_len:
        return
    seq_len = tl.load(seq_lens_ptr + seq)
    block_table_ptr = block_tables_ptr + seq.to(tl.int64) * block_table_stride

    row = tl.arange(0, BLOCK_M)
    query_idx = first_query + row // GROUP
    head = kv_head * GROUP + row % GROUP
    token = (first_token + query_idx).to(tl.int64)
    dim = tl.arange(0, DIM_TILE)
    row_mask = ((row < BLOCK_Q * GROUP) & (query_idx < query_len))[:, None] & (dim < HEAD_DIM)[None, :]
    q_offsets = (token * q_token_stride + head * q_head_stride)[:, None] + dim[None, :]
    query = tl.load(q_ptr + q_offsets, mask=row_mask, other=0.0)

    first_pos = seq_len - query_len + first_query
    end = tl.minimum(first_pos + BLOCK_Q, seq_len)
    acc = tl.zeros([BLOCK_M, DIM_TILE], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    state = (acc, row_max, row_sum)
    query_pos = first_pos + row // GROUP
    if WINDOW > 0:
        masked_from = tl.maximum(first_pos - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    else:
        masked_from = (first_pos + 1) // BLOCK_N * BLOCK_N
        state = attend_keys(
            query, query_pos, state, 0, masked_from, key_ptr, value_ptr, block_table_ptr, kv_head, scale,
            BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, DIM_TILE, BLOCK_N, WINDOW, SOFT_CAP, MASKED=False,
        )  # fmt: skip
    state = attend_keys(
        query, query_pos, state, masked_from, end, key_ptr, value_ptr, block_table_ptr, kv_head, scale,
        BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, DIM_TILE, BLOCK_N, WINDOW, SOFT_CAP, MASKED=True,
    )  # fmt: skip
    acc, row_max, row_sum = state
    out_offsets = ((token * NUM_KV_HEADS * GROUP + head) * HEAD_DIM)[:, None] + dim[None, :]
    tl.store(out_ptr + out_offsets, normalized(acc, row_sum).to(out_ptr.dtype.element_ty), mask=row_mask)


def prefill_attention(
    q: torch.Tensor,  # [num_tokens, num_heads, head_dim], last dimension contiguous
    kv: torch.Tensor,  # [2, num_blocks, block_size, num_kv_heads, head_dim], contiguous
    batch: AttentionBatch,
    scale: float,
    *,
    window: int = 0,
    soft_cap: float = 0.0,
) -> torch.Tensor:
    """Attention of every new token over its sequence; a sequence may have any number of them, also one or none."""
    assert kv.is_contiguous()
    assert q.stride(-1) == batch.block_tables.stride(-1) == 1
    num_tokens, num_heads, head_dim = q.shape
    _, _, block_size, num_kv_heads, _ = kv.shape
    group = num_heads // num_kv_heads
    tiles = prefill_tiles(batch.max_query_len * group, head_dim, q.dtype)
    num_seqs = batch.seq_lens.shape[0]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    grid = (num_tokens // (tiles.block_m // group) + num_seqs if num_tokens else 0, num_kv_heads)
    launch(
        prefill_attention_kernel, grid, q.device,
        out, q, kv[0], kv[1], batch.block_tables, batch.cu_seqlens_q, batch.seq_lens, num_seqs, scale,
        q.stride(0), q.stride(1), batch.block_tables.stride(0),
        GROUP=group, BLOCK_SIZE=block_size, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim,
        DIM_TILE=triton.next_power_of_2(head_dim), BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n,
        WINDOW=window, SOFT_CAP=soft_cap, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    return out
